"""SLURM's shorthand for many nodes: lists of host names, and of the number of tasks on each node.

No library is used: ``python-hostlist`` is under the GPL, ClusterShell does not parse counts such as ``2(x3)``, and
``scontrol show hostnames`` is one more process for every rank and often missing in a job's container.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

#: The separator of two entries; a comma inside brackets is followed by ``]`` with no ``[`` in between.
_SEPARATOR = re.compile(r"[,\s]+(?![^\[]*\])")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand(text: str) -> list[str]:
    """Return the names that ``gpu[01-03,7]-ib,login`` stands for, in the order of ``scontrol show hostnames``.

    A name may also continue after its brackets, which scontrol 22.05 refuses.

    Raises:
        ValueError: The brackets do not match, or a range is malformed or counts down.
    """
    return [host for entry in _SEPARATOR.split(text) if entry for host in _hosts(entry)]


def tasks_per_node(text: str) -> list[int]:
    """Parse the number of tasks of each node, ``2(x3),1`` as ``[2, 2, 2, 1]``; raises ValueError if malformed."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if not match:
            raise ValueError(f"{text!r} is not a list of tasks per node such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _hosts(entry: str) -> Iterator[str]:
    """Expand one entry of a list: fixed text and brackets in alternation."""
    parts = _BRACKETS.split(entry)
    fixed, brackets = parts[::2], [_numbers(part) for part in parts[1::2]]
    if any("[" in text or "]" in text for text in fixed):
        raise ValueError(f"the brackets of {entry!r} do not match")
    if not brackets:
        yield entry
        return
    *outer, last = brackets
    for *reverse, fastest in product(*reversed(outer), last):  # scontrol's order: of three, the middle one is slowest
        numbers = [*reversed(reverse), fastest]
        yield fixed[0] + "".join(number + text for number, text in zip(numbers, fixed[1:], strict=True))


def _numbers(ranges: str) -> list[str]:
    """Expand ``01-03,7`` to 01, 02, 03 and 7, zero-padded to the width of a range's first number."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"{part!r} in [{ranges}] is not a number or a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part} counts down")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers
