"""One start of a run at a time: an open record is its owner's while that lives."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from msgspec.structs import replace

from ptdbench.launch import slurm
from ptdbench.launch.slurm import JobState, SlurmError
from ptdbench.problems import ConfigError
from ptdbench.records import ownership, record, store
from ptdbench.records.ownership import this_process
from tests.conftest import composed
from tests.shared_ranks import carry_out

CONFIG = {
    "workload": {"name": "train"}, "model": {"name": "toy"}, "parallel": {"name": "ddp"},
    "train": {"global_batch": 8}, "precision": "fp32",
}  # fmt: skip


def draft(directory, launch, **changes):
    owner = replace(this_process(launch, {}), **changes)
    return record.begin(CONFIG, directory, {}, owner=owner)


@pytest.fixture
def process():
    """Another process of this machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as opened:
        yield opened
        opened.kill()


def test_a_process_that_lives_keeps_its_run(tmp_path, process):
    started = psutil.Process(process.pid).create_time()
    first = draft(tmp_path, "first", pid=process.pid, started=started)
    ownership.open_record(tmp_path, first)
    with pytest.raises(ConfigError, match=rf"process {process.pid} on .* is writing its results there; wait for it"):
        ownership.open_record(tmp_path, draft(tmp_path, "second"))
    assert store.load_record(tmp_path)["owner"]["launch"] == "first"
    process.kill()
    process.wait()
    ownership.open_record(tmp_path, draft(tmp_path, "second"))
    assert store.load_record(tmp_path)["owner"]["launch"] == "second"


def test_a_process_id_that_was_given_again_is_another_process(tmp_path, process):
    ownership.open_record(tmp_path, draft(tmp_path, "first", pid=process.pid, started=1.0))
    ownership.open_record(tmp_path, draft(tmp_path, "second"))


def test_a_run_that_has_ended_is_free(tmp_path):
    ownership.open_record(tmp_path, draft(tmp_path, "first"))
    store.write_record(tmp_path, store.load_record(tmp_path) | {"status": "ok", "error": None})
    ownership.open_record(tmp_path, draft(tmp_path, "second"))


@pytest.mark.parametrize(
    ("state", "held"), [("RUNNING", True), ("COMPLETING", True), ("PENDING", False), ("FAILED", False), (None, False)]
)
def test_a_job_that_runs_keeps_its_run(tmp_path, monkeypatch, state, held):
    found = {"7_1": JobState("7_1", state, 1, "n1", "")} if state else {}
    monkeypatch.setattr(slurm, "queue", lambda ids: found)
    ownership.open_record(tmp_path, draft(tmp_path, "first", job="7_1", host="elsewhere"))
    if held:
        with pytest.raises(ConfigError, match="job 7_1 is writing its results there"):
            ownership.open_record(tmp_path, draft(tmp_path, "second"))
    else:
        ownership.open_record(tmp_path, draft(tmp_path, "second"))


def test_a_job_that_begins_again_goes_on_with_its_own_run(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "queue", lambda ids: pytest.fail("it runs, of course"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ownership.open_record(tmp_path, draft(tmp_path, "first", job="7", host="elsewhere"))
    ownership.open_record(tmp_path, draft(tmp_path, "second", job="7"))


def test_where_nobody_can_tell_it_is_said(tmp_path, monkeypatch, capsys):
    def silent(ids):
        raise SlurmError("squeue is not on PATH")

    monkeypatch.setattr(slurm, "queue", silent)
    for changes in ({"job": "7"}, {"host": "elsewhere"}):
        ownership.open_record(tmp_path, draft(tmp_path, "first", **changes))
        ownership.open_record(tmp_path, draft(tmp_path, "second"))
        store.write_record(tmp_path, store.load_record(tmp_path) | {"error": None})
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all("whether that has ended cannot be determined from here" in line for line in told)


@pytest.mark.ranks
def test_a_second_start_of_a_run_trains_nothing(tmp_path, process, capsys):

    started = psutil.Process(process.pid).create_time()
    ownership.open_record(tmp_path, draft(tmp_path, "first", pid=process.pid, started=started))
    before = (tmp_path / "record.json").read_bytes()
    with pytest.raises(SystemExit):
        carry_out(composed("model=toy", "device=cpu", "train.steps=2"), tmp_path)
    assert (tmp_path / "record.json").read_bytes() == before
    assert "is writing its results there" in capsys.readouterr().err
