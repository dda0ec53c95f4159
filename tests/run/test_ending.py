from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.error import URLError

import pytest
import torch
import torch.distributed as dist

from ptdbench.job import Outcome
from ptdbench.launch import local, rendezvous
from ptdbench.launch.local import Stopped
from ptdbench.launch.world import ALL_LAUNCHERS, World
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import ledger, record, store
from ptdbench.records.failure import Failure
from ptdbench.records.ownership import Attempt
from ptdbench.run import door, ending, ranks
from ptdbench.setup import config, training_spec
from tests.conftest import composed
from tests.shared_ranks import carry_out
from tests.sweep.made import CONFIG

OPEN = record.begin(CONFIG, Path("run"), {})
NODE_LOST = Failure(rank=-1, type="NODE_FAIL", message="n2 is down", traceback="", time=0.0, host="")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setitem(ALL_LAUNCHERS, "torchrun", replace(ALL_LAUNCHERS["torchrun"], linger_seconds=0.0))
    monkeypatch.setattr(local, "ignore_signals", lambda: None)  # in the tests' own process
    return tmp_path


def attempt(directory: Path) -> Attempt:
    return Attempt(directory, "this")


def world(number: int) -> World:
    return World(rank=number, size=2, local_rank=0, local_size=1, launcher="torchrun")


@pytest.mark.parametrize("earlier", [None, RuntimeError("Connection closed by peer")], ids=["alone", "after another"])
def test_rank_closes_an_open_record_with_the_cause(directory, earlier):
    store.write_record(directory, OPEN)
    if earlier:
        ending.report(world(1), attempt(directory), earlier)
    ending.report(world(0), attempt(directory), ValueError("a bad batch"))
    assert store.load_record(directory)["error"]["message"] == "a bad batch"


SAVED = record.stopped({**OPEN, "directory": "run"}, "SIGTERM")
OK = {**OPEN, "status": "ok", "error": None}


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), ValueError("in an exit handler")])
@pytest.mark.parametrize("written", [record.failed(OPEN, NODE_LOST), SAVED, OK], ids=["by the queue", "saved", "ok"])
def test_late_error_does_not_change_a_closed_record(directory, written, error):
    store.write_record(directory, written)
    ending.report(world(1), attempt(directory), error)
    assert store.load_record(directory) == written


def test_late_launcher_error_does_not_change_a_closed_record(directory, monkeypatch):
    def start(*_, **__):
        store.write_record(directory, store.load_record(directory) | {"status": "ok", "error": None})
        raise local.LaunchError("the fork server has ended")

    monkeypatch.setattr(local, "start", start)
    carry_out(composed("model=toy", "device=cpu"), directory)
    written = store.load_record(directory)
    assert written["status"] == "ok", written["error"]


def test_a_refusal_by_one_rank_of_a_launch_ends_the_run_in_all_of_them_and_is_recorded(directory, monkeypatch):
    """As where its node has less memory; the next run of the sweep can then begin."""
    store.write_record(directory, OPEN)
    shared, lack = dist.HashStore(), ConfigError([Problem("device", "cuda", "n2 is half full")])
    shared.set_timeout(timedelta(seconds=20))
    monkeypatch.setattr(rendezvous, "store", lambda: shared)
    monkeypatch.setattr(rendezvous, "export", lambda *_: None)

    def built(_, place, __):
        if place.rank:
            raise lack

    monkeypatch.setattr(ranks, "_built", built)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(ranks.of_launcher, world(number), attempt(directory), None, None) for number in (0, 1)]
        assert [call.result() for call in calls] == [None, None]
    assert store.load_record(directory)["error"]["message"] == f"rank=1: {lack}"


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("no such split"), "failed"), (URLError("unknown host"), "failed"), (Stopped(2), "preempted")],
)
def test_data_error_fails_the_run_and_a_signal_stops_all(directory, monkeypatch, capsys, error, status):
    monkeypatch.setattr(training_spec, "prepare_data", Mock(side_effect=error))
    ledger.begin(directory, [])
    (run := directory / "run").mkdir()
    with nullcontext() if isinstance(error, Exception) else pytest.raises(Stopped):
        carry_out(composed("model=toy", "device=cpu"), run)
    (row,) = store.read_results(directory)
    assert (row.status, row.error.type, row.error.message) == (status, type(error).__name__, str(error))
    assert "cannot be written" not in capsys.readouterr().err


