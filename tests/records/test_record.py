"""What a record says was asked for, whatever was typed."""

import copy
import json
import math
import sys

import pytest

from ptdbench.records import record, schema, store
from tests.report.made import run
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
    assert schema.record(written)["config"] == typed


def test_an_option_is_there_and_of_its_type_or_it_is_none():
    written = {"config": {"repeat": {"block": [1], "series": "a"}, "train": None}}
    assert record.option(written, "repeat.series", str) == "a"
    for name in ("repeat.block", "train.steps", "repeat.series.more", "nothing"):
        assert record.option(written, name, int) is None
    assert record.option({"config": None}, "repeat.block", int) is None


def test_what_is_typed_has_no_repeats_and_is_quoted():
    of_start = ["repeat.block=3", "+repeat.runs=5", "resume=a", "sweep.resume=b"]
    typed = record.rerun_command(run(overrides=["model=a b", *of_start, "+x='1'"]))
    assert typed.endswith(" 'model=a b' '+x='\"'\"'1'\"'\"''")
    assert record.rerun_command(run(overrides=[])) == record.rerun_command(run(overrides=["repeat.runs=5"]))
    assert record.rerun_command(run(overrides=["a=1"], launcher="torchrun")).startswith("torchrun ... ")
    typed = record.rerun_command(run(overrides=["a=1"], sources=["--config-dir", "my own"]))
    assert typed.endswith(" --config-dir 'my own' a=1")
    assert record.rerun_command(run(overrides=None)) is None
    assert record.rerun_command(run()) is None


def test_where_choices_come_from_is_on_record_and_stays_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "-cd", "mine", "model=mine"])
    typed = record.begin({}, tmp_path, {}, ["model=mine"])
    assert typed["sources"] == ["--config-dir", "mine"]
    monkeypatch.setattr(sys, "argv", ["ptdbench", "run", "outputs/mine"])
    assert record.with_earlier_results(record.begin({}, tmp_path, {}), typed)["sources"] == typed["sources"]


def test_a_group_of_fields_is_read_by_its_type():
    written = {"micro_batch": {"found": 4}, "metrics": None}
    assert schema.part(written, schema.MicroBatch).found == 4
    assert schema.part(written, schema.Metrics) == schema.Metrics()
