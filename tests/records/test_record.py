"""What a record says was asked for, whatever was typed."""

import copy
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from ptdbench.records import record, schema, store
from ptdbench.records.run_record import parse, typed
from tests.report.made import made, run
from tests.sweep.made import CONFIG


@pytest.mark.parametrize(("norm", "written"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), (None, None)])
def test_an_option_that_json_has_not_is_written_as_it_is_typed(tmp_path, norm, written):
    """Else ``clip_norm=inf`` and ``null`` would be one configuration, and a resumed run not that of its record."""
    asked = {**CONFIG, "train": {**CONFIG["train"], "clip_norm": norm}}
    store.write_record(tmp_path, record.begin(asked, tmp_path, {}))
    found = store.load_record(tmp_path)
    assert found["config"]["train"]["clip_norm"] == written
    assert record.same_work(found["config"], asked)
    assert found["fingerprint"] == record.fingerprint(found["config"])


@pytest.mark.parametrize("value", [None, 7, True, "", "abc", [1], {"a": 1}, -1, 1e30])
@pytest.mark.parametrize("option", ["workload.name", "train.global_batch", "cluster.nodes", "precision", "train"])
def test_what_is_refused_leaves_a_record_that_can_be_read(tmp_path, option, value):
    typed: dict = copy.deepcopy(CONFIG)
    *groups, last = option.split(".")
    node = typed
    for group in groups:
        node = node[group]
    node[last] = value
    written = json.dumps(record.begin(typed, tmp_path, {})).encode()
    assert parse(written).config == typed


def test_a_record_of_before_kernels_were_chosen_is_of_fused_ones():
    assert (run(kernels=None).kernels, run(kernels="torch").kernels) == ("fused", "torch")
    assert record.same_work(CONFIG, CONFIG | {"kernels": "fused"})
    assert not record.same_work(CONFIG, CONFIG | {"kernels": "torch"})


def test_an_option_is_there_and_of_its_type_or_it_is_none():
    one = made({"config": {"repeat": {"block": [1], "series": "a"}, "train": None}})
    assert one.option("repeat.series", str) == "a"
    for name in ("repeat.block", "train.steps", "repeat.series.more", "nothing"):
        assert one.option(name, int) is None
    assert made({"config": None}).option("repeat.block", int) is None


def test_what_is_typed_has_no_repeats_and_is_quoted():
    of_start = ["repeat.block=3", "+repeat.runs=5", "resume=a", "sweep.resume=b"]
    typed = run(overrides=["model=a b", *of_start, "+x='1'"]).rerun_command()
    assert typed.endswith(" 'model=a b' '+x='\"'\"'1'\"'\"''")
    assert run(overrides=[]).rerun_command() == run(overrides=["repeat.runs=5"]).rerun_command()
    assert run(overrides=["a=1"], launcher="torchrun").rerun_command().startswith("torchrun ... ")
    typed = run(overrides=["a=1"], sources=["--config-dir", "my own"]).rerun_command()
    assert typed.endswith(" --config-dir 'my own' a=1")
    assert run().rerun_command() is None


def test_where_choices_come_from_is_on_record_and_stays_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "-cd", "mine", "model=mine"])
    typed = record.begin({}, tmp_path, {}, ["model=mine"])
    assert typed["sources"] == ["--config-dir", "mine"]
    monkeypatch.setattr(sys, "argv", ["ptdbench", "run", "outputs/mine"])
    assert record.with_earlier_results(record.begin({}, tmp_path, {}), typed)["sources"] == typed["sources"]


def test_what_a_record_lacks_is_empty_for_its_readers_and_stays_as_it_is_written():
    written = record.begin(CONFIG, Path(), {}) | {"micro_batch": {"found": np.int64(4)}, "metrics": None, "mine": 1}
    read = typed(written)
    assert (read.micro_batch.found, read.metrics, read.nodes, read.is_open) == (4, schema.Metrics(), [], True)
    assert (read.written["metrics"], read.written["mine"]) == (None, 1)
    assert typed({**written, "error": None}).error.type == ""
