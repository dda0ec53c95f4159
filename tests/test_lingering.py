"""Ranks that are done end, whatever a model has left running in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.ranks

LINGERING = (
    "model=custom", "model._target_=tests.launch.lingering.Lingering", "data=synthetic_vectors", "data.inputs=8",
    "data.outputs=4", "train.steps=4", "device=cpu", "parallel=ddp",
)  # fmt: skip
LOCAL = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def finished(
    command: tuple[str, ...], cwd: Path, environ: dict[str, str], *overrides: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What the command said, and its record; that it ends is most of each test."""
    done = subprocess.run(
        [*command, str(ROOT / "train.py"), *LINGERING, *overrides, "hydra.run.dir=run"],
        cwd=cwd, env={**environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return done, json.loads((cwd / "run" / "record.json").read_text())


COMMANDS = pytest.mark.parametrize("command", [LOCAL, TORCHRUN], ids=["local", "torchrun"])


@COMMANDS
def test_a_thread_that_was_forgotten_does_not_keep_a_run_that_is_done(tmp_path, environ, command):
    done, record = finished(command, tmp_path, environ, "+model.how=thread")
    assert done.returncode == 0, done.stderr
    assert (record["status"], record["steps"]) == ("ok", 4)
    assert [note.partition(":")[0] for note in sorted(record["remarks"]["leaving"])] == ["rank 0", "rank 1"]
    for note in record["remarks"]["leaving"]:
        assert note.endswith("was ended 1 s after its work was done: these threads still ran: uploader")
    assert done.stderr.count("these threads still ran: uploader") == 2


def test_what_runs_at_exit_does_not_keep_it_either(tmp_path, environ):
    """Only where Python ends a rank: local ranks are forks, which leave such things out."""
    done, record = finished(TORCHRUN, tmp_path, environ, "+model.how=atexit")
    assert (done.returncode, record["status"]) == (0, "ok"), done.stderr
    assert all(note.endswith("what runs at exit did not return") for note in record["remarks"]["leaving"])


@COMMANDS
def test_a_failing_rank_leaves_at_once_with_what_it_has_to_say(tmp_path, environ, command):
    """Neither for a thread that runs on nor for the destructors of its process group, which may wait for a peer."""
    done, record = finished(command, tmp_path, environ, "+model.how=raise")
    assert done.returncode == 1
    assert (record["status"], record["error"]["rank"]) == ("failed", 1)
    assert record["error"]["message"] == "this one is on purpose"
    assert "last words" in done.stdout
    assert "still ran" not in done.stderr


def test_ranks_that_all_end_well_and_without_a_result_have_failed(tmp_path, environ):
    done, record = finished(LOCAL, tmp_path, environ, "+model.how=exit")
    assert done.returncode == 1
    assert (record["status"], record["error"]["rank"]) == ("failed", -1)
    assert record["error"]["message"] == "every rank ended with exit status 0 and without a result"
