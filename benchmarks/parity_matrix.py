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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from rank import joined

from ptdbench.job import Job
from ptdbench.launch import local
from ptdbench.problems import ConfigError
from ptdbench.setup import config, run_spec
from ptdbench.setup.compose import compose_all
from ptdbench.workloads.train import assemble

ROOT = Path(__file__).parents[1]
RESULT, PAGE = ROOT / "benchmarks/parity/matrix.json", ROOT / "docs/parity.md"

STEPS, EXACT = 10, 1e-5

#: What another order of a sum makes of a loss; a lever that changes numbers does more.
ROUNDING = 1e-6

#: What all cells share; a rank gets 4 samples or more, in micro-batches of one or more.
COMMON = (
    "device=cpu", "cluster.cpus_per_rank=1", "train.global_batch=16", f"train.steps={STEPS}", "optimizer.lr=3e-3",
    "model=gpt_tiny", "model.width=32", "model.sequence_length=16", "model.vocabulary=300",
)  # fmt: skip

#: The layouts: ranks and options.
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
    rows = options.rows.split(",") if options.rows else list(ROWS)
    columns = options.columns.split(",") if options.columns else list(COLUMNS)
    started = time.monotonic()
    found = {cell: refusal for row in rows for column in columns if (refusal := refused(cell := (row, column)))}
    left = [(row, column) for row in rows for column in columns if (row, column) not in found]
    compared = {"plain" if changes(column) else column for column in columns}
    references = numbers_of(1, [("single", column) for column in compared])
    for row in rows:  # ranks of its own for each: gloo keeps the threads of all groups that a process had
        for cell, numbers in numbers_of(ROWS[row][0], [cell for cell in left if cell[0] == row]).items():
            reference = references["single", "plain" if changes(cell[1]) else cell[1]]
            found[cell] = verdict(numbers, reference, COLUMNS[cell[1]][1])
            print(f"  {cell[0]:<24} {cell[1]:<12} {found[cell]}", flush=True)
    seconds = time.monotonic() - started
    table = {row: {column: found[row, column] for column in columns} for row in rows}
    text = page(table, torch.__version__)
    print(f"\n{text}\n{seconds:.0f} s")
    if not (options.rows or options.columns):
        RESULT.write_text(json.dumps({"torch": torch.__version__, "cells": table}, indent=1) + "\n")
        PAGE.write_text(text)
    return int(any(said.startswith("wrong") for said in found.values()))


def changes(column: str) -> bool:
    """Whether a lever changes the arithmetic."""
    return COLUMNS[column][1] > EXACT


def typed(row: str, column: str) -> list[str]:
    """The options of a cell; a lever of replicas alone is none for one rank."""
    layout = ROWS[row][1] if row in ROWS else "parallel=single"
    lever = COLUMNS[column][0].split()
    if row == "single":
        lever = [option for option in lever if not option.startswith(("parallel.", "offload="))]
    elif not any(name in layout for name in PIPELINES):
        lever = [option for option in lever if not option.startswith("parallel.microbatches")]
    ranks = ROWS[row][0] if row in ROWS else 1
    return [*COMMON, *layout.split(), *lever, f"cluster.ranks_per_node={ranks}"]


@cache
def composed(cell: Cell) -> DictConfig:
    """The configuration of a cell."""
    return compose_all(typed(*cell)).jobs[0]


def refused(cell: Cell) -> str | None:
    """Why a cell does not run, if the product refuses it."""
    try:
        run_spec.specify(config.read(composed(cell)), None)
    except ConfigError as error:
        problem = error.problems[0]
        return f"refused: {problem.option}={str(problem.value).lower()}: {problem.rule}"
    return None


def numbers_of(ranks: int, cells: Sequence[Cell]) -> dict[Cell, Numbers | str]:
    """The numbers of each cell, or the error that ended its ranks; all cells of the same ranks, until one dies."""
    found: dict[Cell, Numbers | str] = {}
    while left := {cell: composed(cell) for cell in cells if cell not in found}:
        with TemporaryDirectory() as directory:
            try:
                local.start(_in_rank, ranks, left, directory)
            except local.RankDied as death:
                found |= _read(directory)
                found[next(cell for cell in left if cell not in found)] = str(death)
            else:
                found |= _read(directory)
    return found


def _read(directory: str) -> dict[Cell, Numbers | str]:
    lines = Path(directory, "losses").read_text().splitlines() if Path(directory, "losses").exists() else []
    return {(row, column): numbers for row, column, numbers in map(json.loads, lines)}


def _in_rank(environ: Mapping[str, str], cells: Mapping[Cell, DictConfig], directory: str) -> None:
    """All in one process group: torch keeps plans for DTensors by the names of groups."""
    torch.set_num_threads(1)
    with joined(environ, next(iter(cells.values())), directory) as job:
        for (row, column), asked in cells.items():
            numbers = _steps(replace(job, spec=run_spec.specify(config.read(asked), job.world)))
            if job.world.rank == 0:
                with Path(directory, "losses").open("a") as file:
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


def page(table: Mapping[str, Mapping[str, str]], version: str) -> str:
    """The table as a page of the documentation."""
    columns = list(next(iter(table.values())))
    reasons: dict[str, int] = {}
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for row, cells in table.items():
        shown = []
        for said in cells.values():
            kind = said.partition(" ")[0]
            shown.append(said if kind in ("ok", "no") else f"({reasons.setdefault(said, len(reasons) + 1)})")
        lines.append(f"| {row} | {' | '.join(shown)} |")
    count = sum(said.startswith("ok") for cells in table.values() for said in cells.values())
    numbered = [f"{number}. {said}" for said, number in reasons.items()]
    options = [f"- *{name}*: `{ROWS[name][1]}`, {ROWS[name][0]} ranks" for name in table]
    options += [f"- *{name}*: `{COLUMNS[name][0] or 'no other option'}`" for name in columns]
    head = HEAD.format(version=version, count=count)
    return "\n".join([head, *lines, "", *numbered, "", "Rows and columns are these options:", "", *options, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="some of them, by comma")
    parser.add_argument("--columns", help="some of them, by comma; with those that they are compared with")
    sys.exit(main(parser.parse_args()))
