"""Experiments, in short: they come to a result under every strategy, and go on under another one."""

import pytest

from benchmarks.train_for_real import bigram_bits_per_byte

pytestmark = pytest.mark.ranks

SHORT = ("device=cpu", "eval.every=1000", "checkpoint.every_steps=1000")


@pytest.mark.thorough
def test_digits_are_learned(run):
    record = run(
        "experiment=digits_resnet18", "parallel=ddp", *SHORT, "train.steps=32", "train.global_batch=64",
        "optimizer.lr=0.02", "lr_schedule.rise=0.2", "profile.steps=0",
    )  # fmt: skip
    assert record["status"] == "ok", record["error"]
    assert record["evaluations"][-1]["top1"] > 0.5  # a tenth of them is what guessing comes to


@pytest.mark.thorough
def test_text_is_learned_better_than_pairs_of_bytes(run):
    few = "data.held_out=0.005"
    record = run("experiment=stdlib_gpt_tiny", "parallel=pdp", *SHORT, few, "train.steps=150", "model.layers=2")
    assert record["status"] == "ok", record["error"]
    assert 2 < record["evaluations"][-1]["bits_per_byte"] < bigram_bits_per_byte(few)
