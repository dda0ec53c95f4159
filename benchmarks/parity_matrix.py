"""Whether every layout computes the same numbers under every lever, cell by cell.

    make parity-matrix                                             # the table of docs/parity.md
    make parity-matrix ARGS="--rows ddp zbv --columns plain clipped"
    make parity-matrix ARGS=--resume                               # what was interrupted or wrong
    make parity-matrix ARGS=experts                                # a model with experts: the table of docs/experts.md

A cell is ten steps of the product's own step loop, in fp32 on CPU ranks, against the same ten steps on one rank. Where
a lever changes the numbers, losses must stay within 2 % of those without it, and differ. Of experts the norms of
gradients are compared too; a token meets two of eight and a shared one, and the auxiliary loss is strong enough to be
seen. Good is a matrix without ``wrong``.
"""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import torch.distributed as dist

from benchmarks.cells import Cell, Cells, Matrix, refused
from benchmarks.rank import job_of, on_ranks
from benchmarks.script import read
from ptdbench.job import Job
from ptdbench.launch import local
from ptdbench.problems import ConfigError, first_line
from ptdbench.setup.config import Config
from ptdbench.workloads.train import assemble

STEPS, EXACT = 10, 1e-5

#: What another order of a sum makes of a loss; a lever that changes numbers does more.
ROUNDING = 1e-6

#: Levers that change the arithmetic, and by how much they may change a loss; they have to do so by more than rounding.
CHANGES = {"bf16": 2e-2, "torch in bf16": 2e-2}

#: The losses of the steps, and their norms of gradients where these are clipped.
Numbers = list[float]

Key = TypeVar("Key", bound=Hashable)

#: The verdict on a cell in progress, which may kill the ranks.
DEATH = "wrong: a rank has died"

LAYOUTS, EXPERTS = Matrix.load("layouts"), Matrix.load("experts")


def main(subject: str) -> int:
    """Fill the matrix of ``layouts`` or of ``experts``; 1 if a cell is wrong."""
    matrix = EXPERTS if subject == "experts" else LAYOUTS
    references: dict[str, Numbers | str] = {}

    def execute(cells: Cells) -> Iterator[tuple[Cell, str]]:
        """Start ranks for each row: gloo keeps the threads of all groups that a process had."""
        alone = {column: "plain" if column in CHANGES else column for _, column in cells}
        lacking = {*alone.values()} - {*references}
        references.update(numbers_of({name: read(*matrix.words("single", name)) for name in lacking}))
        for (row, column), numbers in numbers_of(cells).items():
            most = CHANGES.get(column, EXACT) if matrix is LAYOUTS else EXACT
            yield (row, column), verdict(numbers, references[alone[column]], most, with_norms=matrix is EXPERTS)

    return matrix.fill(__doc__, execute)


def numbers_of(cells: Mapping[Key, Config]) -> dict[Key, Numbers | str]:
    """Return the numbers of each cell, or the verdict on it without any; all in the same ranks, until one dies."""
    results: dict[Key, Numbers | str] = {}
    while left := [cell for cell in cells if cell not in results]:
        configs = [cells[cell] for cell in left]
        with TemporaryDirectory() as directory:
            path = Path(directory, "numbers")
            _write(path, 0, DEATH)
            with suppress(local.RankDied):
                on_ranks(configs[0], _run_cells, configs, path)
            for place, numbers in map(json.loads, path.read_text().splitlines()):
                if results.get(left[place], DEATH) == DEATH:
                    results[left[place]] = numbers
    return results


def _run_cells(job: Job, cells: Sequence[Config], path: Path) -> None:
    """In a rank: run each cell. One process group: torch keeps plans for DTensors by names of groups."""
    torch.set_num_threads(1)
    for place, config in enumerate(cells):
        if job.world.is_first:
            _write(path, place, DEATH)
        try:
            numbers: Numbers | str = steps(job_of(config, job))
        except ConfigError as error:
            numbers = refused(error)
        except Exception as error:  # third-party code may raise anything
            _write(path, place, f"wrong: {type(error).__name__}: {first_line(error)}")
            raise  # other ranks may wait for this one
        if job.world.is_first:
            _write(path, place, numbers)


def _write(path: Path, place: int, numbers: Numbers | str) -> None:
    """Add a line to the file of cells: the first one of a cell counts that is no death, as others follow from it."""
    with path.open("a") as file:
        file.write(json.dumps([place, numbers]) + "\n")


def steps(job: Job) -> Numbers:
    """In a rank: return the losses of the run's steps, and their norms of gradients if it clips them."""
    loop = assemble(job)
    for _ in range(job.spec.config.train.steps):
        loop.step()
    loop.feed.close()
    losses = torch.stack(loop.losses).flatten().double() * loop.engine.owns_loss
    dist.all_reduce(losses)
    return [*(losses / job.training.layout.replicas).tolist(), *map(float, loop.update.gradient_norms)]


def verdict(numbers: Numbers | str, reference: Numbers | str, most: float, with_norms: bool = False) -> str:
    """Return ``ok`` with the largest relative difference of a loss from one rank, and of a norm, or what is wrong."""
    if isinstance(numbers, str) or isinstance(reference, str):
        return numbers if isinstance(numbers, str) else str(reference)
    if abs(reference[:STEPS][-1] / reference[0] - 1) < 1e-2:
        return "wrong: the reference does not learn, and equal losses prove nothing"
    off = [abs(number / expected - 1) for number, expected in zip(numbers, reference, strict=True)]
    compared = [off[:STEPS], off[STEPS:]] if with_norms else [off[:STEPS]]
    shown, largest = " ".join(f"{max(part):.0e}" for part in compared), max(map(max, compared))
    if largest > most:
        return f"wrong: off by {shown}"
    if most > EXACT and largest < ROUNDING:
        return "no effect"  # one copy, whose gradients nobody sends
    return f"ok {shown}"
