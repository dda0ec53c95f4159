"""Whether every layout computes the same numbers under every lever, cell by cell.

    python benchmarks/parity_matrix.py
    python benchmarks/parity_matrix.py --rows tp,zbv --columns plain,clipped

A cell is ten steps of the product's own step loop, in fp32 on CPU ranks, against the same ten steps on one rank. Where
a lever changes the numbers, losses must stay within 2 or 3 % of those without it, and differ. The result is written
to parity/matrix.json beside this file and, as a table, to docs/parity.md; a part of the table prints only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.cells import Table, described, drawn, keep, numbered, parser_of_cells, refusal
from benchmarks.rank import on_ranks
from benchmarks.script import ROOT, read
from ptdbench.job import Job
from ptdbench.launch import local
from ptdbench.problems import ConfigError
from ptdbench.setup import run_spec
from ptdbench.setup.config import Config
from ptdbench.workloads.train import assemble

RESULT, PAGE = ROOT / "benchmarks/parity/matrix.json", ROOT / "docs/parity.md"

STEPS, EXACT = 10, 1e-5

#: What another order of a sum makes of a loss; a lever that changes numbers does more.
ROUNDING = 1e-6

#: What all cells share; a rank gets 4 samples or more, in micro-batches of one or more.
COMMON = (
    "device=cpu", "cluster.cpus_per_rank=1", "train.global_batch=16", f"train.steps={STEPS}", "optimizer.lr=3e-3",
    "model=gpt_tiny", "model.width=32", "model.sequence_length=16", "model.vocabulary=300",
)  # fmt: skip

#: What all are compared with: ranks and options.
SINGLE = (1, "parallel=single")

#: The layouts.
ROWS: dict[str, tuple[int, str]] = {
    "ddp": (4, "parallel=ddp"),
    "fsdp": (4, "parallel=fsdp"),
    "hsdp": (4, "parallel=hsdp"),
    "tp of 4": (4, "parallel=tp parallel.tensor=4"),
    "tp of 2": (4, "parallel=tp"),
    "tp with sequence": (4, "parallel=tp parallel.sequence=true"),
    "tp in shards": (4, "parallel=fsdp parallel.tensor=2 parallel.sequence=true"),
    "context of 2": (4, "parallel=ddp parallel.context=2"),
    "context in shards": (4, "parallel=fsdp parallel.context=2"),
    "context and tp": (4, "parallel=tp parallel.tensor=2 parallel.context=2 parallel.sequence=true"),
    "ring of 2": (4, "parallel=ddp parallel.context=2 parallel.context_method=ring"),
    "ring of 4": (4, "parallel=ddp parallel.context=4 parallel.context_method=ring"),
    "ring in shards": (4, "parallel=fsdp parallel.context=2 parallel.context_method=ring"),
    "ring and tp": (4, "parallel=tp parallel.tensor=2 parallel.context=2 parallel.context_method=ring"),
    "gpipe": (4, "parallel=pdp parallel.schedule=gpipe"),
    "1f1b": (4, "parallel=pdp"),
    "1f1b in shards": (4, "parallel=fsdp parallel.pipeline=2"),
    "interleaved1f1b": (4, "parallel=pdp parallel.schedule=interleaved1f1b"),
    "looped_bfs": (4, "parallel=pdp parallel.schedule=looped_bfs"),
    "interleaved_zero_bubble": (4, "parallel=pdp parallel.schedule=interleaved_zero_bubble"),
    "zbv": (4, "parallel=pdp parallel.schedule=zbv"),
    "dualpipev": (4, "parallel=pdp parallel.schedule=dualpipev"),
    "3d": (8, "parallel=3d"),
}

#: The levers: options, and by how much a loss may differ at most: if by more than rounding, they have to change it.
COLUMNS: dict[str, tuple[str, float]] = {
    "plain": ("", EXACT),
    "accumulated": ("train.micro_batch=1 parallel.microbatches=4", EXACT),
    "reduced each": ("train.micro_batch=1 parallel.reduce_scatter_each_microbatch=true", EXACT),
    "clipped": ("train.clip_norm=0.3", EXACT),
    "untied": ("model.tie_weights=false", EXACT),
    "llama": (
        "model=llama_tiny model.width=32 model.hidden=48 model.sequence_length=16 model.vocabulary=300",
        EXACT,
    ),
    "recompute": ("activations=recompute", EXACT),
    "selective": ("activations=selective", EXACT),
    "offload": ("activations=offload", EXACT),
    "host": ("offload=optimizer_and_weights", EXACT),
    "zero1": ("parallel.optimizer=zero1", EXACT),
    "kept": ("parallel.reshard_after_forward=false", EXACT),
    "prefetch": ("parallel.prefetch=2", EXACT),
    "bf16": ("parallel.gradients=bf16", 2e-2),
    "muon": ("optimizer=muon", EXACT),
    "powersgd": ("parallel.gradients=powersgd", 2e-2),
}
#: What a pipeline's option is left out without.
PIPELINES = ("parallel=pdp", "parallel=3d", "pipeline")

HEAD = """\
# Parity

