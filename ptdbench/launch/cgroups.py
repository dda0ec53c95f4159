"""Control groups of this process, by which a container or a job limits it (cgroups(7)), v1 or v2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that a controller may limit this process by, its own first.

    A container may not see those above its own. Elsewhere than on Linux there are none.
    """
    try:
        lines = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers and controller not in controllers.split(","):
            continue
        top = ROOT / controller if controllers else ROOT
        own = top / path.lstrip("/")
        for group in (own, *own.parents):
            yield group
            if group == top:
                break


def cpus() -> float:
    """Return how many cores' time this process and all others of its groups get; infinity without a quota.

    ``docker run --cpus=2`` and the limits of Kubernetes are quotas: all cores are there, and who computes on more of
    them is stopped for the rest of each tenth of a second.
    """
    found = math.inf
    for group in groups("cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with suppress(OSError, ValueError):  # "max", or not a group with a quota
                quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
                found = min(found, quota / period) if quota > 0 else found
    return found
