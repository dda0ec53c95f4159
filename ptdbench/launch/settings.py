"""What changes results or the speed of a process: environment variables, set here or for a run, and its CPU cores."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal

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

#: What torch reads when it is imported, and what stands for it until a rank is there.
_SANITIZER, _HIDDEN = "TORCH_CUDA_SANITIZER", "PTDBENCH_CUDA_SANITIZER"


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set, by name; of a path only the last part, as the others are of the machine."""
    names = (name for name in sorted(environ) if name.startswith(PREFIXES) and not _SECRET.search(name))
    return {
        name: f"…/{PurePosixPath(value).name}" if (value := environ[name]).startswith(("/", "~")) else value
        for name in names
    }


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


def leave_sanitizer_to_ranks(environ: MutableMapping[str, str]) -> None:
    """Hide that torch's sanitizer is asked for: with it every operation, also on the CPU, uses CUDA.

    The process that starts ranks has no business there, nor has the fork server, whose forks could not use CUDA then.
    Call this before torch is imported.
    """
    if _SANITIZER in environ:
        environ[_HIDDEN] = environ.pop(_SANITIZER)


def enable_sanitizer(environ: MutableMapping[str, str]) -> None:
    """Look for races on the device, if a person asks for it, as torch does when it is imported."""
    if _HIDDEN not in environ:
        return
    environ[_SANITIZER] = environ.pop(_HIDDEN)
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    enable_cuda_sanitizer()


def log_errors_only(environ: Mapping[str, str]) -> None:
    """Let torch's C++ log errors only, where a person has not set ``TORCH_CPP_LOG_LEVEL``.

    What it warns of is no news, and stands in the middle of what is shown live: that messages between two stages keep
    their order, that memory is at its end, that a block is older than the profiler.
    """
    import torch

    if "TORCH_CPP_LOG_LEVEL" in environ:
        return
    with suppress(OSError, ValueError):  # another platform, or another name in another version: then it warns
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
        ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2  # errors, as glog counts


def here() -> dict[str, str]:
    """Return the variables that are set in this process."""
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


Cores = frozenset[int]


def own_cores() -> Cores:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def share_cores(
    of_ranks: Sequence[Cores], local_rank: int, wanted: int | Literal["auto"], quota: float = math.inf
) -> tuple[int, Cores | None]:
    """Return the threads of a rank, and the cores to bind it to.

    Args:
        of_ranks: The cores that each rank of the node may run on, by local rank. Ranks that a launcher has bound
            have cores of their own; the others share all that there are.
        local_rank: Which of the ranks.
        wanted: Cores for each rank, or ``auto`` for an equal share.
        quota: How many cores' time all these ranks get together.

    Returns:
        ``(threads, cores)``; the cores are ``None`` where the rank stays as it is: no number was asked for, or there
        are not as many for every rank.
    """
    own = of_ranks[local_rank]
    sharing = [rank for rank, cores in enumerate(of_ranks) if cores & own]
    if wanted == "auto":
        return max(1, int(min(len(own) / len(sharing), quota / len(of_ranks)))), None
    place = sharing.index(local_rank) * wanted
    alike = all(of_ranks[rank] == own for rank in sharing)
    if not alike or len(own) < len(sharing) * wanted:
        return wanted, None
    return wanted, frozenset(sorted(own)[place : place + wanted])


def bind_cores(threads: int, cores: Cores | None) -> None:
    """Keep this process to ``threads`` threads, and to ``cores`` if there are any."""
    import torch

    _given()
    # Both: torch may have fixed its number when it was imported, and other libraries read the variable.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if cores and hasattr(os, "sched_setaffinity"):
        # Every thread: one that runs already does not follow the main thread to other cores.
        threads_now = Path("/proc/self/task")
        for thread in [int(path.name) for path in threads_now.iterdir()] if threads_now.exists() else [0]:
            # One that ended since it was listed has nothing left to bind.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


def unbind_thread() -> None:
    """Let the calling thread run on all cores that this process was given, also on those that :func:`bind_cores` took.

    For work beside the steps, which would otherwise take its turns on a core that computes while another may be idle.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(threading.get_native_id(), _given())


@cache
def _given() -> Cores:
    """Return the cores that this process could run on when first asked, as :func:`bind_cores` does before it binds."""
    return own_cores()
