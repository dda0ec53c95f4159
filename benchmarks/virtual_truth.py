"""Memory of real and of virtual GPUs: torchtitan's published runs, and those of ``make gpu-check``.

    make virtual-truth ARGS=measured
    make virtual-truth ARGS="published --only 0 7"
    make virtual-truth ARGS="layouts --rows gpipe zbv --columns fp32 bf16"

One rank of each run of ``virtual/published.csv`` takes three steps with the options that the row names; what it
reserves is set beside what torchtitan reports, by the same counter. Nothing is fitted to the rows. What ``make
gpu-check`` has measured is in ``gpu/``; its runs are repeated with the same options, best with the same torch. Good is
a row within 3 %, and 1.5 % in the mean.

Of ``layouts`` every layout takes three steps in each precision, with the passes that look at a step: the cell of a
matrix is ok with the peak of what was reserved, refused with the reason that a GPU would get, or wrong.

Sources: ``benchmarks/llama3_h100_202412_torchtitan.md`` (202412) and ``benchmarks/
llama3-8b_h200_202506_trainy-whitefiber.md`` (202506) in pytorch/torchtitan at b5bcd76c6.
"""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from msgspec import convert

from benchmarks import tables
from benchmarks.cells import Cell, Cells, Matrix
from benchmarks.script import keep, options, trained

PUBLISHED = tables.FOLDER / "virtual/published.csv"

#: The largest error of a row, and of the mean.
TOLERANCE, IN_THE_MEAN = 0.03, 0.015

#: GPUs of a node, and steps after which nothing more is reserved.
NODE, STEPS = 8, 3

#: What all published runs have in common: FSDP2 by torchtitan, with its clipping.
RECIPE = ("parallel=fsdp", "kernels=torch", "train.clip_norm=1", "data=synthetic_tokens", f"train.steps={STEPS}")

#: Why a row is left out, by its word in the last column.
REASONS = {
    "async": "asynchronous tensor parallelism needs torch's symmetric memory, which virtual GPUs do not have",
    "fp8": "fp8 under tensor parallelism is rejected: torchao's layers of ptdbench take no DTensors",
    "kept": "torch's current compiler keeps what ring attention computes in each block, despite recomputation",
}

#: The GPUs: torchtitan's H100 have 96 GB, which no row comes near.
GPUS = {"h100": [f"virtual.gpu.memory={96 * 2**30}", "virtual=h100"], "h200": ["virtual=h200"]}

#: The virtual GPU of each device that ``make gpu-check`` has measured.
DEVICES = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}

VIRTUAL = Matrix.load("virtual")


@dataclass(frozen=True)
class Row:
    """A published run."""

    gib: float  #: Peak of reserved memory, the maximum over its GPUs.
    gpu: str  #: Which one.
    nodes: int  #: Of eight GPUs.
    source: str  #: Where it stands.
    words: str = ""  #: The options with which ptdbench does the same.
    tokens: float | None = None  #: Of a second and GPU, where it stands for speed.
    left_out: str = ""  #: Key of :data:`REASONS`; empty where it runs.


