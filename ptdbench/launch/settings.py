"""Environment variables that change what is computed or how fast: which are set here, and which are set for a run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import PurePosixPath

#: How their names begin: of torch and its compiler, of the libraries below it, of communication
#: and threads, and the container.
PREFIXES = (
    "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_",
    "NVIDIA_TF32_OVERRIDE", "NCCL_", "RCCL_", "GLOO_", "HIP_", "HSA_", "ROCR_", "MIOPEN_", "TP_", "UCX_", "FI_",
    "OMP_", "KMP_", "MKL_", "PTDBENCH_CONTAINER",
)  # fmt: skip

#: Parts of names that such a variable does not have.
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)

#: The variables that torch reads the allocator's options from, in this order in torch 2.11 to 2.15, when it first
#: allocates. The second is that of ROCm.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set, by name; of a path only the last part, as the others are of the machine."""
    names = (name for name in sorted(environ) if name.startswith(PREFIXES) and not _SECRET.search(name))
    return {name: _without_folders(environ[name]) for name in names}


def _without_folders(value: str) -> str:
    return f"…/{PurePosixPath(value).name}" if value.startswith(("/", "~")) else value


def let_segments_grow(environ: MutableMapping[str, str]) -> None:
    """Let torch's allocator of GPU memory map more pages to a segment instead of reserving another one.

    Activations of different sizes then leave fewer gaps that nothing fits into. Where a person has set one of the
    allocator's variables it stays as it is; not with ROCm, which does not support this everywhere, nor without a GPU.
    Call this before the process uses CUDA.
    """
    import torch

    supported = sys.platform == "linux" and torch.version.hip is None and torch.cuda.device_count() > 0
    if supported and not any(name in environ for name in _ALLOCATOR):
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def here() -> dict[str, str]:
    """The variables that are set in this process."""
    return settings(os.environ)


@contextmanager
def added(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
