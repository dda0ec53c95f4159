"""Control groups of this process, with which a container or a job limits it (cgroups(7)), v1 or v2."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the groups in which a controller may limit this process, its own group first.

    A container may not see the groups above its own. There are none outside Linux.
    """
    try:
        lines = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers and controller not in controllers.split(","):
            continue
        top = ROOT / controller if controllers else ROOT
        lowest = top / path.lstrip("/")
        for group in (lowest, *lowest.parents):
            yield group
            if group == top:
                break


def cpus() -> float:
    """Return the CPU quota, in cores, that this process shares with others of its groups; infinity without a quota.

    ``docker run --cpus=2`` and Kubernetes limits are quotas: all cores are visible, but a process that uses more of
    them is throttled for the rest of each 100 ms.
    """
    cores = math.inf
    for group in groups("cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with suppress(OSError, ValueError):  # "max", or not a group with a quota
                quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
                cores = min(cores, quota / period) if quota > 0 else cores
    return cores
