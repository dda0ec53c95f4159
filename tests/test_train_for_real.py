"""Experiments, in short: they come to a result under every strategy, and go on under another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.train_for_real import bigram_bits_per_byte
from tests.data import small_cifar10, tiny_tokenizer

pytestmark = pytest.mark.ranks

SHORT = ("device=cpu", "eval.every=1000", "checkpoint.every_steps=1000")


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


def jpeg(path: Path, content: bytes | None = None) -> None:
    path.parent.mkdir(parents=True)
    if content is None:
        Image.new("RGB", (40, 30)).save(path)
    else:
        path.write_bytes(content)


IMAGES = ("experiment=imagefolder_resnet50", "data.root={folder}/images", "model.classes=2", "precision=fp32")
TEXT = ("experiment=text_gpt_small", "precision=fp32", "data.path={folder}/text", "data.cache={folder}/cache")


class TestBadInput:
    """It is refused in one line, before a process is started for it."""

    @pytest.fixture
    def refusal(self, run, tmp_path):
        def refused(*overrides: str) -> str:
            record = run(*(override.format(folder=tmp_path) for override in overrides), "device=cpu")
            assert (record["status"], record["error"]["type"]) == ("failed", "ConfigError")
            assert record["error"]["rank"] == -1
            return record["error"]["message"]

        return refused

    @pytest.mark.parametrize("truncated", [False, True], ids=["no archive", "a truncated one"])
    def test_no_data(self, refusal, tmp_path, truncated):
        (tmp_path / "cifar").mkdir()
        if truncated:
            archive = small_cifar10.write(tmp_path / "cifar")
            archive.write_bytes(archive.read_bytes()[:-100])
        there = list((tmp_path / "cifar").iterdir())
        small = ["data._target_=tests.data.small_cifar10.SmallCifar10"] * truncated
        said = refusal("experiment=cifar10_resnet18", *small, "data.root={folder}/cifar")
        rule = "neither cifar-10-batches-py nor cifar-10-python.tar.gz in it"
        assert said.startswith(f"data.root={tmp_path}/cifar: {rule}")
        assert "data.download=true" in said
        assert list((tmp_path / "cifar").iterdir()) == there

    def test_a_folder_without_images(self, refusal, tmp_path):
        for kind in ("cats", "dogs"):
            jpeg(tmp_path / "images" / "train" / kind / "notes.txt", b"none yet")
        assert refusal(*IMAGES).startswith("data.root=")

    def test_a_tokenizer_with_more_tokens_than_the_model(self, refusal, tmp_path):
        (tmp_path / "text").mkdir()
        (tmp_path / "text" / "a.txt").write_text("one two three")
        tiny_tokenizer.words(tmp_path / "tokenizer.json", {"one": 1, "two": 90})
        said = refusal(*TEXT, "data.tokenizer={folder}/tokenizer.json", "model.vocabulary=64")
        assert said.startswith("data.vocabulary=64: the tokenizer")
        assert "model.vocabulary=128" in said


def test_an_image_that_is_broken_is_named(run, tmp_path):
    for kind in ("cats", "dogs"):
        jpeg(tmp_path / "train" / kind / "fine.jpg")
    jpeg(tmp_path / "train" / "birds" / "torn.jpg", b"not an image")
    record = run(
        "experiment=imagefolder_resnet50", f"data.root={tmp_path}", "model=resnet18", "model.classes=3",
        "model.image_size=32", "precision=fp32", "train.global_batch=4", "train.steps=2", "eval.every=null",
        "checkpoint.every_steps=null", "device=cpu",
    )  # fmt: skip
    assert record["status"] == "failed"
    assert "torn.jpg" in record["error"]["message"]
