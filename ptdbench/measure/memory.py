"""Memory: the peak of one rank, and the memory available on its host, in bytes.

On a GPU the peak is of PyTorch's caching allocator, without the CUDA context, NCCL's buffers and unused cache. On a CPU
it is the peak resident set of the process, with interpreter, libraries and mapped files. They are not comparable.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ptdbench.launch import settings

if TYPE_CHECKING:
    import torch


def _cuda() -> Any:
    """Return ``torch.cuda``, imported only for a GPU, as importing torch takes seconds."""
    import torch

    return torch.cuda


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process on the device since :func:`reset_peak`, or since its start."""
    if device.type == "cuda":
        return int(_cuda().max_memory_allocated(device))
    return _peak_resident_bytes()


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the peak memory reserved by torch's allocator on a GPU since :func:`reset_peak`; 0 on a CPU."""
    return int(_cuda().max_memory_reserved(device)) if device.type == "cuda" else 0


def outside_and_size(device: torch.device) -> tuple[int, int]:
    """Return the bytes used outside torch's allocator, by any process, and the size of a GPU's memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    free, size = _cuda().mem_get_info(device)
    return max(size - free - _cuda().memory_reserved(device), 0), size


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the memory in use; on a CPU it stays if the kernel refuses."""
    if device.type == "cuda":
        _cuda().reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM, see proc_pid_clear_refs(5)


def release(device: torch.device) -> None:
    """Free objects in reference cycles, and return cached memory, including pinned host memory.

    Call it before building something else to measure: a model refers to itself, through its wrapped forward and the
    hooks of DDP and FSDP.
    """
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # of pinned memory
    else:
        trim()


def trim() -> None:
    """Return to the system the freed host memory that glibc holds."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def no_collection() -> Iterator[None]:
    """Return a context without garbage collection, which would traverse all objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _peak_resident_bytes() -> int:
    with suppress(OSError):
        if match := re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_use(device: torch.device) -> Callable[[], int]:
    """Return a function for the memory in use, as in :func:`peak_bytes`; it does not synchronize.

    Call this in the process to measure. The file stays open: after a step, with cold caches, opening it would cost far
    more than reading it (``make overhead``).
    """
    if device.type == "cuda":
        statistics = partial(_cuda().memory_stats_as_nested_dict, device)
        return lambda: int(statistics()["allocated_bytes"]["all"]["current"])  # skips building a flat table of all
    pages = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115 # closed with the returned function
    size = resource.getpagesize()
    return lambda: int(os.pread(pages.fileno(), 100, 0).split()[1]) * size


def oom_kills() -> int:
    """Return the kernel's count of OOM kills in this control group, else on the machine; 0 if not reported."""
    for path in [*(group / "memory.events" for group in settings.control_groups("memory")), Path("/proc/vmstat")]:
        with suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(match[1])
    return 0


#: Files of a control group with its limit and its usage, and the field of ``memory.stat`` for page cache: v2, v1.
_LIMITED = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class HostMemory:
    """Memory of this host, or of this process's container or job."""

    total: int  #: Total bytes.
    available: int  #: Bytes that can be allocated now without swapping.


def host_memory() -> HostMemory:
    """Return the host's memory, capped by the limits of this process's container or SLURM job (control groups)."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for group in settings.control_groups("memory"):
        for *names, cached in _LIMITED:
            with suppress(OSError, ValueError):  # "max", or not a group with a limit
                limit, used = (int((group / name).read_text()) for name in names)
                cache = re.search(rf"^{cached} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                used -= int(cache[1]) if cache else 0
                total, available = min(total, limit), min(available, max(limit - used, 0))
    return HostMemory(total, available)
