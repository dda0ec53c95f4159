"""Experiments, in short: they come to a result under every strategy, and go on under another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.train_for_real import bigram_bits_per_byte
from ptdbench.records import store
from tests.conftest import ROOT

pytestmark = pytest.mark.ranks

SHORT = ("device=cpu", "eval.every=1000", "checkpoint.every_steps=1000")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_digits_are_learned(run, strategy):
    record = run(
        "experiment=digits_resnet18", f"parallel={strategy}", *SHORT, "train.steps=45", "optimizer.lr=0.02",
        "lr_schedule.rise=0.2",
    )  # fmt: skip
    assert record["status"] == "ok", record["error"]
    assert record["evaluations"][-1]["top1"] > 0.8  # a tenth of them is what guessing comes to
    assert (Path(record["directory"]) / "inputs.png").stat().st_size > 1000


def test_text_is_learned_better_than_pairs_of_bytes(run):
    record = run("experiment=stdlib_gpt_tiny", "parallel=pdp", *SHORT, "train.steps=150")
    assert record["status"] == "ok", record["error"]
    assert 2 < record["evaluations"][-1]["bits_per_byte"] < bigram_bits_per_byte()


def test_a_run_goes_on_under_another_strategy_and_launcher(tmp_path, environ):
    """As it is typed: ddp first, then torchrun and fsdp from its checkpoint."""
    digits = ("experiment=digits_resnet18", "device=cpu", "train.global_batch=16", "eval.every=3")
    begin = [sys.executable, str(ROOT / "train.py"), *digits, "parallel=ddp", "train.steps=3", "hydra.run.dir=begun"]
    subprocess.run([*begin, "checkpoint.every_steps=3"], cwd=tmp_path, env=environ, timeout=120, check=True)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node=2"]
    go_on = ["parallel=fsdp", "resume=begun", "train.steps=5", "hydra.run.dir=gone_on"]
    subprocess.run(
        [*torchrun, str(ROOT / "train.py"), *digits, *go_on], cwd=tmp_path, env=environ | {"OMP_NUM_THREADS": "1"},
        timeout=120, check=True,
    )  # fmt: skip
    begun, gone_on = (store.load_record(tmp_path / name) for name in ("begun", "gone_on"))
    assert gone_on["status"] == "ok"
    assert gone_on["losses"][:3] == begun["losses"]
    assert [evaluation["step"] for evaluation in gone_on["evaluations"]] == [3, 5]
    assert gone_on["segments"][1]["layout"]["parallel"]["name"] == "fsdp"
