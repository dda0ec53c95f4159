"""A pipeline schedule of one's own: the passes of each rank in their order, from a CSV file.

A row for each rank; a cell for each pass: the stage, what is done, and the micro-batch. This is 1F1B on two ranks::

    0F0, 0F1, 0B0, 0F2, 0B1, 0B2
    1F0, 1B0, 1F1, 1B1, 1F2, 1B2

``F`` is the forward pass and ``B`` the backward pass, or in its place ``I``, the gradient of the stage's input, and
later ``W``, the gradients of its weights. Empty cells are left out. What is sent between the ranks follows, by torch.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

# The schedule that takes its actions from outside is none of torch's public ones, and neither are those.
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from ptdbench.parallel.pipeline.schedules import Running, Schedule
from ptdbench.problems import ConfigError, Problem

_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)

#: The parts of a pass, of which a micro-batch has three on each stage.
_PARTS = {"F": 1, "B": 2, "I": 1, "W": 1}


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Rows = Sequence[Sequence[Pass]]


@dataclass(frozen=True, kw_only=True)
class Order(Schedule):
    """A schedule whose passes are given.

    Attributes:
        rows: Those of each rank, in order.
    """

    rows: Rows

    @property
    def passes(self) -> tuple[str, ...]:
        """See :attr:`ptdbench.parallel.pipeline.schedules.Schedule.passes`."""
        return tuple(", ".join(map(str, row)) for row in self.rows)

    def ranks(self, size: int, per_rank: int) -> list[int]:
        """See :meth:`ptdbench.parallel.pipeline.schedules.Schedule.ranks`."""
        where = {one.stage: rank for rank, row in enumerate(self.rows) for one in row}
        return [where[stage] for stage in sorted(where)]

    def bubble(self, size: int, per_rank: int, microbatches: int) -> float:
        """See :meth:`ptdbench.parallel.pipeline.schedules.Schedule.bubble`; each pass begins as soon as it can."""
        ends = _ends(self.rows)
        spans = [ends[row[-1]] - ends[row[0]] + _PARTS[row[0].kind] for row in self.rows]
        return 1 - 3 * per_rank * microbatches / max(spans)

    def make(
        self, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Running:
        """See :meth:`ptdbench.parallel.pipeline.schedules.Schedule.make`."""
        made = super().make(stages, microbatches, loss)
        assert isinstance(made, _PipelineScheduleRuntime)
        made._prepare_schedule_with_comms(
            {rank: [_Action.from_str(str(one)) for one in row] for rank, row in enumerate(self.rows)}
        )
        return made


def read(name: str) -> Order:
    """The schedule in a file.

    Raises:
        ConfigError: It cannot be read, or its passes are no schedule.
    """
    try:
        with Path(name).expanduser().open(encoding="utf-8-sig", newline="") as file:
            cells = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error, RuntimeError) as error:  # the last: no such user
        raise _wrong(name, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows = [[_parse(name, number, cell) for cell in row] for number, row in enumerate(cells, start=1) if row]
    if rule := next(_rules(rows), None):
        raise _wrong(name, rule)
    return Order(
        kind=_PipelineScheduleRuntime,
        size=len(rows),
        stages=len({one.stage for one in rows[0]}),
        microbatches=1 + max(one.microbatch for one in rows[0]),
        splits_backward=any(one.kind == "I" for row in rows for one in row),
        rows=rows,
    )


def _wrong(name: str, rule: str) -> ConfigError:
    return ConfigError([Problem("schedule", name, rule)])


def _parse(name: str, number: int, cell: str) -> Pass:
    found = _CELL.fullmatch(cell)
    if not found:
        rule = "is no pass: write a stage, F, B, I or W, and a micro-batch, such as 0F3"
        raise _wrong(name, f"row {number}: {cell} {rule}")
    stage, kind, microbatch = found.groups()
    return Pass(int(stage), kind, int(microbatch))


def _rules(rows: Rows) -> Iterator[str]:
    """What the passes break, the most basic rule first."""
    if len(rows) < 2:
        yield f"needs a row for each rank of a pipeline, at least 2, and has {len(rows)}"
    of_rows = [{one.stage for one in row} for row in rows]
    counts = Counter(stage for stages in of_rows for stage in stages)
    for stage in range(len(counts)):
        if counts[stage] != 1:
            yield f"has stage {stage} in {counts[stage]} rows; each stage, from 0 on, is on one rank"
    if len({len(stages) for stages in of_rows}) > 1:
        yield f"has {', '.join(str(len(stages)) for stages in of_rows)} stages in its rows; all ranks have as many"
    yield from _incomplete(rows, range(len(counts)))
    last = len(counts) - 1
    finishing = [one.microbatch for row in rows for one in row if (one.stage, one.kind) == (last, "F")]
    if finishing != sorted(finishing):  # torch takes the losses for those of 0, 1, 2, ...
        yield f"has the forward passes of stage {last}, the last one, out of order; they must be 0, 1, 2, ..."
    ends = _ends(rows)
    if stuck := next((one for row in rows for one in row if one not in ends), None):
        yield f"never gets to {stuck}: what that needs comes after it, or waits for it"


def _incomplete(rows: Rows, stages: Sequence[int]) -> Iterator[str]:
    """Micro-batches of a stage that lack a pass, or have one too many."""
    kinds: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for row in rows:
        for one in row:
            kinds[one.stage, one.microbatch].append(one.kind)
    last = max((microbatch for _, microbatch in kinds), default=0)
    for stage in stages:
        for microbatch in range(last + 1):
            found = kinds[stage, microbatch]
            if Counter(found) not in (Counter("FB"), Counter("FIW")):
                has = " ".join(found) or "no pass"
                yield f"micro-batch {microbatch} of stage {stage} has {has}; it needs F, and B or I and W, each once"


def _ends(rows: Rows) -> dict[Pass, int]:
    """When each pass ends that can begin, if each of its parts takes 1; a backward pass has two."""
    ends: dict[Pass, int] = {}
    left, clocks = [list(reversed(row)) for row in rows], [0] * len(rows)
    needs = _needs(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            while row and all(need in ends for need in needs[row[-1]]):
                one = row.pop()
                start = max([clocks[rank], *(ends[need] for need in needs[one])])
                ends[one] = clocks[rank] = start + _PARTS[one.kind]
                moved = True
    return ends


def _needs(rows: Rows) -> dict[Pass, list[Pass]]:
    """The passes that must end before each one."""
    known = {one for row in rows for one in row}

    def gradient(stage: int, microbatch: int) -> list[Pass]:
        """The pass that computes the gradient of a stage's input."""
        return [one for kind in "BI" if (one := Pass(stage, kind, microbatch)) in known]

    found: dict[Pass, list[Pass]] = {}
    for one in known:
        stage, kind, microbatch = one
        if kind == "F":
            found[one] = [Pass(stage - 1, "F", microbatch)] if stage else []
        elif kind == "W":
            found[one] = [Pass(stage, "I", microbatch)]
        else:
            found[one] = [Pass(stage, "F", microbatch), *gradient(stage + 1, microbatch)]
    return found
