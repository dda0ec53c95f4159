"""Memory that torchtitan has published, against what its recipe reserves on virtual GPUs.

    python benchmarks/virtual_truth.py
    python benchmarks/virtual_truth.py --only 0 7

One rank of each run of ``virtual/published.csv`` takes three steps of torchtitan's recipe, see ``titan.py``, on a
virtual GPU; what torch's allocator has reserved at most is set beside what torchtitan reports, which is the same
counter. The table is written to docs/virtual.md; a part of it prints only. Nothing here is fitted to the rows.

Sources: ``benchmarks/llama3_h100_202412_torchtitan.md`` (202412) and ``benchmarks/
llama3-8b_h200_202506_trainy-whitefiber.md`` (202506) in pytorch/torchtitan at b5bcd76c6.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from msgspec import convert

from benchmarks.cells import inserted
from benchmarks.rank import on_ranks
from benchmarks.script import parser_of, read
from benchmarks.titan import Recipe, Training
from benchmarks.virtual_matrix import PAGE
from ptdbench.job import Job

PUBLISHED = Path(__file__).parent / "virtual/published.csv"

#: How far a row may be off, and all of them in the mean.
TOLERANCE, IN_THE_MEAN = 0.03, 0.015

#: GPUs of a node, and steps after which nothing more is reserved.
NODE, STEPS = 8, 3

#: Why a row is left out, by its word in the last column.
REASONS = {
    "async": "asynchronous tensor parallelism wants torch's symmetric memory, which virtual GPUs do not have",
    "kept": "torch's compiler of today keeps what ring attention computes in each block, in spite of recomputation",
}

#: The GPUs: torchtitan's H100 have 96 GB, which no row comes near.
GPUS = {"h100": [f"virtual.gpu.memory={96 * 2**30}", "virtual=h100"], "h200": ["virtual=h200"]}


@dataclass(frozen=True)
class Row:
    """A published run."""

    gib: float  #: Peak of reserved memory, the maximum over its GPUs.
    gpu: str  #: Which one.
    recipe: Recipe  #: How it was set up.
    source: str  #: Where it stands.
    left_out: str  #: Key of :data:`REASONS`; empty where its recipe runs.


def published() -> list[Row]:
    """The rows of the file."""
    with PUBLISHED.open() as file:
        return [convert({**values, "recipe": values}, Row, strict=False) for values in csv.DictReader(file)]


def reserved(row: Row) -> float:
    """GiB that the first rank of a run has reserved at most."""
    nodes = [f"cluster.nodes={row.recipe.ranks // NODE}", f"cluster.ranks_per_node={NODE}", "virtual.ranks=[0]"]
    batch = f"train.global_batch={row.recipe.ranks}"  # of the run that the rank is told, not of the recipe
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"  # of the ranks, see docs/virtual.md
    run = read("model=toy", "parallel=fsdp", batch, *nodes, *GPUS[row.gpu])
    return float(on_ranks(run, _most_reserved, row.recipe)) / 2**30


def _most_reserved(job: Job, recipe: Recipe) -> int:
    """In the first rank of a run, which is not the recipe's own: bytes."""
    torch.set_num_threads(1)
    training = Training(recipe)
    for _ in range(STEPS):
        training.step()
    return torch.cuda.max_memory_reserved()


def main(options: argparse.Namespace) -> int:
    """Print the table; 1 if a row or the mean is off."""
    rows = published()
    chosen = [rows[number] for number in options.only] if options.only else rows
    lines = ["| run | published GiB | virtual GiB | off by |", "|---|---|---|---|"]
    off: list[float] = []
    for row in chosen:
        if row.left_out:
            lines.append(f"| {row.source} | {row.gib} | | *{row.left_out}* |")
        else:
            found = reserved(row)
            off.append(found / row.gib - 1)
            verdict = "" if abs(off[-1]) <= TOLERANCE else " **miss**"
            lines.append(f"| {row.source} | {row.gib} | {found:.2f} | {off[-1]:+.1%}{verdict} |")
        print(lines[-1], flush=True)
    lines += [
        "",
        f"*{len(off)} rows are off by {fmean(map(abs, off)):.1%} in the mean, with torch {torch.__version__}.*",
    ]
    lines += ["", *(f"- *{word}*: {reason}." for word, reason in REASONS.items())]
    print("\n".join(["", *lines]))
    if not options.only:
        PAGE.write_text(inserted(PAGE.read_text(), "truth", "\n".join(lines)))
    return int(any(abs(one) > TOLERANCE for one in off) or fmean(map(abs, off)) > IN_THE_MEAN)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", type=int, metavar="ROW", help="some rows of the file, by number from 0")
    sys.exit(main(parser.parse_args()))
