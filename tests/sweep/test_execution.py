"""Runs in processes of their own on this machine: what each is given, and what a stop signal does."""

import os
import signal

import pytest

from ptdbench import search_path
from ptdbench.launch import local
from ptdbench.records import store
from ptdbench.setup.compose import compose_all
from ptdbench.sweep import execution
from ptdbench.sweep.execution import Agenda

#: Stands for the process of a run: notes what it is given, has its sweep stopped as by Ctrl-C, and saves when told.
SAVES_WHEN_TOLD = """
import os, signal, sys, time
from pathlib import Path

here = Path(sys.argv[2])
signal.signal(signal.SIGINT, lambda *_: (here / "saved").touch())
(here / "given").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + f" {'PTDBENCH_TYPED' in os.environ}")
os.kill(int(os.environ["SWEEP"]), signal.SIGINT)
while not (here / "saved").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("visible", [None, "3,1"])
def test_a_signal_is_passed_on_to_the_run_that_goes_on_and_no_other_begins(asked, tmp_path, monkeypatch, visible):
    monkeypatch.setattr(search_path, "module", lambda _: ["-c", SAVES_WHEN_TOLD])
    monkeypatch.setenv("SWEEP", str(os.getpid()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    words = ["seed=0,1"]
    agenda = Agenda(tmp_path, asked(*words))
    composed = compose_all(["model=toy", "hydra/launcher=submitit_local", *words], multirun=True)
    with local.stopping(), pytest.raises(local.Stopped) as stop:
        execution.run_all(agenda, composed)
    assert stop.value.signal == signal.SIGINT
    assert (tmp_path / "0_toy_ddp" / "given").read_text() == f"{visible or 'all'} True"
    assert (tmp_path / "0_toy_ddp" / "saved").exists()
    assert not (tmp_path / "1_toy_ddp" / "given").exists()
    error = store.load_record(tmp_path / "0_toy_ddp")["error"]  # what stands for the run has left no result
    assert (error["type"], str(tmp_path / "logs" / "0" / "0_0_log.err") in error["message"]) == ("Gone", True)
