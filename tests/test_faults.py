"""Runs that fail are results: the reason is in the record, and nothing else is lost."""

import errno
import json
import os
import re
import signal
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ptdbench.measure import memory
from tests import forked
from tests.conftest import ROOT, record_of
from tests.daily import cases
from tests.launch.faulty import FAULTY
from tests.programs import until

pytestmark = pytest.mark.ranks

SHORT = (*FAULTY, "train.steps=5")


@pytest.mark.parametrize(("strategy", "rank", "how", "status", "kind", "message"), [
    ("fsdp", 1, "raise", "failed", "RuntimeError", "this one is on purpose"),
    ("ddp", 0, "kill", "failed", "SIGKILL", "killed by SIGKILL"),
    ("fsdp", 1, "crash", "failed", "SIGSEGV", "killed by SIGSEGV (an invalid memory access in native code)"),
    ("fsdp", 0, "limit", "oom", "RuntimeError", "allocate memory"),  # of the address space
])  # fmt: skip
def test_first_failing_rank_and_reason_are_recorded(run, strategy, rank, how, status, kind, message):
    record = run(*SHORT, f"parallel={strategy}", f"+model.how={how}", f"+model.rank={rank}")
    error = record["error"]
    assert (record["status"], error["rank"], error["type"]) == (status, rank, kind)
    assert message in error["message"]
    has_reported = how not in ("kill", "crash")
    assert ("faulty.py" in error["traceback"]) == has_reported
    if has_reported:
        assert re.fullmatch(r"tests/launch/faulty\.py:\d+ in forward", error["where"])
        assert (Path(record["directory"]) / "traceback.txt").read_text() == error["traceback"]
    assert record["world_size"] == 2
    assert all(path.stat().st_size for path in (Path(record["directory"]) / "failures").glob("*/*"))


@cases("rank", [0, 1], daily=[1])
def test_signal_to_one_rank_stops_all_after_the_same_step(run, rank):
    record = run(*SHORT, "parallel=ddp", "+model.how=term", f"+model.rank={rank}")
    error = record["error"]
    assert (record["status"], error["rank"], error["type"]) == ("preempted", -1, "Stopped")
    begun_anew = (
        "no checkpoint (see checkpoint.every_steps), so resuming starts over: "
        f"python train.py resume={record['directory']}"
    )
    assert error["message"] == f"stopped by SIGTERM after step {record['steps']} of 5; {begun_anew}"
    assert record["steps"] == len(record["losses"]) >= 3
    assert record["metrics"]["samples_per_second"] > 0


def test_rank_whose_compiler_ctrl_c_ended_was_stopped(tmp_path):
    """A terminal signals all processes; rank 0 waits for rank 1, which reports first."""
    with forked.started(*SHORT, "+model.how=wait", "hydra.run.dir=run", cwd=tmp_path) as train:
        whole = psutil.Process(train.pid)
        until(lambda: any(one.name() == "sleep" for one in whole.children(recursive=True)) or train.poll() is not None)
        for one in (whole, *whole.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGINT)
        ended = train.communicate()
    record = record_of(tmp_path / "run")
    assert (record["status"], record["error"]["message"]) == ("preempted", "stopped by SIGINT"), ended
    assert ended.returncode == 128 + signal.SIGINT


@cases(("how", "status"), [("raise", "failed"), ("kill", "failed"), ("oom", "oom")], daily=[("kill", "failed")])
def test_failed_run_keeps_its_measured_steps(run, how, status):
    """Brought together after step 1, and from then on before their number has doubled."""
    record = run(*FAULTY, "train.steps=9", f"+model.how={how}", "+model.call=7")
    assert (record["status"], record["error"]["rank"]) == (status, 1)
    assert 4 <= record["steps"] == len(record["losses"]) <= 6
    assert record["final_loss"] == record["losses"][-1]
    assert record["metrics"]["samples_per_second"] > 0
    assert [(one["first_step"], one["steps"]) for one in record["segments"]] == [(0, record["steps"])]
    events = EventAccumulator(record["directory"])
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("step/loss")]
    assert shown == [(step, pytest.approx(loss)) for step, loss in enumerate(record["losses"])]
    assert events.Scalars("summary/ok")[-1].value == 0


def test_rank_killed_by_the_kernel_is_out_of_memory(run, monkeypatch):
    counted = iter([7, 8])
    monkeypatch.setattr(memory, "oom_kills", lambda: next(counted))
    record = run(*SHORT, "parallel=ddp", "+model.how=kill")
    assert (record["status"], record["error"]["type"], record["error"]["rank"]) == ("oom", "SIGKILL", 1)
    assert record["error"]["message"] == "killed by SIGKILL: the kernel ran out of memory meanwhile"


@cases("strategy", ["ddp", "fsdp", "pdp", "tp"], daily=["pdp"])
def test_high_learning_rate_diverges_under_every_layout(run, strategy):
    model = ("model=gpt_tiny", "model.layers=2", "model.width=32", "model.sequence_length=32", "data=synthetic_tokens")
    record = run(*model, "optimizer.lr=1e30", "train.steps=3", f"parallel={strategy}", "device=cpu")
    assert record["error"]["message"] == "the loss of step 2 is NaN or infinite"
    assert (record["status"], record["error"]["rank"], record["phases"]) == ("diverged", 0, None)
    assert record["losses"][1] is None  # JSON has no NaN


def test_other_runs_of_a_sweep_complete(tmp_path):
    """Where one is refused beforehand, and one fails."""
    asked = ("-m", *SHORT, "+model.how=raise,none", "parallel=ddp", "train.global_batch=15,16")
    done = forked.with_ranks(*asked, f"hydra.sweep.dir={tmp_path}/sweep", cwd=ROOT)
    records = [json.loads(line) for line in (tmp_path / "sweep" / "results.jsonl").read_text().splitlines()]
    assert [(record["global_batch"], record["status"]) for record in records] == [
        (15, "failed"), (16, "failed"), (15, "failed"), (16, "ok"),
    ]  # fmt: skip
    assert [record["error"] and record["error"]["rank"] for record in records] == [-1, 1, -1, None]
    assert records[0]["error"]["message"] == (
        "train.global_batch=15: must be a multiple of the number of data-parallel replicas, 2; try 14, 16"
    )
    for record in records:
        assert json.loads((tmp_path / "sweep" / record["directory"] / "record.json").read_text()) == record
    assert done.returncode == 1  # not all were ok
    assert "Traceback" not in done.stdout + done.stderr
    assert "this one is on purpose" in done.stdout


def test_unstartable_ranks_fail_the_run_and_not_the_next(run, monkeypatch):
    def refuse(_: BaseProcess) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patched:
        patched.setattr(BaseProcess, "start", refuse)
        record = run("model=toy", "train.steps=2")
    assert (record["status"], record["error"]["rank"], record["error"]["type"]) == ("failed", -1, "LaunchError")
    assert record["error"]["message"] == "the ranks could not be started: Cannot allocate memory"
    record = run("model=toy", "train.steps=2")
    assert record["status"] == "ok"
    assert not (Path(record["directory"]) / "failures").exists()