def test_failure_before_the_rendezvous_is_recorded(directory, monkeypatch):
    store.write_record(directory, OPEN)
    monkeypatch.setattr(door, "discover", lambda _: world(1))
    monkeypatch.setattr(rendezvous, "launch_name", lambda _: "this")
    monkeypatch.setattr(rendezvous, "export", lambda *_: None)
    monkeypatch.setattr(ranks, "_built", Mock(side_effect=RuntimeError("no such layer")))
    with pytest.raises(SystemExit):
        door.run(directory)
    error = store.load_record(directory)["error"]
    assert (error["rank"], error["message"]) == (1, "no such layer")


@pytest.mark.parametrize(
    ("saved", "says"), [(True, "it has saved: "), (False, "could not be saved (see remarks)"), (None, "starts over: ")]
)
def test_stopped_run_says_what_it_saved_and_is_requeued_only_then(directory, monkeypatch, saved, says):
    requeued = []
    monkeypatch.setattr(ending, "_requeue", lambda *_: requeued.append(saved))
    store.write_record(directory, {**OPEN, "directory": "run"})
    spec = SimpleNamespace(config=SimpleNamespace(cluster=None), virtual=None)
    ending.write_result(attempt(directory), spec, torch.device("cpu"), [], Outcome(stopped="SIGUSR2", saved=saved))
    written = store.load_record(directory)
    assert (says in written["error"]["message"], written["status"]) == (True, "preempted")
    assert requeued == [True] * (saved is True)


@pytest.mark.parametrize(("device", "virtual"), [("cuda", None), ("cuda", "h200"), ("cpu", None)])
def test_a_run_measured_on_gpus_has_its_prediction_and_is_cached(directory, monkeypatch, device, virtual):
    cached = []
    monkeypatch.setattr(ending.measured, "prediction", lambda _: {"step_seconds": 0.1})
    monkeypatch.setattr(ending.measured, "keep", lambda run: cached.append(run.predicted.step_seconds))
    monkeypatch.setattr(ending, "environment", lambda _: {})
    store.write_record(directory, {**OPEN, "directory": "run"})
    spec = SimpleNamespace(config=SimpleNamespace(cluster=None), virtual=virtual)
    ending.write_result(attempt(directory), spec, torch.device(device), [], Outcome())
    is_measured = (device, virtual) == ("cuda", None)
    assert cached == [0.1] * is_measured
    assert store.load_record(directory).get("predicted") == ({"step_seconds": 0.1} if is_measured else None)


def test_the_warning_ahead_of_a_time_limit_is_told_as_what_it_is():
    in_job = {**OPEN, "directory": "run", "config": {"cluster": {"submit": "wait"}}}
    stopped = record.stopped(in_job, "SIGUSR2 after step 1; not requeued: enough")
    assert stopped["status"] == "timeout"
    ended = "stopped by SIGUSR2 after step 1, ahead of the time limit of its job; not requeued: enough; it has saved: "
    assert stopped["error"]["message"].startswith(ended)
    assert record.stopped(in_job, "SIGTERM after step 1")["status"] == "preempted"


@pytest.mark.parametrize(("most", "stopped", "says"), [
    (10, "SIGUSR2", "saved and requeued (1 of 10)"),
    (0, "SIGUSR2", "SIGUSR2 after step 1; not requeued: cluster.max_requeues=0 is reached"),
    (10, "SIGTERM", OPEN["error"]["message"]),  # of scancel
])  # fmt: skip
def test_job_is_requeued_ahead_of_its_time_limit_as_often_as_allowed(directory, monkeypatch, most, stopped, says):
    """In a container its script is asked to do so."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ledger.begin(directory, [])
    (run := directory / "run").mkdir()
    store.write_record(run, OPEN)
    requeues = ("cluster.requeue=true", f"cluster.max_requeues={most}", "cluster.container.image=/i.sqsh")
    read = config.read(composed("cluster=slurm", *requeues))
    ending._requeue(attempt(run), read.cluster, OPEN, f"{stopped} after step 1")
    assert (directory / ".requeue-7").exists() == ("requeued (" in says)
    assert says in store.load_record(run)["error"]["message"]
