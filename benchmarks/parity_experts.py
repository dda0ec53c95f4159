"""Whether layouts of a model with experts compute the numbers of one rank, gradient norms included.

    python benchmarks/parity_experts.py
    python benchmarks/parity_experts.py --rows "ep2,ep2 3d" --columns sgd

As parity_matrix.py, whose cells these are: ten steps of a small model with eight experts, of which a token meets two
and a shared one, its auxiliary loss strong enough to be seen. What is run replaces its cells in parity/experts.json
and docs/experts.md.
"""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.cells import Table, described, drawn, inserted, keep, parser_of_cells
from benchmarks.parity_matrix import EXACT, SINGLE, STEPS, Numbers, numbers_of, refused, typed
from benchmarks.script import ROOT, read
from ptdbench.setup.config import Config

RESULT = ROOT / "benchmarks/parity/experts.json"
PAGE = ROOT / "docs/experts.md"

MODEL = (
    "model=moe_tiny model.width=32 model.hidden=48 model.expert_hidden=24 model.sequence_length=16 "
    "model.vocabulary=300 model.router.coefficient=0.05 train.clip_norm=1e6"
)

#: The layouts: ranks and options.
LAYOUTS = {
    "ddp": (2, "parallel=ddp"),
    "fsdp": (2, "parallel=fsdp"),
    "tp": (2, "parallel=tp parallel.tensor=2"),
    "ep2": (2, "parallel=ep"),
    "ep2 of tp": (2, "parallel=tp parallel.tensor=2 parallel.expert=2"),
    "ep2 of 4": (4, "parallel=ep parallel.expert=2"),
    "ep4": (4, "parallel=ep"),
    "ep2 in replicas": (4, "parallel=ep parallel.replicate=2"),
    "ep4 tp with sequence": (4, "parallel=ep parallel.tensor=2 parallel.sequence=true"),
    "ep4 context": (4, "parallel=ep parallel.context=2 parallel.shard=2"),
    "ep2 ring": (4, "parallel=ep parallel.context=2 parallel.context_method=ring parallel.expert=2"),
    "ep2 1f1b": (4, "parallel=ep parallel.pipeline=2"),
    "ep2 interleaved1f1b": (4, "parallel=ep parallel.pipeline=2 parallel.schedule=interleaved1f1b"),
    "ep2 looped_bfs": (4, "parallel=ep parallel.pipeline=2 parallel.schedule=looped_bfs"),
    "ep2 zbv": (4, "parallel=ep parallel.pipeline=2 parallel.schedule=zbv parallel.reshard_after_forward=false"),
    "ep2 3d": (8, "parallel=3d parallel.expert=2 parallel.pipeline=2"),
    "ep4 3d with sequence": (8, "parallel=3d parallel.expert=4 parallel.pipeline=2 parallel.sequence=true"),
}

#: What may be changed beside them; at 0.1 SGD itself makes 6e-5 of the rounding of another order of a sum.
LEVERS = {
    "adamw": "",
    "sgd": "optimizer=sgd optimizer.lr=0.03",
    "accumulated": "optimizer=sgd optimizer.lr=0.03 train.micro_batch=2 activations=recompute",
    "bias": "model.router.balance=bias model.router.bias_rate=0.01",
    "latent": "model.latent_width=12 model.head_width=8 model.rotary_width=4",
}


def main(options: argparse.Namespace) -> int:
    """Fill the table, or part of it; 1 if a cell is wrong."""
    known = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}
    expected = numbers_of({("single", column): asked("single", column) for column in options.columns})
    failed = False
    for row in options.rows:
        cells = {(row, column): asked(row, column) for column in options.columns}
        said = {cell: reason for cell, of_cell in cells.items() if (reason := refused(of_cell))}
        numbers = numbers_of({cell: of_cell for cell, of_cell in cells.items() if cell not in said})
        said |= {cell: verdict(found, expected["single", cell[1]]) for cell, found in numbers.items()}
        for cell, text in said.items():
            print(f"  {cell[0]:<24} {cell[1]:<12} {text}", flush=True)
            known.setdefault(row, {})[cell[1]] = text
            failed |= text.startswith("wrong")
        keep(RESULT, known)
        PAGE.write_text(inserted(PAGE.read_text(), "cells", page(known)))
    return int(failed)


def asked(row: str, column: str) -> Config:
    """The configuration of a cell."""
    return read(*typed(LAYOUTS.get(row, SINGLE), f"{MODEL} {LEVERS[column]}"))


def verdict(found: Numbers | str, expected: Numbers | str) -> str:
    """``ok`` with the largest relative differences of a loss and of a norm, or what is wrong."""
    if isinstance(found, str) or isinstance(expected, str):
        return f"wrong: {found if isinstance(found, str) else expected}"
    if abs(expected[STEPS - 1] / expected[0] - 1) < 1e-2:
        return "wrong: the reference does not learn, and equal losses prove nothing"
    off = [abs(one / other - 1) for one, other in zip(found, expected, strict=True)]
    loss, norm = max(off[:STEPS]), max(off[STEPS:])
    return f"{'ok' if max(loss, norm) <= EXACT else 'wrong: off by'} {loss:.0e} {norm:.0e}"


def page(cells: Table) -> str:
    """The cells that have been run, as a part of the page on experts."""
    columns = [name for name in LEVERS if any(name in row for row in cells.values())]
    rows = {name: cells[name] for name in LAYOUTS if name in cells}

    def shown(said: str) -> str:
        return "refused" if said.startswith("refused") else said

    lines = drawn(columns, {name: [shown(row.get(one, "not run")) for one in columns] for name, row in rows.items()})
    refusals = {text: name for name, row in rows.items() for text in row.values() if text.startswith("refused")}
    levers = {name: LEVERS[name] or "optimizer=adamw" for name in columns}
    options = described({name: LAYOUTS[name] for name in rows}, levers)
    options += [f"- *{name}*: {text}" for text, name in refusals.items()]
    count = sum(not text.startswith("refused") for row in rows.values() for text in row.values())
    head = f"These {count} cells have been run, with the largest difference of a loss and of a norm:"
    return "\n".join([head, "", *lines, "", *options])


if __name__ == "__main__":
    sys.exit(main(parser_of_cells(__doc__, LAYOUTS, LEVERS).parse_args()))