Every layout under every lever, by `make parity-matrix` with torch {version}: ten
steps of a small GPT in fp32 on CPU ranks, by AdamW or Muon, compared to one rank. {count} cells are *ok*, with the
largest relative difference of a loss; at most 1e-05 is allowed. `bf16` and `powersgd` round the gradients that are
sent: their losses must differ, by at most 2e-02, or have *no effect* where there is a single replica. A number in
parentheses is a rejection with the reason of that number.
"""

Cell = tuple[str, str]

#: The losses of the steps, and their norms of gradients where these are clipped.
Numbers = list[float]


def main(options: argparse.Namespace) -> int:
    """Fill the table; 1 if a cell is wrong."""
    rows, columns = options.rows, options.columns
    started = time.monotonic()
    cells = {(row, column): asked(row, column) for row in rows for column in columns}
    found = {cell: said for cell, of_cell in cells.items() if (said := refused(of_cell))}
    compared = {"plain" if changes(column) else column for column in columns}
    references = numbers_of({("single", column): asked("single", column) for column in compared})
    for row in rows:  # ranks of its own for each: gloo keeps the threads of all groups that a process had
        left = {cell: of_cell for cell, of_cell in cells.items() if cell[0] == row and cell not in found}
        for cell, numbers in numbers_of(left).items():
            reference = references["single", "plain" if changes(cell[1]) else cell[1]]
            found[cell] = verdict(numbers, reference, COLUMNS[cell[1]][1])
            print(f"  {cell[0]:<24} {cell[1]:<12} {found[cell]}", flush=True)
    seconds = time.monotonic() - started
    table = {row: {column: found[row, column] for column in columns} for row in rows}
    text = page(table, torch.__version__)
    print(f"\n{text}\n{seconds:.0f} s")
    if (rows, columns) == (list(ROWS), list(COLUMNS)):
        keep(RESULT, table)
        PAGE.write_text(text)
    return int(any(said.startswith("wrong") for said in found.values()))


def changes(column: str) -> bool:
    """Whether a lever changes the arithmetic."""
    return COLUMNS[column][1] > EXACT


def asked(row: str, column: str) -> Config:
    """The configuration of a cell."""
    return read(*typed(ROWS.get(row, SINGLE), COLUMNS[column][0]))


def typed(layout: tuple[int, str], levers: str) -> list[str]:
    """The options of a layout with some levers; one of replicas alone is none for one rank."""
    ranks, options = layout
    words = levers.split()
    if layout == SINGLE:
        words = [word for word in words if not word.startswith(("parallel.", "offload="))]
    elif not any(name in options for name in PIPELINES):
        words = [word for word in words if not word.startswith("parallel.microbatches")]
    return [*COMMON, *options.split(), *words, f"cluster.ranks_per_node={ranks}"]


def refused(of_cell: Config) -> str | None:
    """Why a cell does not run, if the product refuses it."""
    try:
        run_spec.specify(of_cell, None)
    except ConfigError as error:
        return refusal(error)
    return None


def numbers_of(cells: Mapping[Cell, Config]) -> dict[Cell, Numbers | str]:
    """The numbers of each cell, or the error that ended its ranks; all cells of the same ranks, until one dies."""
    found: dict[Cell, Numbers | str] = {}
    while left := {cell: of_cell for cell, of_cell in cells.items() if cell not in found}:
        death = ""
        with TemporaryDirectory() as directory:
            path = Path(directory, "numbers")
            path.touch()
            try:
                on_ranks(next(iter(left.values())), _carry_out, left, path)
            except local.RankDied as died:
                death = str(died)
            lines = map(json.loads, path.read_text().splitlines())
            found |= {(row, column): numbers for row, column, numbers in lines}
        if death:
            found[next(cell for cell in left if cell not in found)] = death
    return found


def _carry_out(job: Job, cells: Mapping[Cell, Config], path: Path) -> None:
    """In a rank: a line for each cell. All in one process group: torch keeps plans for DTensors by names of groups."""
    torch.set_num_threads(1)
    for (row, column), of_cell in cells.items():
        numbers = _steps(replace(job, spec=run_spec.specify(of_cell, job.world)))
        if job.world.is_first:
            with path.open("a") as file:
                file.write(json.dumps([row, column, numbers]) + "\n")


def _steps(job: Job) -> Numbers:
    loop = assemble(job)
    for _ in range(STEPS):
        loop.step()
    loop.feed.close()
    losses = torch.stack(loop.losses).flatten().double() * loop.engine.owns_loss
    dist.all_reduce(losses)
    return [*(losses / job.training.layout.replicas).tolist(), *map(float, loop.update.gradient_norms)]


def verdict(numbers: Numbers | str, reference: Numbers | str, most: float) -> str:
    """``ok`` with the largest relative difference of a loss from one rank, or what is wrong."""
    if isinstance(numbers, str) or isinstance(reference, str):
        return f"wrong: {numbers if isinstance(numbers, str) else reference}"
    losses, expected = numbers[:STEPS], reference[:STEPS]
    if abs(expected[-1] / expected[0] - 1) < 1e-2:
        return "wrong: the reference does not learn, and equal losses prove nothing"
    off = max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))
    if off > most:
        return f"wrong: off by {off:.1e}"
    if most > EXACT and off < ROUNDING:
        return "no effect"  # one copy, whose gradients nobody sends
    return f"ok {off:.0e}"


def page(table: Table, version: str) -> str:
    """The table as a page of the documentation."""
    columns = list(next(iter(table.values())))
    rows, reasons = numbered({row: [*cells.values()] for row, cells in table.items()})
    count = sum(said.startswith("ok") for cells in table.values() for said in cells.values())
    options = described({name: ROWS[name] for name in table}, {name: COLUMNS[name][0] for name in columns})
    head = HEAD.format(version=version, count=count)
    lines = drawn(columns, rows)
    return "\n".join([head, *lines, "", *reasons, "", "Rows and columns are these options:", "", *options, ""])


if __name__ == "__main__":
    sys.exit(main(parser_of_cells(__doc__, ROWS, COLUMNS).parse_args()))
