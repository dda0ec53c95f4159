"""Sweeps with repeats, by whole commands: each run in every block, and what is missing done again in its place."""

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.conftest import ROOT

pytestmark = pytest.mark.ranks

TOY = ("model=toy", "parallel=single", "train.steps=4", "profile.steps=0", "device=cpu", "hydra.sweep.dir=sweep")

Done = subprocess.CompletedProcess[str]
Train = Callable[..., Done]


@pytest.fixture
def train(tmp_path: Path, environ: dict[str, str]) -> Train:
    return partial(forked.with_ranks, cwd=tmp_path, environ={**environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> tuple[Path, Done]:
    """Two alternatives in two blocks, as they were left, and what was said."""
    folder = tmp_path_factory.mktemp("whole")
    asked = ("-m", *TOY, "optimizer.lr=1e-3,1e-4", "repeat=2", "checkpoint.every_steps=2")
    return folder / "sweep", forked.with_ranks(*asked, cwd=folder, environ=environ)


@pytest.fixture
def sweep(whole: tuple[Path, Done], tmp_path: Path) -> Path:
    """A copy of them that a test may go on with."""
    return Path(shutil.copytree(whole[0], tmp_path / "sweep"))


def runs(sweep: Path) -> dict[str, dict[str, Any]]:
    """The results by the names of their directories, in the order in which the runs began."""
    records = {path.parent.name: json.loads(path.read_text()) for path in sweep.glob("*/record.json")}
    return dict(sorted(records.items(), key=lambda named: named[1]["started"]))


def block(record: dict[str, Any]) -> int:
    return record["config"]["repeat"]["block"]


def alternative(record: dict[str, Any]) -> float:
    return record["config"]["optimizer"]["lr"]


def test_each_run_is_carried_out_in_every_block_and_every_second_block_is_reversed(whole):
    sweep, done = whole
    assert done.returncode == 0, done.stderr
    found = runs(sweep)
    assert [name.partition("_")[0] for name in found] == ["0", "1", "2", "3"]
    records = list(found.values())
    assert [block(record) for record in records] == [0, 0, 1, 1]
    rates = [alternative(record) for record in records]
    assert sorted(rates[:2]) == [1e-4, 1e-3]
    assert rates == rates[::-1]
    for rate in rates[:2]:
        one, other = (record for record in records if alternative(record) == rate)
        assert one["fingerprint"] == other["fingerprint"]
        assert one["owner"]["pid"] == other["owner"]["pid"]  # the sweep's process opens them
        assert one["owner"]["launch"] != other["owner"]["launch"]
        assert one["final_loss"] == other["final_loss"]
    assert len({record["fingerprint"] for record in records}) == 2


def test_what_is_missing_is_done_again_in_its_place_and_more_blocks_are_added(sweep, train):
    before = runs(sweep)
    (gone,) = (name for name in before if name.startswith("2_toy_single_lr-"))
    shutil.rmtree(sweep / gone)
    done = train("sweep.resume=sweep", "repeat=3")
    assert done.returncode == 0, done.stderr
    again = runs(sweep)
    assert {name for name in before if again[name] != before[name]} == {gone}
    redone, was = again[gone], before[gone]
    assert (block(redone), alternative(redone), redone["fingerprint"]) == (1, alternative(was), was["fingerprint"])
    added = [again[name] for name in again.keys() - before.keys()]
    assert [block(record) for record in added] == [2, 2]
    assert {alternative(record) for record in added} == {1e-3, 1e-4}
    assert forked.train_py("sweep.resume=sweep", cwd=sweep.parent).returncode == 0  # it has three blocks from now on
    assert runs(sweep) == again
