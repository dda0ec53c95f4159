"""Words that are added to a command line before Hydra reads it."""

from __future__ import annotations

import argparse
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ptdbench.setup import commandline


def test_overrides_are_added_beside_those_of_the_command_line(monkeypatch):
    """Argparse takes positional arguments in one place only."""
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "a=1", "b=2", "--config-name", "config"])
    commandline.insert(["a=1", "b=2"], ["c=3"])
    assert sys.argv == ["train.py", "-m", "a=1", "b=2", "c=3", "--config-name", "config"]
    monkeypatch.setattr(sys, "argv", ["train.py", "-m"])
    commandline.insert([], ["c=3"])
    assert sys.argv == ["train.py", "-m", "c=3"]


@pytest.mark.parametrize(
    ("typed", "added"),
    [
        (["hydra/launcher=submitit_slurm", "parallel=ddp"], ["cluster=slurm"]),
        (["hydra/launcher=submitit_slurm", "cluster=site_gpu"], []),
        (["hydra/launcher=submitit_local"], ["hydra.mode=MULTIRUN"]),
        (["repeat.runs=5"], ["hydra.mode=MULTIRUN"]),
        (["repeat.runs=1"], []),
        (["parallel=ddp"], []),
        ([], []),
    ],
)
def test_what_a_launcher_means_by_itself(monkeypatch, typed, added):
    monkeypatch.setattr(sys, "argv", ["train.py", *typed, "--config-name", "config"])
    arguments = argparse.Namespace(overrides=list(typed), multirun=False)
    commandline.imply(arguments)
    assert arguments.overrides == [*typed, *added]
    assert sys.argv == ["train.py", *typed, *added, "--config-name", "config"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("profile=true", "profile.trace=true"),
        ("profile=false", "profile.steps=0"),
        ("repeat=1", "repeat.runs=1"),
        ("repeat.max=5", "repeat.max=5"),
    ],
)
def test_a_group_alone_is_short_for_its_options(monkeypatch, typed, meant):
    words = ["parallel=fsdp", typed, "profile.steps=3"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    arguments = argparse.Namespace(overrides=list(words), multirun=False)
    commandline.imply(arguments)
    assert sys.argv == ["train.py", "parallel=fsdp", meant, "profile.steps=3"]


@pytest.mark.parametrize("text", ["a/b c", "o'clock", "a\\b", "a\\", "a\\'b", "a\\\\'", "''"])
def test_hydra_reads_what_is_quoted_as_it_was(text):
    (override,) = OverridesParser.create().parse_overrides([f"x={commandline.quoted(text)}"])
    assert str(override.value()) == text
