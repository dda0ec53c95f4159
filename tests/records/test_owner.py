"""A record is written by the start of the run that opened it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest
from msgspec.structs import asdict

from ptdbench.records import record, store
from ptdbench.records.failure import describe, read_failures, write_failure
from ptdbench.records.ownership import Attempt, this_process

CONFIG = {
    "workload": {"name": "train"}, "model": {"name": "toy"}, "parallel": {"name": "ddp"},
    "train": {"global_batch": 8}, "precision": "fp32",
}  # fmt: skip


def opened(directory: Path, launch: str | None) -> Path:
    owner = this_process(launch, {}) if launch else None
    store.write_record(directory, record.begin(CONFIG, directory, {}, owner=owner))
    return directory


def test_the_owner_is_this_process_and_its_job():
    found = this_process("one", {"SLURM_JOB_ID": "123"})
    process = psutil.Process()
    assert asdict(found) == {
        "launch": "one", "host": socket.gethostname(), "pid": os.getpid(), "started": process.create_time(),
        "job": "123",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "123"}, "123"),
        ({"SLURM_JOB_ID": "125", "SLURM_ARRAY_JOB_ID": "123", "SLURM_ARRAY_TASK_ID": "4"}, "123_4"),
    ],
)
def test_a_job_is_called_as_squeue_writes_it(environ, job):
    assert this_process("one", environ).job == job


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
    assert Attempt(tmp_path, "one").amend(lambda written: {**written, "status": "ok"}) is None
    assert (tmp_path / "record.json").read_bytes() == before
    assert capsys.readouterr().err == f"{tmp_path}: the run was started again; its record is left unchanged\n"


def test_each_start_has_failures_of_its_own_and_deletes_nobody_elses(tmp_path):
    first, second = Attempt(tmp_path, "one"), Attempt(tmp_path, "another")
    write_failure(first.failures, describe(ValueError("the first time"), rank=0))
    write_failure(second.failures, describe(ValueError("the second time"), rank=0))
    assert [[told.message for told in read_failures(attempt.failures)] for attempt in (first, second)] == [
        ["the first time"], ["the second time"],
    ]  # fmt: skip
