"""Settings that affect the results or the speed of a process: environment variables, CPU cores, control groups."""

import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal

#: Prefixes of such variables: of torch and its compiler, the libraries below it, communication, threads, and the
#: container.
PREFIXES = (
    "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_",
    "NVIDIA_TF32_OVERRIDE", "NCCL_", "RCCL_", "GLOO_", "HIP_", "HSA_", "ROCR_", "MIOPEN_", "TP_", "UCX_", "FI_",
    "OMP_", "KMP_", "MKL_", "PTDBENCH_CONTAINER",
)  # fmt: skip

#: Names that may hold secrets, which are never recorded.
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)

#: The variables from which torch reads the allocator's options at its first allocation, in the order of torch 2.11 to
#: 2.15. The second is for ROCm.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

#: The variable from which torch's C++ code reads what to log at import.
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"

#: The variable that torch reads at import, and the one that holds its value until a rank starts.
_SANITIZER, _HIDDEN = "TORCH_CUDA_SANITIZER", "PTDBENCH_CUDA_SANITIZER"

#: The folder of control groups, and the file that names those of this process.
CGROUPS, CGROUP_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to record, by name; paths are cut to their last part, as the rest is machine-specific."""
    named = (name for name in sorted(environ) if name.startswith(PREFIXES) and name != _LOG_LEVEL)
    names = (name for name in named if not _SECRET.search(name))
    return {
        name: f"…/{PurePosixPath(value).name}" if (value := environ[name]).startswith(("/", "~")) else value
        for name in names
    }


def enable_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Enable expandable segments: torch's GPU allocator then maps more pages to a segment instead of reserving another.

    This reduces fragmentation by activations of different sizes. Allocator variables set by the user are respected. Not
    with ROCm, which does not support this everywhere, nor without a GPU. Call this before the process uses CUDA.
    """
    import torch

    supported = torch.version.hip is None and torch.cuda.device_count() > 0
    if supported and not any(name in environ for name in _ALLOCATOR):
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def defer_sanitizer(environ: MutableMapping[str, str]) -> None:
    """Hide the request for torch's CUDA sanitizer, with which every operation, even on the CPU, uses CUDA.

    The process that starts ranks must not use CUDA, nor the fork server, whose forks could not use it then. Call this
    before torch is imported.
    """
    if _SANITIZER in environ:
        environ[_HIDDEN] = environ.pop(_SANITIZER)


def enable_sanitizer(environ: MutableMapping[str, str]) -> None:
    """Enable torch's CUDA sanitizer, which finds data races, if the user requested it, as torch does at import."""
    if _HIDDEN in environ:
        environ[_SANITIZER] = environ.pop(_HIDDEN)
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()


def log_errors_only(environ: MutableMapping[str, str]) -> None:
    """Make torch's C++ code log only errors, unless the user has set another level; call this before torch is imported.

    Its warnings tell nothing new and disrupt the live display: that messages between two stages keep their order, that
    memory is exhausted, that a block is older than the profiler.
    """
    environ.setdefault(_LOG_LEVEL, "ERROR")


@contextmanager
def added(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context."""
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
    return frozenset(os.sched_getaffinity(0))


def share_cores(
    of_ranks: Sequence[Cores], local_rank: int, per_rank: int | Literal["auto"], quota: float = math.inf
) -> tuple[int, Cores | None]:
    """Return the number of threads of a rank, and the cores to bind it to.

    Args:
        of_ranks: The cores that each rank of the node may run on, by local rank. Ranks that a launcher has bound have
            their own cores; the others share all cores of the node.
        local_rank: The rank in question.
        per_rank: Number of cores for each rank, or ``auto`` for an equal share.
        quota: CPU quota of all these ranks together, in cores.

    Returns:
        ``(threads, cores)``; the cores are ``None`` if the rank's binding stays as it is: no number was requested, or
        there are not enough cores for every rank.
    """
    allowed = of_ranks[local_rank]
    sharing = [rank for rank, cores in enumerate(of_ranks) if cores & allowed]
    if per_rank == "auto":
        return max(1, int(min(len(allowed) / len(sharing), quota / len(of_ranks)))), None
    alike = all(of_ranks[rank] == allowed for rank in sharing)
    if not alike or len(allowed) < len(sharing) * per_rank:
        return per_rank, None
    first = sharing.index(local_rank) * per_rank
    return per_rank, frozenset(sorted(allowed)[first : first + per_rank])


def bind_cores(threads: int, cores: Cores | None) -> None:
    """Limit this process to ``threads`` threads, and bind it to ``cores`` unless ``None``."""
    import torch

    _original_cores()
    # Both: torch may have fixed its number at import, and other libraries read the variable.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if cores:
        # Every thread: those already running do not follow the main thread to other cores.
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended since it was listed
                os.sched_setaffinity(int(thread), cores)


def unbind_thread() -> None:
    """Let the calling thread run on all cores that this process had before :func:`bind_cores`.

    For background work, which would otherwise compete with the steps for a core while another may be idle.
    """
    os.sched_setaffinity(threading.get_native_id(), _original_cores())


def cpu_quota() -> float:
    """Return the CPU quota, in cores, that this process shares with others of its groups; infinity without a quota.

    ``docker run --cpus=2`` and Kubernetes limits are quotas: all cores are visible, but a process that uses more of
    them is throttled for the rest of each 100 ms.
    """
    cores = math.inf
    for group in control_groups("cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with suppress(OSError, ValueError):  # "max", or not a group with a quota
                quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
                cores = min(cores, quota / period) if quota > 0 else cores
    return cores


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups (cgroups(7), v1 or v2) in which a controller may limit this process.

    Its own group comes first. A container may not see the groups above its own.
    """
    try:
        lines = [line.split(":", 2) for line in CGROUP_OF_PROCESS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers and controller not in controllers.split(","):
            continue
        top = CGROUPS / controller if controllers else CGROUPS
        lowest = top / path.lstrip("/")
        for group in (lowest, *lowest.parents):
            yield group
            if group == top:
                break


@cache
def _original_cores() -> Cores:
    """Return the cores that this process could run on originally: :func:`bind_cores` calls this before it binds."""
    return own_cores()
