"""Whatever stands in the records of others: what every command says of the rest stands."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptdbench.profiling.phases import KINDS
from ptdbench.records import series
from ptdbench.records.store import RECORD
from tests.report.made import DDP, FSDP, keep, made

#: A run that has a bit of everything that commands read.
WHOLE = DDP.written | {
    "steps": 3, "nodes": ["n1"], "overrides": ["parallel=ddp"], "started": "2026-01-01T00:00:00+00:00",
    "memory": {
        "ranks": {kind: [2**20, 2**21] for kind in KINDS},
        "moments": ["backward", "forward"],
    },
    "hardware": {
        "gpu": {"joules_per_sample": 1.0},
        "clocks": [{"rank": 0, "held_back": {"power limit": 0.1}}],
    },
    "evaluations": [
        {"step": 3, "loss": 2.0, "top1": 0.5, "top5": 0.5, "bits_per_byte": None, "samples": 8, "seconds": 1.0}
    ],
    "environment": {"host": "n1", "torch": "2.15.0", "devices": [], "settings": {"OMP_NUM_THREADS": "1"}},
    "config": {
        "model": {"name": "gpt_tiny"}, "parallel": {"name": "ddp", "schedule": None},
        "train": {"steps": 3, "global_batch": 16}, "cluster": {"name": "local", "nodes": 1}, "profile": {"steps": 5},
        "activations": {"name": "keep"}, "repeat": {"runs": "auto", "max": 20, "block": 0, "series": None},
        "workload": {"name": "train", "_target_": "ptdbench.workloads.train.Train"},
    },
}  # fmt: skip

VALUES: list[Any] = [
    None, True, "x", "\0", "\ud800\x1b[2J", -1, 0, 3 * 10**9, 10**40, -5.5, 1e308, 5e-324, [], {}, [1], [[None]],
    {"a": [{}]}, "9" * 5000,
]  # fmt: skip


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    items = node.items() if isinstance(node, dict) else enumerate(node[:2]) if isinstance(node, list) else ()
    for key, part in items:
        yield from places(part, (*at, key))


def damaged(at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The run with another value in one place."""
    made = copy.deepcopy(WHOLE)
    node: Any = made
    for key in at[:-1]:
        node = node[key]
    node[at[-1]] = value
    return made


def lay(sweep: Path, records: list[dict[str, Any]]) -> Path:
    """A sweep of two runs as they should be, and of these, with the series of three steps."""
    for number, one in enumerate((made(WHOLE), FSDP)):
        keep(sweep, f"{number}_whole", one)
    for number, one in enumerate(records, start=2):
        (sweep / f"{number}_damaged").mkdir()
        written = {"schema": 2, "workload": "train", "fingerprint": "", "directory": f"sweep/{number}_damaged"} | one
        (sweep / f"{number}_damaged" / RECORD).write_text(json.dumps(written))
    for path in sweep.glob("*_*"):
        rows = series.unknown(3, 2)
        rows["loss"], rows["step_seconds"] = 1.0, 0.1
        series.append(path / series.NAME, rows)
    return sweep


@pytest.fixture(autouse=True)
def _without_javascript(monkeypatch):
    """Of four megabytes."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")


#: Every place of the record with every value, in an order that is the same each time; a part of them each is tried.
CASES = [(at, value) for at in places(WHOLE) for value in VALUES]
random.Random(7).shuffle(CASES)


@pytest.mark.parametrize("part", range(6))
def test_damaged_record_leaves_other_reports_intact(ptdbench, tmp_path, part):
    sweep = lay(tmp_path / "sweep", [damaged(at, value) for at, value in CASES[40 * part : 40 * part + 40]])
    other = lay(tmp_path / "other", [])
    with np.errstate(over="ignore"):
        assert ptdbench("report", sweep, "--html", "--md", "--latex")[0] == 0
        ptdbench("status", sweep)
        ptdbench("explain", sweep)
        ptdbench("explain", sweep / "2_damaged", sweep / "1_whole")
        for sides in ((sweep, other), (other, sweep)):
            ptdbench("compare", *sides)
    assert all(name in (sweep / "report.html").read_text() for name in ("0_whole", "1_whole"))


@pytest.mark.parametrize(("at", "value", "said"), [
    (("metrics", "tokens_per_second"), -5.5, "Expected `float` >= 1e-30 - at `$.metrics.tokens_per_second`"),
    (("metrics", "tokens_per_second"), 5e-324, "Expected `float` >= 1e-30 - at `$.metrics.tokens_per_second`"),
    (("layout", "data"), 0, "Expected `int` >= 1 - at `$.layout.data`"),
    (("steps",), -1, "Expected `int` >= 0 - at `$.steps`"),
])  # fmt: skip
def test_figures_that_nothing_can_be_made_of_are_named(ptdbench, tmp_path, at, value, said):
    sweep = lay(tmp_path / "sweep", [damaged(at, value)])
    status, out, err = ptdbench("report", sweep, "--md")
    assert (status, out) == (0, f"report       {sweep / 'report.md'}\n")
    assert f"{sweep / '2_damaged' / RECORD} is damaged: {said}" in err
    status, out, others = ptdbench("explain", sweep)
    assert (status, others, "fsdp +44 ms vs ddp: " in out) == (0, err, True)


def test_a_block_that_is_no_number_is_none(ptdbench, tmp_path):
    sweep = lay(tmp_path / "sweep", [damaged(("config", "repeat", "block"), [1])])
    status, _, err = ptdbench("report", sweep, "--md")
    assert (status, err) == (0, [])


def test_more_steps_on_record_than_there_are_take_no_memory(ptdbench, tmp_path):
    alone = damaged(("steps",), 3 * 10**9) | {"config": {"seed": 1}}
    assert ptdbench("report", lay(tmp_path / "sweep", [alone]))[0] == 0
