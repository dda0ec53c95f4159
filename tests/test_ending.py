from __future__ import annotations

import pytest

from ptdbench import ending
from ptdbench.launch.world import World
from ptdbench.records import record, store
from ptdbench.records.failure import Failure

OPEN = {
    "workload": "train",
    "fingerprint": "",
    "directory": "outputs/run",
    "status": "failed",
    "error": {"rank": -1, "type": record.UNFINISHED, "message": "", "traceback": ""},
}
NODE_LOST = Failure(rank=-1, type="NODE_FAIL", message="n2 is down", traceback="", time=0.0, host="")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "LINGER", 0.0)
    monkeypatch.setattr(ending.local, "ignore_signals", lambda: None)
    return tmp_path


def world(rank: int) -> World:
    return World(rank=rank, size=2, local_rank=0, local_size=1, launcher="torchrun")


def test_a_rank_closes_a_record_that_is_open(directory):
    store.write_record(directory, OPEN)
    ending.report(world(0), directory, ValueError("a bad batch"))
    assert store.load_record(directory)["error"]["message"] == "a bad batch"


def test_an_earlier_failure_of_another_rank_takes_the_place_of_a_later_one(directory):
    store.write_record(directory, OPEN)
    ending.report(world(1), directory, RuntimeError("Connection closed by peer"))
    ending.report(world(0), directory, ValueError("a bad batch"))
    assert store.load_record(directory)["error"]["message"] == "a bad batch"


def test_a_rank_that_outlives_its_job_does_not_undo_what_the_queue_said(directory):
    store.write_record(directory, record.failed(OPEN, NODE_LOST))
    ending.report(world(1), directory, RuntimeError("Connection closed by peer"))
    assert store.load_record(directory)["error"]["type"] == "NODE_FAIL"


def test_a_rank_that_fails_on_its_way_out_does_not_undo_that_the_run_has_saved(directory):
    store.write_record(directory, record.stopped({**OPEN, "directory": str(directory)}, "SIGTERM"))
    ending.report(world(1), directory, RuntimeError("Connection closed by peer"))
    assert store.load_record(directory)["status"] == "preempted"
    assert "it has saved" in store.load_record(directory)["error"]["message"]
