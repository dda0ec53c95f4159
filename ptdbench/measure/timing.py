"""Timing of messages.

As in nccl-tests, the ranks synchronize at a barrier before a block of repetitions but not between them, so that one
repetition may begin while another rank finishes the last; the block contains nothing else. Every repetition is timed
on every rank, and takes as long as its slowest rank: the ranks compare their lists once, after the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ptdbench.launch.collect import gather, most
from ptdbench.measure import clock
from ptdbench.problems import ConfigError, Problem, at_least

#: About the clock's resolution: avoids division by zero.
_TICK = 1e-9


@dataclass(frozen=True)
class Effort:
    """The measurement effort for one figure.

    Attributes:
        seconds: Target duration of the timed repetitions.
        min_repetitions: Minimum number of timed repetitions.
        max_repetitions: Maximum number of timed repetitions.
        warmup: Untimed repetitions, at least one; the fastest of them determines how many fit into ``seconds``.
        max_seconds: A size whose ``min_repetitions`` would take longer is skipped, and all larger ones.
    """

    seconds: float = 0.03
    min_repetitions: int = 5
    max_repetitions: int = 1000
    warmup: int = 2
    max_seconds: float = 1.0

    def repetitions(self, once: float) -> int:
        """Return the number of timed repetitions of something that takes ``once`` seconds."""
        return max(self.min_repetitions, min(self.max_repetitions, int(self.seconds / max(once, _TICK))))

    def affords(self, once: float) -> bool:
        """Return whether ``min_repetitions`` of something that takes ``once`` seconds fit into ``max_seconds``."""
        return self.min_repetitions * once <= self.max_seconds


def problems(options: Mapping[str, Any]) -> list[Problem]:
    """Find the problems of the sizes and the effort among a workload's options."""
    counts = ("warmup", "min_bytes", "max_bytes", "min_repetitions", "max_repetitions")
    found = at_least(1, **{name: options[name] for name in counts})
    found += at_least(2, factor=options["factor"])
    for name in ("seconds", "max_seconds"):
        if options[name] <= 0:
            found.append(Problem(name, options[name], "must be greater than 0"))
    for low, high in (("min_bytes", "max_bytes"), ("min_repetitions", "max_repetitions")):
        if options[low] > options[high]:
            found.append(Problem(high, options[high], f"must not be below {low}, {options[low]}"))
    return found


def sizes(min_bytes: int, max_bytes: int, factor: int) -> list[int]:
    """List ``min_bytes``, multiplied by ``factor`` each time, up to ``max_bytes``, which is always the last."""
    found = []
    size = min_bytes
    while size < max_bytes:
        found.append(size)
        size *= factor
    return [*found, max_bytes]


def require_memory(device: torch.device, local_size: int, need: int, option: str, value: object) -> None:
    """Refuse what takes ``need`` bytes a rank and does not fit, on all ranks at once, so that none waits for another.

    Every rank calls this, with the ranks of its node and the option responsible.

    Raises:
        ConfigError: On every rank, naming the one with the least free memory.
    """
    if device.type == "cuda":
        free, what = torch.cuda.mem_get_info(device)[0], "its GPU"
    else:
        free, what = psutil.virtual_memory().available // local_size, "its share of the node"
    room = gather((free, what))
    rank = min(range(len(room)), key=lambda number: room[number][0])
    least, place = room[rank]
    if need > least:
        rule = f"takes {need / 2**30:.3g} GiB of memory on a rank, and rank {rank} has {least / 2**30:.3g} GiB: {place}"
        raise ConfigError([Problem(option, value, rule, "try less")])


def repeat(step: Callable[[], object] | None, device: torch.device, effort: Effort) -> list[float]:
    """Return the seconds of every timed repetition on its slowest rank; every rank calls this and gets the same.

    ``step`` is ``None`` on ranks that do not take part and only wait. The list is empty if ``min_repetitions`` would
    take too long.
    """
    return repeat_in_turns([step], device, effort)[0]


def repeat_in_turns(
    steps: Sequence[Callable[[], object] | None], device: torch.device, effort: Effort
) -> list[list[float]]:
    """Do as :func:`repeat` for several steps that are compared, interleaved so that interference affects all."""
    dist.barrier()
    warmup = [most(*seconds) for seconds in timed(steps, effort.warmup, device)]
    once = max(min(seconds) for seconds in warmup)
    if not effort.affords(once):
        return [[] for _ in steps]
    dist.barrier()
    return [most(*seconds) for seconds in timed(steps, effort.repetitions(once), device)]


def timed(steps: Sequence[Callable[[], object] | None], count: int, device: torch.device) -> list[list[float]]:
    """Return the seconds of ``count`` repetitions of each step on this rank; zeros where it does not take part."""
    turns = [(step, clock.for_device(device)) for step in steps if step]
    for _ in range(count):
        for step, watch in turns:
            watch.start()
            step()
            watch.stop()
    seconds = iter([watch.seconds() for _, watch in turns])
    return [next(seconds) if step else [0.0] * count for step in steps]
