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


def test_data_that_are_not_there_are_refused_before_a_process_is_started(run, tmp_path):
    (tmp_path / "cifar").mkdir()
    record = run("experiment=cifar10_resnet18", f"data.root={tmp_path}/cifar", "device=cpu")
    error = record["error"]
    assert (record["status"], error["type"], error["rank"]) == ("failed", "ConfigError", -1)
    rule = "has neither cifar-10-batches-py nor cifar-10-python.tar.gz, "
    assert error["message"].startswith(f"data.root={tmp_path}/cifar: {rule}")
    assert list((tmp_path / "cifar").iterdir()) == []
