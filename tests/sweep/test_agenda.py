"""Which runs are carried out, and that each appears together with its record."""

from __future__ import annotations

import json

from ptdbench.records import store
from ptdbench.sweep.agenda import Agenda

TEMPLATE = "${hydra.job.num}_${workload.label}"


def test_a_run_appears_together_with_its_record(asked, tmp_path):
    agenda = Agenda(asked("seed=0,1"))
    job = agenda.open(tmp_path / "sweep", TEMPLATE, 1, ["seed=1"])
    assert (job.number, job.subdirectory) == (1, "1_toy_ddp")
    (path,) = (tmp_path / "sweep").rglob("*.*")
    written = json.loads(path.read_text())
    assert (path.name, written["overrides"], written["error"]["type"]) == ("record.json", ["seed=1"], "Unfinished")


def test_a_run_that_is_refused_is_a_row_and_not_carried_out(asked, tmp_path):
    agenda = Agenda(asked("train.global_batch=15,16"))
    assert agenda.open(tmp_path, TEMPLATE, 0, []) is None
    (row,) = store.read_results(tmp_path)
    assert (row["status"], row["error"]["type"]) == ("failed", "ConfigError")


def test_what_is_done_or_queued_or_not_meant_is_left_alone(asked, tmp_path):
    runs = asked("seed=0,1,2")
    Agenda(runs).open(tmp_path, TEMPLATE, 0, [])
    done = store.load_record(tmp_path / "0_toy_ddp") | {"status": "ok", "error": None}
    store.write_record(tmp_path / "0_toy_ddp", done)
    agenda = Agenda(runs, queued=frozenset({"1_toy_ddp"}))
    opened = [agenda.open(tmp_path, TEMPLATE, number, []) for number in range(3)]
    assert [job and job.number for job in opened] == [None, None, 2]
    assert store.load_record(tmp_path / "0_toy_ddp") == done
    only = Agenda(runs, only="1_toy_ddp")
    assert [bool(only.open(tmp_path, TEMPLATE, number, [])) for number in range(3)] == [False, True, False]


def test_a_run_that_was_done_with_another_model_is_done_again_and_says_so(asked, tmp_path, capsys):
    Agenda(asked("seed=0")).open(tmp_path, TEMPLATE, 0, [])
    done = store.load_record(tmp_path / "0_toy_ddp") | {"status": "ok", "error": None}
    done["config"]["model"]["width"] = 7  # as if the file in conf/ had changed since
    store.write_record(tmp_path / "0_toy_ddp", done)
    capsys.readouterr()
    assert Agenda(asked("seed=0")).open(tmp_path, TEMPLATE, 0, []) is not None
    said = capsys.readouterr().err
    assert said == "0_toy_ddp: was done with another model, toy with width=7 (here 64); done again\n"


def test_with_more_time_a_run_that_is_done_remains_done(asked, tmp_path):
    Agenda(asked("cluster.time_minutes=1")).open(tmp_path, TEMPLATE, 0, [])
    done = store.load_record(tmp_path / "0_toy_ddp") | {"status": "ok", "error": None}
    store.write_record(tmp_path / "0_toy_ddp", done)
    assert Agenda(asked("cluster.time_minutes=50")).open(tmp_path, TEMPLATE, 0, []) is None
    assert Agenda(asked("cluster.nodes=2")).open(tmp_path, TEMPLATE, 0, []) is not None
