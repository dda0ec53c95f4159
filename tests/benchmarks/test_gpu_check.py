from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from tests.conftest import ROOT


@pytest.fixture
def runs(tmp_path: Path) -> gpu_check.Runs:
    options = Namespace(model="gpt_tiny", device="cpu", batch=4)
    return gpu_check.Runs(options, ranks=1, directory=tmp_path)


@pytest.mark.ranks
def test_one_rank_of_each_strategy_passes_and_another_seed_does_not(runs: gpu_check.Runs, capsys) -> None:
    gpu_check._check_numbers(runs)
    assert runs.failed == []
    assert capsys.readouterr().out.count("  ok  ") == 4

    reference = runs.reference("other", "seed=1", "train.steps=5")
    runs.compared("other", "ddp", reference, 1e-4, "seed=2", "train.steps=5")
    assert runs.failed == ["other ddp"]


@pytest.mark.ranks
def test_a_run_without_a_reference_or_without_success_fails(runs: gpu_check.Runs) -> None:
    assert runs.reference("idle", "optimizer.lr=0", "train.steps=2") == []
    runs.compared("idle", "ddp", [], 1e-4, "train.steps=1")
    runs.compared("refused", "fsdp", [5.0], 1e-4, "train.global_batch=9", "train.micro_batch=2")
    assert runs.failed == ["idle single", "idle ddp", "refused fsdp"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check needs a GPU")
    assert done.stderr.count("\n") == 1


def test_wheels_are_unpacked_onto_the_path_unless_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lacking", "numpy"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}_of_the_wheel/data.txt", "text")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    with gpu_check._importable(tmp_path):
        checkout, site, before = os.environ["PYTHONPATH"].split(os.pathsep)
        assert (checkout, before) == (str(ROOT), "before")
        assert sys.path[:2] == [checkout, site]
        assert os.listdir(site) == ["lacking_of_the_wheel"]
