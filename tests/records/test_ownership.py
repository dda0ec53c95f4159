"""A record is written by the start of the run that opened it, and while that lives by no other."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from msgspec.structs import asdict, replace

from ptdbench.launch import slurm
from ptdbench.launch.slurm import JobState, SlurmError
from ptdbench.problems import ConfigError
from ptdbench.records import ownership, record, store
from ptdbench.records.ownership import Attempt, Progress, ProgressFile, read_progress, this_process
from ptdbench.run import door
from tests.sweep.made import CONFIG


def opened(directory: Path, launch: str | None) -> Path:
    owner = this_process(launch, {}) if launch else None
    store.write_record(directory, record.begin(CONFIG, directory, {}, owner=owner))
    return directory


@pytest.mark.parametrize(("environ", "job"), [
    ({}, None),
    ({"SLURM_JOB_ID": "123"}, "123"),
    ({"SLURM_JOB_ID": "125", "SLURM_ARRAY_JOB_ID": "123", "SLURM_ARRAY_TASK_ID": "4"}, "123_4"),
])  # fmt: skip
def test_the_owner_is_this_process_and_its_job_as_squeue_writes_it(environ, job):
    this = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    assert asdict(this_process("one", environ)) == {"launch": "one", **this, "job": job}


@pytest.mark.parametrize("owner", ["one", None])  # nobody has opened what only waits in a queue
def test_its_own_record_is_amended(tmp_path, owner):
    attempt = Attempt(opened(tmp_path, owner), "one")
    assert attempt.amend(lambda written: {**written, "status": "ok"}) == store.load_record(tmp_path)
    assert store.load_record(tmp_path)["status"] == "ok"
    assert os.listdir(tmp_path) == ["record.json"]


@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_a_record_that_was_taken_away_or_damaged_meanwhile_is_written_from_what_was_opened(tmp_path, content):
    draft = store.load_record(opened(tmp_path, "one"))
    (tmp_path / "record.json").unlink()
    if content is not None:
        (tmp_path / "record.json").write_bytes(content)
    attempt = Attempt(tmp_path, "one", draft)
    attempt.amend(lambda written: {**written, "status": "ok"})
    assert store.load_record(tmp_path) == {**draft, "status": "ok"}
    assert (tmp_path / "record.json.damaged").exists() == (content is not None)


def test_the_record_of_a_later_start_is_left_alone(tmp_path, capsys):
    opened(tmp_path, "another")
    before = (tmp_path / "record.json").read_bytes()
    assert Attempt(tmp_path, "one").failures != Attempt(tmp_path, "another").failures
    assert Attempt(tmp_path, "one").amend(lambda written: {**written, "status": "ok"}) is None
    assert (tmp_path / "record.json").read_bytes() == before
    assert capsys.readouterr().err == f"{tmp_path}: the run was started again; its record is left unchanged\n"


def draft(directory, launch, **changes):
    owner = replace(this_process(launch, {}), **changes)
    return record.begin(CONFIG, directory, {}, owner=owner)


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as opened:
        yield opened
        opened.kill()


@pytest.mark.parametrize("job", [None, "7"], ids=["outside of a job", "in the same job"])
def test_a_process_that_lives_keeps_its_run(tmp_path, process, monkeypatch, job):
    monkeypatch.setenv("SLURM_JOB_ID", job or "")
    started = psutil.Process(process.pid).create_time()
    first = draft(tmp_path, "first", pid=process.pid, started=started, job=job)
    ownership.open_record(tmp_path, first)
    who = f"process {process.pid} on {socket.gethostname()}"
    with pytest.raises(ConfigError, match=f"{who} is writing its results there; wait for it"):
        ownership.open_record(tmp_path, draft(tmp_path, "second"))
    assert store.load_record(tmp_path)["owner"]["launch"] == "first"
    process.kill()
    process.wait()
    ownership.open_record(tmp_path, draft(tmp_path, "second"))
    assert store.load_record(tmp_path)["owner"]["launch"] == "second"


def test_a_process_id_that_was_given_again_is_another_process_and_a_run_that_has_ended_is_free(tmp_path, process):
    ownership.open_record(tmp_path, draft(tmp_path, "first", pid=process.pid, started=1.0))
    ownership.open_record(tmp_path, draft(tmp_path, "second"))
    store.write_record(tmp_path, store.load_record(tmp_path) | {"status": "ok", "error": None})
    ownership.open_record(tmp_path, draft(tmp_path, "third"))


@pytest.mark.parametrize(
    ("state", "held"), [("RUNNING", True), ("COMPLETING", True), ("PENDING", False), ("FAILED", False), (None, False)]
)
def test_a_job_that_runs_keeps_its_run(tmp_path, monkeypatch, state, held):
    found = {"7_1": JobState("7_1", state, "n1", "")} if state else {}
    monkeypatch.setattr(slurm, "queue", lambda ids: found)
    ownership.open_record(tmp_path, draft(tmp_path, "first", job="7_1", host="elsewhere"))
    if held:
        with pytest.raises(ConfigError, match="job 7_1 is writing its results there"):
            ownership.open_record(tmp_path, draft(tmp_path, "second"))
    else:
        ownership.open_record(tmp_path, draft(tmp_path, "second"))


@pytest.mark.parametrize(("launch", "restarts", "is_over"), [
    ("slurm-7.0-1", 2, True),
    ("a1b2", 2, True),  # by the job's script, or mpirun in it
    ("slurm-7.0-2", 2, False),  # a step of this start of the job on another of its nodes
    ("slurm-7.0-0", 0, False),
    ("a1b2", 0, False),
])  # fmt: skip
def test_a_job_that_begins_again_goes_on_with_its_own_run(tmp_path, monkeypatch, capsys, launch, restarts, is_over):
    monkeypatch.setattr(slurm, "queue", lambda ids: pytest.fail("it runs, of course"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts or ""))
    ownership.open_record(tmp_path, draft(tmp_path, launch, job="7", host="elsewhere", pid=5))
    ownership.open_record(tmp_path, draft(tmp_path, "slurm-7.1-2", job="7"))
    told = f"{tmp_path}: was opened by process 5 on elsewhere; whether that has ended cannot be determined from here\n"
    assert capsys.readouterr().err == ("" if is_over else told)


def test_where_nobody_can_tell_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "queue", Mock(side_effect=SlurmError("squeue is not on PATH")))
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
        door.run(tmp_path)
    assert (tmp_path / "record.json").read_bytes() == before
    assert "is writing its results there" in capsys.readouterr().err


def test_progress_is_written_soon_now_and_then_and_at_the_end(tmp_path):
    file = ProgressFile(tmp_path, "tokens")
    assert read_progress(tmp_path) is None
    for step, now, written in ((10, 51.0, 10), (20, 52.0, 10), (30, 60.9, 10), (40, 61.0, 40), (100, 62.0, 100)):
        file.write(step, 100, 2048.0 * step, now)
        found = read_progress(tmp_path)
        assert found == Progress(written, 100, "tokens", 2048.0 * written)


def test_a_new_start_has_no_progress_and_one_that_cannot_be_written_fails_no_run(tmp_path):
    ProgressFile(tmp_path, "tokens").write(57, 100, 2048.0, 50.0)
    ownership.open_record(tmp_path, draft(tmp_path, "first"))
    assert read_progress(tmp_path) is None
    ProgressFile(tmp_path / "gone", "tokens").write(1, 2, None, 50.0)