def rows() -> list[Row]:
    """Return the published runs."""
    with PUBLISHED.open() as file:
        cells = [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    return convert(cells, list[Row], strict=False)


def on_virtual(words: Iterable[str]) -> list[str]:
    """Return the options of a measured run that a virtual one shares."""
    return [word for word in words if not word.startswith(("device=", "profile.trace=", "train.steps="))]


def reserved(row: Row) -> float:
    """Return the GiB that the first rank of a run has reserved at most."""
    nodes = [f"cluster.nodes={row.nodes}", f"cluster.ranks_per_node={NODE}", "virtual.ranks=[0]"]
    fixed = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:False"}  # see docs/virtual.md
    with TemporaryDirectory() as folder:
        record = trained(Path(folder, "run"), *RECIPE, *row.words.split(), *nodes, *GPUS[row.gpu], env=fixed)
    return float(record["metrics"]["peak_reserved_bytes"]) / 2**30


def measured() -> int:
    """Print a table of these runs on virtual GPUs, for the page if torch is the same; 1 if one is off by too much."""
    columns = ["GPU", "run", "allocated GiB", "virtual", "off by", "reserved GiB", "virtual", "off by"]
    rows, off, versions = list[list[str]](), list[float](), set[str]()
    for device, version, figures in (run for run in tables.of_gpu_check() if run[0] in DEVICES):
        words = on_virtual(figures["overrides"])
        with TemporaryDirectory() as folder:
            # As on a fresh machine: to time its kernels the compiler allocates too, which may be the peak.
            fresh = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            typed = (*words, f"train.steps={STEPS}", f"virtual={DEVICES[device]}")
            record = trained(Path(folder, "run"), *typed, env={**os.environ, **fresh})
        row = [device, " ".join(word for word in words if not word.startswith(("cluster.", "parallel=single")))]
        for peak in ("peak_memory_bytes", "peak_reserved_bytes"):
            real, virtual = figures[peak], record["metrics"][peak]
            off.append(virtual / real - 1)
            row += [f"{real / 2**30:.3f}", f"{virtual / 2**30:.3f}", f"{off[-1]:+.2%}"]
        versions.add(version)
        rows.append(row)
        print(*row, flush=True)
    remark = f"*Measured with torch {', '.join(sorted(versions))}, virtual with {torch.__version__}.*"
    _show("measured", tables.drawn(columns, rows), remark, is_kept=versions == {torch.__version__})
    of_reserved = off[1::2]
    keep("virtual measured", f"at most {max(map(abs, of_reserved)):.1%} off")
    return int(max(map(abs, of_reserved)) > TOLERANCE)


def published(only: Sequence[int]) -> int:
    """Print the table of what is published; 1 if a row, or the mean of all, is off by too much."""
    runs, lines, off = rows(), list[list[str]](), list[float]()
    for row in [runs[number] for number in only] or runs:
        if row.left_out:
            lines.append([row.source, f"{row.gib}", "", f"*{row.left_out}*"])
        else:
            virtual = reserved(row)
            off.append(virtual / row.gib - 1)
            verdict = "" if abs(off[-1]) <= TOLERANCE else " **miss**"
            lines.append([row.source, f"{row.gib}", f"{virtual:.2f}", f"{off[-1]:+.1%}{verdict}"])
        print(*lines[-1], flush=True)
    mean = fmean(map(abs, off))
    remark = f"*{len(off)} rows are off by {mean:.1%} in the mean, with torch {torch.__version__}.*\n\n"
    remark += "\n".join(f"- *{word}*: {reason}." for word, reason in REASONS.items())
    table = tables.drawn(["run", "published GiB", "virtual GiB", "off by"], lines)
    _show("truth", table, remark, is_kept=not only)
    return int(max(map(abs, off)) > TOLERANCE or (not only and mean > IN_THE_MEAN))


def _show(name: str, table: str, remark: str, is_kept: bool) -> None:
    text = f"{table}\n\n{remark}"
    print(f"\n{text}")
    if is_kept:
        tables.show(tables.ROOT / "docs/virtual.md", name, text)


def execute(cells: Cells) -> Iterator[tuple[Cell, str]]:
    """Run each cell, and yield its verdict."""
    for cell in cells:
        with TemporaryDirectory() as folder:
            yield cell, verdict(trained(Path(folder, "run"), *VIRTUAL.words(*cell), fails=True))


def verdict(record: dict) -> str:  # type: ignore[type-arg] # JSON
    """Return the verdict on a run."""
    if record["status"] != "ok":
        return f"wrong: {record['status']}: {record['error']['message'].partition(chr(10))[0]}"
    if reason := record["virtual"]["reason"] or record["memory"]["reason"]:
        return f"wrong: {reason}"
    return f"ok {max(record['virtual']['reserved_bytes']) / 2**20:.0f} MiB"


def main(subject: str) -> int:
    """Print the table of a subject; 1 if a row or the mean is off, or a cell wrong."""
    if subject == "layouts":
        return VIRTUAL.fill(__doc__, execute)
    args = options(__doc__, only=((), "some rows of the file, by number from 0"))
    return measured() if subject == "measured" else published([*map(int, args.only)])
