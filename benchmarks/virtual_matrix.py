"""Whether every layout runs on a GPU that is not there, in each precision, compiled or not.

    python benchmarks/virtual_matrix.py
    python benchmarks/virtual_matrix.py --rows tp,gpipe --columns fp32,bf16

A cell is a run of three steps through the product's own launcher on virtual GPUs, with the passes that look at a step.
It is ok with the peak of what was reserved, refused with the reason that a GPU would get, or wrong. All ranks are
carried out in the columns whose messages are their own, in the others the first one, and the last one of a pipeline.
What is run replaces its cells in virtual/matrix.json beside this file and in the table of docs/virtual.md, one after
the other. With ``--resume`` cells that are there and not wrong are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.cells import Table, described, drawn, inserted, keep, numbered, parser_of_cells, refusal
from benchmarks.parity_matrix import COMMON as OF_GPT
from benchmarks.parity_matrix import PIPELINES, ROWS
from benchmarks.script import ROOT, read
from ptdbench.entry import prepare_ranks
from ptdbench.problems import ConfigError
from ptdbench.records import store
from ptdbench.run import run
from ptdbench.setup import run_spec

RESULT, PAGE = ROOT / "benchmarks/virtual/matrix.json", ROOT / "docs/virtual.md"

#: What all cells share.
COMMON = (
    *(word for word in OF_GPT if not word.startswith(("device=", "train.steps=", "cluster."))),
    "virtual=h100", "data=synthetic_tokens", "train.steps=3", "train.warmup_steps=0", "profile.steps=1",
)  # fmt: skip

#: The options of each column.
COLUMNS: dict[str, str] = {
    "fp32": "",
    "tf32": "precision=tf32",
    "bf16": "precision=bf16",
    "fp16": "precision=fp16 train.clip_norm=1",
    "bf16 recompute": "precision=bf16 activations=recompute",
    "bf16 selective": "precision=bf16 activations=selective",
    "bf16 offload": "precision=bf16 activations=offload",
    "host": "precision=bf16 offload=optimizer_and_weights",
    "accumulated": "precision=bf16 train.micro_batch=1 parallel.microbatches=4",
    "compiled": "precision=bf16 compile=layers",
    "compiled recompute": "precision=bf16 compile=layers activations=recompute",
    "compiled selective": "precision=bf16 compile=layers activations=selective",
}

#: Those in which all ranks are carried out: what is sent in the others is sent in one of these.
ALL_RANKS = ("fp32", "fp16", "host", "accumulated")


def main(options: argparse.Namespace) -> int:
    """Fill the table, or part of it, column by column; 1 if a cell is wrong."""
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    known = found["cells"] if found.get("torch") == torch.__version__ else {}
    failed = False
    for column, row in product(options.columns, options.rows):
        before = known.get(row, {}).get(column, "wrong")
        if options.resume and not before.startswith("wrong"):
            continue
        said = cell(typed(row, column))
        print(f"  {row:<24} {column:<20} {said}", flush=True)
        known.setdefault(row, {})[column] = said
        failed |= said.startswith("wrong")
        keep(RESULT, known)
        PAGE.write_text(inserted(PAGE.read_text(), "matrix", page(known, torch.__version__)))
    return int(failed)


def typed(row: str, column: str) -> list[str]:
    """The options of a cell."""
    ranks, layout = ROWS[row]
    levers, has_stages = COLUMNS[column].split(), any(name in layout for name in PIPELINES)
    if not has_stages:
        levers = [option for option in levers if not option.startswith("parallel.microbatches")]
    if column not in ALL_RANKS:
        levers.append(f"virtual.ranks=[0,{ranks - 1}]" if has_stages else "virtual.ranks=[0]")
    return [*COMMON, *layout.split(), *levers, f"cluster.ranks_per_node={ranks}"]


def cell(words: list[str]) -> str:
    """Carry out the run of a cell; what came of it."""
    config = read(*words)
    try:
        summary = run_spec.summarize(config, None)
    except ConfigError as error:
        return refusal(error)
    prepare_ranks([config])
    with TemporaryDirectory() as folder:
        run(Path(folder), config, summary)
        record = store.load_record(Path(folder))
    if record["status"] != "ok":
        return f"wrong: {record['status']}: {record['error']['message'].partition(chr(10))[0]}"
    if reason := record["virtual"]["reason"] or record["memory"]["reason"]:
        return f"wrong: {reason}"
    return f"ok {max(record['virtual']['reserved_bytes']) / 2**20:.0f} MiB"


def page(table: Table, version: str) -> str:
    """The cells that have been run, as a part of the page, with the reasons of refusals."""
    layouts = {name: ROWS[name] for name in ROWS if name in table}
    said = {row: [table[row].get(column, "not run") for column in COLUMNS] for row in layouts}
    rows, reasons = numbered(said)
    lines = drawn([*COLUMNS], {row: [text.removeprefix("ok ") for text in texts] for row, texts in rows.items()})
    every = [said for cells in table.values() for said in cells.values()]
    fine = sum(said.startswith("ok") for said in every)
    head = f"{len(every)} of {len(ROWS) * len(COLUMNS)} cells have been run with torch {version}: {fine} ran to "
    head += "completion, shown with the peak reserved memory of a rank; a number in parentheses is a refusal, with the "
    head += "reason that a run on a GPU would be given."
    return "\n".join([head, "", *lines, "", *reasons, "", *described(layouts, COLUMNS)])


if __name__ == "__main__":
    parser = parser_of_cells(__doc__, ROWS, COLUMNS)
    parser.add_argument("--resume", action="store_true", help="keep the cells that have been run, and were not wrong")
    sys.exit(main(parser.parse_args()))
