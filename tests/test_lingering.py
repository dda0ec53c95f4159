"""Ranks that are done end, whatever a model has left running in them."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.daily import cases
from tests.launch.faulty import FAULTY
from tests.programs import TORCHRUN, call

pytestmark = pytest.mark.ranks

LINGERING = (*FAULTY, "+model.call=2", "train.steps=4", "device=cpu", "parallel=ddp")

Done = subprocess.CompletedProcess[str]


def under_torchrun(*words: str, cwd: Path, environ: dict[str, str]) -> Done:
    return call(*TORCHRUN, *words, cwd=cwd, environ=environ)


def finished(train: Callable[..., Done], cwd: Path, environ: dict[str, str], how: str) -> tuple[Done, dict[str, Any]]:
    """What was said, and the record; that it ends is most of each test."""
    done = train(*LINGERING, f"+model.how={how}", "hydra.run.dir=run", cwd=cwd, environ=environ)
    return done, json.loads((cwd / "run" / "record.json").read_text())


LAUNCHED = cases("train", [forked.with_ranks, under_torchrun], daily=[forked.with_ranks], ids=["local", "torchrun"])


@LAUNCHED
def test_forgotten_thread_does_not_hold_a_finished_run(tmp_path, environ, train):
    done, record = finished(train, tmp_path, environ, "thread")
    assert done.returncode == 0, done.stderr
    assert (record["status"], record["steps"]) == ("ok", 4)
    said = "was ended 1 s after its work was done: these threads were still running: uploader"
    assert done.stderr.count(said) == 2


@pytest.mark.thorough
def test_exit_handler_does_not_hold_a_finished_run(tmp_path, environ):
    """Only where Python ends a rank: local ranks are forks, which leave such things out."""
    done, record = finished(under_torchrun, tmp_path, environ, "atexit")
    assert (done.returncode, record["status"]) == (0, "ok"), done.stderr
    assert "its exit handlers did not return" in done.stderr


@LAUNCHED
def test_failing_rank_leaves_at_once_with_its_output(tmp_path, environ, train):
    """Neither for a thread that runs on nor for the destructors of its process group, which may wait for a peer."""
    done, record = finished(train, tmp_path, environ, "thread_and_raise")
    assert done.returncode == 1
    assert (record["status"], record["error"]["rank"]) == ("failed", 1)
    assert record["error"]["message"] == "this one is on purpose"
    assert "last words" in done.stdout
    assert "still ran" not in done.stderr


def test_ranks_without_a_result_have_failed(tmp_path, environ):
    done, record = finished(forked.with_ranks, tmp_path, environ, "exit")
    assert done.returncode == 1
    assert (record["status"], record["error"]["rank"]) == ("failed", -1)
    assert record["error"]["message"] == "every rank ended with exit status 0 and without a result"
