"""Memory of real GPUs, against what virtual ones say: torchtitan's published runs, and those of ``make gpu-check``.

    python benchmarks/virtual_truth.py
    python benchmarks/virtual_truth.py --only 0 7
    python benchmarks/virtual_truth.py --measured

One rank of each run of ``virtual/published.csv`` takes three steps of torchtitan's recipe, see ``titan.py``, on a
virtual GPU; what torch's allocator has reserved at most is set beside what torchtitan reports, which is the same
counter. The table is written to docs/virtual.md; a part of it prints only. Nothing here is fitted to the rows.

What ``make gpu-check`` has measured is in ``gpu/``; its runs are repeated with the same options on a virtual GPU, best
with the same torch.

Sources: ``benchmarks/llama3_h100_202412_torchtitan.md`` (202412) and ``benchmarks/
llama3-8b_h200_202506_trainy-whitefiber.md`` (202506) in pytorch/torchtitan at b5bcd76c6.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from msgspec import convert

from benchmarks.cells import inserted
from benchmarks.gpu_check import results
from benchmarks.rank import on_ranks
from benchmarks.script import parser_of, read, trained
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
    "async": "asynchronous tensor parallelism needs torch's symmetric memory, which virtual GPUs do not have",
    "kept": "torch's current compiler keeps what ring attention computes in each block, despite recomputation",
}

#: The GPUs: torchtitan's H100 have 96 GB, which no row comes near.
GPUS = {"h100": [f"virtual.gpu.memory={96 * 2**30}", "virtual=h100"], "h200": ["virtual=h200"]}

#: The virtual GPU of each device that ``make gpu-check`` has measured.
VIRTUAL = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}


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


def of_gpu_check() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The device, environment and figures of each run of ``make gpu-check`` whose memory a virtual GPU can show."""
    files = (json.loads(path.read_text()) for path in sorted(results.FOLDER.glob("*.json")))
    for known in (file for file in files if file["device"] in VIRTUAL):
        for found in known["parts"].values():
            for check in found["checks"]:
                if check["name"] != "goal" and check["figures"].get("peak_reserved_bytes"):
                    yield known["device"], found["environment"], check["figures"]


def measured() -> int:
    """Print a table of these runs on virtual GPUs, for the page if torch is the same; how many are off by too much."""
    lines = ["| GPU | run | allocated GiB | virtual | off by | reserved GiB | virtual | off by |", f"{'|---' * 8}|"]
    missed, versions = 0, set[str]()
    for device, environment, figures in of_gpu_check():
        words = [word for word in figures["overrides"] if not word.startswith(("device=", "profile.", "train.steps="))]
        with TemporaryDirectory() as folder:
            # As on a fresh machine: to time its kernels the compiler allocates too, which may be the peak.
            fresh = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            typed = (*words, f"train.steps={STEPS}", f"virtual={VIRTUAL[device]}")
            record = trained(Path(folder, "run"), *typed, env={**os.environ, **fresh})
        cells = [device, " ".join(word for word in words if not word.startswith(("cluster.", "parallel=single")))]
        for peak in ("peak_memory_bytes", "peak_reserved_bytes"):
            real, virtual = figures[peak], record["metrics"][peak]
            cells += [f"{real / 2**30:.3f}", f"{virtual / 2**30:.3f}", f"{virtual / real - 1:+.2%}"]
        missed += abs(virtual / real - 1) > TOLERANCE  # of what is reserved, as below
        versions.add(environment["torch"])
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    lines += ["", f"*Measured with torch {', '.join(sorted(versions))}, virtual with {torch.__version__}.*"]
    print("\n".join(["", *lines]))
    if versions == {torch.__version__}:
        PAGE.write_text(inserted(PAGE.read_text(), "measured", "\n".join(lines)))
    return missed


def main(options: argparse.Namespace) -> int:
    """Print the tables; 1 if a row or the mean is off."""
    missed = 0 if options.only else measured()
    failed = 0 if options.measured else published_rows(options)
    return int(missed > 0 or failed > 0)


def published_rows(options: argparse.Namespace) -> int:
    """Print the table of what is published; 1 if a row or the mean is off."""
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
    parser.add_argument("--measured", action="store_true", help="the runs of make gpu-check only")
    sys.exit(main(parser.parse_args()))
