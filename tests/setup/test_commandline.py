"""Words that are added to a command line before Hydra reads it."""

import argparse

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ptdbench.setup import commandline


@pytest.mark.parametrize(("typed", "added"), [
    (["hydra/launcher=submitit_slurm", "parallel=ddp"], ["cluster=slurm"]),
    (["hydra/launcher=submitit_slurm", "cluster=site_gpu"], []),
    (["repeat.runs=5"], ["hydra.mode=MULTIRUN"]),
    (["repeat.runs=1"], []),
    (["repeat.runs=auto"], ["hydra.mode=MULTIRUN", "train.steps=20"]),
    (["repeat.runs=auto", "train.steps=60"], ["hydra.mode=MULTIRUN"]),
    (["repeat.runs=auto", "experiment=digits_resnet18"], ["hydra.mode=MULTIRUN"]),
    (["repeat.runs=auto", "sweep.resume=outputs/sweep"], ["hydra.mode=MULTIRUN"]),
    (["parallel=ddp"], []),
])  # fmt: skip
def test_what_a_launcher_means_by_itself(typed, added):
    assert commandline.with_implied(line(typed)) == [*typed, *added]


def line(typed, **flags):
    plain = {"multirun": False, "config_dir": None, "config_name": None, "config_path": None}
    return argparse.Namespace(overrides=typed, **{**plain, **flags})


@pytest.mark.parametrize("flag", ["config_dir", "config_name", "config_path"])
def test_other_files_say_how_long_runs_are(flag):
    assert commandline.with_implied(line(["repeat=auto"], multirun=True, **{flag: "mine"})) == ["repeat.runs=auto"]


@pytest.mark.parametrize("flag", ["config_name", "config_path"])
def test_another_file_chooses_its_cluster(flag):
    typed = ["hydra/launcher=submitit_slurm"]
    assert commandline.with_implied(line(typed, **{flag: "mine"})) == typed


@pytest.mark.parametrize(("typed", "meant"), [
    ("profile=true", "profile.trace=true"), ("profile=false", "profile.steps=0"), ("repeat=1", "repeat.runs=1"),
    ("repeat.max=5", "repeat.max=5"),
])  # fmt: skip
def test_a_group_alone_is_short_for_its_options(typed, meant):
    words = ["parallel=fsdp", typed, "profile.steps=3"]
    assert commandline.with_implied(line(words)) == ["parallel=fsdp", meant, "profile.steps=3"]


@pytest.mark.parametrize("text", ["a/b c", "o'clock", "a\\b", "a\\", "a\\'b", "a\\\\'", "''"])
def test_hydra_reads_what_is_quoted_as_it_was(text):
    (override,) = OverridesParser.create().parse_overrides([f"x={commandline.quoted(text)}"])
    assert str(override.value()) == text
