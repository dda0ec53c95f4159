"""The memory of this host that a run may take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class HostMemory:
    """Memory of this host, or of the container or job that this process is in.

    Attributes:
        total: Bytes.
        available: Bytes that can be allocated now without swapping.
    """

    total: int
    available: int


def host_memory(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> HostMemory:
    """The memory that the kernel reports, cut to the limits of this process's control groups (cgroups(7), v1 and v2).

    A container and a SLURM job may have less memory than their host, and a process that exceeds that is killed.
    """
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for limit, used in _cgroup_limits(cgroups, membership):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return HostMemory(total, available)


def _cgroup_limits(cgroups: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each control group with a limit that contains this process, without page cache."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:  # not Linux
        return
    for _, controllers, path in lines:
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            with suppress(
                OSError, ValueError
            ):  # "max", or not a group with a limit; a container may not see its parents
                limit, used = (int((group / name).read_text()) for name in names[:2])
                cache = re.search(rf"^{names[2]} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                yield limit, used - int(cache[1] if cache else 0)
            if group == root:
                break
