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
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from parity_matrix import COMMON as OF_GPT
from parity_matrix import PIPELINES, ROOT, ROWS

from ptdbench.entry import prepare_ranks
from ptdbench.problems import ConfigError
from ptdbench.records import store
from ptdbench.run import run
from ptdbench.setup import config, run_spec
from ptdbench.setup.compose import compose_all

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

Table = Mapping[str, Mapping[str, str]]


def main(options: argparse.Namespace) -> int:
    """Fill the table, or part of it, column by column; 1 if a cell is wrong."""
    rows = options.rows.split(",") if options.rows else list(ROWS)
    columns = options.columns.split(",") if options.columns else list(COLUMNS)
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    known = found["cells"] if found.get("torch") == torch.__version__ else {}
    failed = False
    for column, row in product(columns, rows):
        before = known.get(row, {}).get(column, "wrong")
        if options.resume and not before.startswith("wrong"):
            continue
        said = cell(typed(row, column))
        print(f"  {row:<24} {column:<20} {said}", flush=True)
        known.setdefault(row, {})[column] = said
        failed |= said.startswith("wrong")
        RESULT.write_text(json.dumps({"torch": torch.__version__, "cells": known}, indent=1) + "\n")
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
    read = config.read(compose_all(words).jobs[0])
    try:
        summary = run_spec.summarize(read, None)
    except ConfigError as error:
        problem = error.problems[0]
        return f"refused: {problem.option}={str(problem.value).lower()}: {problem.rule}"
    prepare_ranks([read])
    with TemporaryDirectory() as folder:
        run(Path(folder), read, summary)
        record = store.load_record(Path(folder))
    if record["status"] != "ok":
        return f"wrong: {record['status']}: {record['error']['message'].partition(chr(10))[0]}"
    if reason := record["virtual"]["reason"] or record["memory"]["reason"]:
        return f"wrong: {reason}"
    return f"ok {max(record['virtual']['reserved_bytes']) / 2**20:.0f} MiB"


def page(table: Table, version: str) -> str:
    """The cells that have been run, as a part of the page, with the reasons of refusals."""
    reasons: dict[str, int] = {}
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for row in (name for name in ROWS if name in table):
        shown = [
            said.removeprefix("ok ")
            if said.startswith(("ok", "not"))
            else f"({reasons.setdefault(said, len(reasons) + 1)})"
            for said in (table[row].get(column, "not run") for column in COLUMNS)
        ]
        lines.append(f"| {row} | {' | '.join(shown)} |")
    every = [said for cells in table.values() for said in cells.values()]
    fine = sum(said.startswith("ok") for said in every)
    head = f"{len(every)} of {len(ROWS) * len(COLUMNS)} cells have been run with torch {version}: {fine} came to their "
    head += "end, with the peak of what was reserved on a rank; a number in parentheses is a refusal, with the reason "
    head += "that a GPU would get."
    numbered = [f"{number}. {said}" for said, number in reasons.items()]
    options = [f"- *{name}*: `{ROWS[name][1]}`, {ROWS[name][0]} ranks" for name in ROWS if name in table]
    options += [f"- *{name}*: `{lever or 'no other option'}`" for name, lever in COLUMNS.items()]
    return "\n".join([head, "", *lines, "", *numbered, "", *options])


def inserted(text: str, name: str, table: str) -> str:
    """The page with another table between its comments of this name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="some of them, by comma")
    parser.add_argument("--columns", help="some of them, by comma")
    parser.add_argument("--resume", action="store_true", help="keep the cells that have been run, and were not wrong")
    sys.exit(main(parser.parse_args()))
