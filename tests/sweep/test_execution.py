"""Runs in processes of their own on this machine: what each is given, and what a stop signal does."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ptdbench.launch import local
from ptdbench.records import store
from ptdbench.setup.compose import compose_all
from ptdbench.sweep import execution
from ptdbench.sweep.agenda import Agenda


def save_when_told(directory: str, environment: Mapping[str, str]) -> None:
    """Stand for a run: note what GPUs it sees, have its sweep stopped as by Ctrl-C, and save when it is told."""
    saved = Path(directory, "saved")
    signal.signal(signal.SIGTERM, lambda *_: saved.touch())
    Path(directory, "gpus").write_text(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {bool(environment)}")
    os.kill(int(os.environ["SWEEP"]), signal.SIGINT)
    for _ in range(6000):
        if saved.exists():
            break
        time.sleep(0.01)


@pytest.mark.parametrize("visible", [None, "3,1"])
def test_a_signal_is_passed_on_to_the_run_that_goes_on_and_no_other_begins(asked, tmp_path, monkeypatch, visible):
    monkeypatch.setattr(execution, "carry_out_alone", save_when_told)
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
    assert (tmp_path / "0_toy_ddp" / "gpus").read_text() == f"{visible} True"
    assert (tmp_path / "0_toy_ddp" / "saved").exists()
    assert not (tmp_path / "1_toy_ddp" / "gpus").exists()
    error = store.load_record(tmp_path / "0_toy_ddp")["error"]  # what stands for the run has left no result
    assert (error["type"], str(tmp_path / "logs") in error["message"]) == ("Gone", True)
