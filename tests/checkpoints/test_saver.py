"""Saving beside the training: copies, what a failed save leaves, and how many stay."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ptdbench.checkpoints import checkpoint_dir, safe_load, saver
from ptdbench.checkpoints.saver import Saver
from ptdbench.launch import settings
from tests.daily import cases
from tests.parallel.ranks import on_ranks


def names(run_directory: Path) -> list[str]:
    folder = run_directory / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def loaded(run_directory: Path) -> Tensor:
    """The weight in the newest checkpoint."""
    tensors = {"model.weight": torch.full((4, 5), -1.0)}
    safe_load.load(checkpoint_dir.newest(run_directory).found.path, tensors)
    return tensors["model.weight"]


@pytest.fixture(params=[True, False], ids=["asynchronous", "blocking"])
def keeper(request: pytest.FixtureRequest, tmp_path: Path, alone: None) -> Iterator[Saver]:
    made = Saver(tmp_path, keep=2, asynchronous=request.param)
    yield made
    made.close()


@pytest.fixture
def weight() -> dict[str, Tensor]:
    return {"model.weight": torch.arange(20.0).reshape(4, 5)}


def test_a_saved_checkpoint_counts(keeper, weight, tmp_path):
    asked_in = []
    keeper.save(3, weight, {"width": 5}, lambda: asked_in.append(threading.current_thread()) or {"losses": [0.1, 0.2]})
    assert asked_in == [threading.main_thread()]  # facts are asked for at once
    keeper.wait()
    search = checkpoint_dir.newest(tmp_path)
    assert (keeper.saved, keeper.problems, search.warnings) == ([3], [], ())
    found = search.found.manifest
    assert (found.step, found.world_size, found.model) == (3, 1, {"width": 5})
    assert (found.facts, found.torch) == ({"losses": [0.1, 0.2]}, torch.__version__)
    assert set(found.files) == {path.name for path in search.found.path.iterdir()} - {"manifest.json"}
    assert torch.equal(loaded(tmp_path), weight["model.weight"])


def test_only_the_newest_are_kept_and_the_same_step_may_be_saved_again(keeper, weight, tmp_path):
    for step in (1, 2, 3, 4):
        keeper.save(step, weight, {}, {})
    keeper.save(4, {"model.weight": weight["model.weight"] * 2}, {}, {})
    keeper.wait()
    assert keeper.saved == [1, 2, 3, 4, 4]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert torch.equal(loaded(tmp_path), weight["model.weight"] * 2)
    assert len(keeper.stall_seconds) == 5


def test_what_is_found_out_of_saved_weights_is_added_to_their_facts(keeper, weight, tmp_path):
    keeper.save(3, weight, {}, {"seen": 1, "kept": 2})
    keeper.judged(3, {"seen": 5}, is_best=False)  # while they are being written
    keeper.judged(4, {"seen": 6}, is_best=True)  # of weights that could not be saved
    keeper.wait()
    assert checkpoint_dir.newest(tmp_path).found.manifest.facts == {"seen": 5, "kept": 2}
    assert names(tmp_path) == ["step-00000003"]
    assert keeper.problems == []


class TestBest:
    def test_it_stays_beside_the_newest_until_a_better_one_is_on_the_disk(self, keeper, weight, tmp_path):
        for step in (1, 2, 3, 4):
            keeper.save(step, weight, {}, {})
            if step == 1:
                keeper.judged(step, {}, is_best=True)
        keeper.wait()
        assert names(tmp_path) == ["best", "step-00000001", "step-00000003", "step-00000004"]
        assert (tmp_path / "checkpoints" / "best").readlink().name == "step-00000001"
        keeper.save(5, weight, {}, {})
        keeper.judged(5, {}, is_best=True)
        keeper.wait()
        assert names(tmp_path) == ["best", "step-00000004", "step-00000005"]
        assert (tmp_path / "checkpoints" / "best").readlink().name == "step-00000005"

    def test_one_that_cannot_be_saved_takes_no_place(self, keeper, weight, tmp_path, monkeypatch):
        keeper.save(1, weight, {}, {})
        keeper.judged(1, {}, is_best=True)
        keeper.wait()
        with monkeypatch.context() as broken:
            broken.setattr(saver.checkpoint_dir, "publish", lambda partial: 1 / 0)
            keeper.save(2, weight, {}, {})
            keeper.judged(2, {}, is_best=True)
            keeper.wait()
        for step in (3, 4, 5):
            keeper.save(step, weight, {}, {})
        keeper.wait()
        assert len(keeper.problems) == 1
        assert names(tmp_path) == ["best", "step-00000001", "step-00000004", "step-00000005"]
        assert (tmp_path / "checkpoints" / "best").readlink().name == "step-00000001"


class Gate:
    """Holds the writing thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        write = saver._write_tensors

        def held(*arguments: Any) -> None:
            self.reached.set()
            assert self.open.wait(60)
            write(*arguments)

        monkeypatch.setattr(saver, "_write_tensors", held)


@pytest.mark.parametrize("saves", [1, 2, 3])
def test_training_goes_on_and_what_is_saved_is_what_was(alone, tmp_path, weight, monkeypatch, saves):
    """Also where the copies' memory is used again."""
    keeper = Saver(tmp_path, keep=1)
    for step in range(1, saves):
        keeper.save(step, weight, {}, {})
        keeper.wait()
        weight["model.weight"] += 1
    gate = Gate(monkeypatch)
    expected = weight["model.weight"].clone()
    keeper.save(saves, weight, {}, {})
    assert gate.reached.wait(60)
    weight["model.weight"].fill_(-5)  # before a byte is written
    assert names(tmp_path)[-1] == f"step-0000000{saves}.partial"
    gate.open.set()
    keeper.close()
    assert keeper.problems == []
    assert torch.equal(loaded(tmp_path), expected)


def test_a_save_waits_for_the_one_before(alone, tmp_path, weight, monkeypatch):
    keeper = Saver(tmp_path, keep=2)
    gate = Gate(monkeypatch)
    keeper.save(1, weight, {}, {})
    assert gate.reached.wait(60)
    second = threading.Thread(target=keeper.save, args=(2, {"model.weight": torch.zeros(4, 5)}, {}, {}))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.open.set()
    second.join()
    keeper.close()
    assert keeper.saved == [1, 2]
    older = {"model.weight": torch.empty(4, 5)}
    safe_load.load(tmp_path / "checkpoints" / "step-00000001", older)
    assert torch.equal(older["model.weight"], weight["model.weight"])


#: What fails, by the object and the name that are patched; facts fail by themselves.
FAILS = {
    "facts": (),
    "tensors": (torch, "save"),
    "manifest": (checkpoint_dir, "write_manifest"),
    "hash": (checkpoint_dir, "stamp"),
}


@pytest.mark.parametrize("what", FAILS)
def test_a_failed_save_is_noted_and_the_next_one_succeeds(keeper, weight, tmp_path, monkeypatch, what):
    keeper.save(1, weight, {}, {})
    keeper.wait()
    before = loaded(tmp_path)

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("on purpose")

    with monkeypatch.context() as patched:
        if FAILS[what]:
            patched.setattr(*FAILS[what], fail)
        keeper.save(2, weight, {}, {} if FAILS[what] else fail)
        keeper.wait()
    assert keeper.problems == ["step 2: not saved: rank 0: ValueError: on purpose"]
    assert names(tmp_path) == ["step-00000001"]
    assert torch.equal(loaded(tmp_path), before)
    keeper.save(3, weight, {}, {})
    keeper.wait()
    assert keeper.saved == [1, 3]


def test_what_cannot_be_deleted_is_noted(keeper, weight, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_dir, "_set_aside", mock.Mock(side_effect=PermissionError("on purpose")))
    for step in (1, 2, 3):
        keeper.save(step, weight, {}, {})
    keeper.wait()
    assert keeper.saved == [1, 2, 3]
    note = "step 3: saved, but older checkpoints could not be deleted: rank 0: PermissionError: on purpose"
    assert keeper.problems == [note]


def test_what_is_a_persons_costs_no_more_than_what_it_is_in_the_way_of(keeper, weight, tmp_path):
    keeper.save(1, weight, {}, {})
    keeper.wait()
    folder = tmp_path / "checkpoints"
    (folder / "best").write_text("mine")
    for name in ("step-00000001", "step-00000002.partial"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "notes.txt").write_text("mine")
    for step in (2, 3, 4, 5):
        keeper.save(step, weight, {}, {})
        if step == 4:
            keeper.judged(step, {}, is_best=True)
    keeper.wait()
    assert keeper.saved == [1, 3, 4, 5]
    rule = "was not created by ptdbench: move it elsewhere"
    assert keeper.problems == [
        f"step 2: not saved: rank 0: FileExistsError: {folder}/step-00000002.partial/notes.txt {rule}",
        f"step 4: saved, but the best checkpoint could not be marked: rank 0: FileExistsError: {folder}/best {rule}",
        f"step 5: saved, but the best checkpoint could not be marked: rank 0: FileExistsError: {folder}/best {rule}",
    ]
    kept = ["best", "step-00000001", "step-00000002.partial", "step-00000004", "step-00000005"]
    assert names(tmp_path) == kept
    for path in (folder / "best", *(folder / name / "notes.txt" for name in kept[1:3])):
        assert path.read_text() == "mine"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two mebibytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, text=True, check=False)
    if not mounted or mounted.returncode:
        reason = mounted.stderr.strip() if mounted else "there is no mount"
        pytest.skip(f"a small file system cannot be mounted here: {reason}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_costs_the_save_and_nothing_else(alone, small_disk, weight, asynchronous):
    keeper = Saver(small_disk, keep=1, asynchronous=asynchronous)
    keeper.save(1, weight, {}, {})
    keeper.wait()
    keeper.save(2, {"model.weight": torch.zeros(1 << 20)}, {}, {})  # four mebibytes
    keeper.wait()
    (problem,) = keeper.problems
    assert problem.startswith("step 2: not saved: rank 0: ")
    assert names(small_disk) == ["step-00000001"]
    assert torch.equal(loaded(small_disk), weight["model.weight"])
    keeper.save(3, weight, {}, {})
    keeper.close()
    assert keeper.saved == [1, 3]
    assert names(small_disk) == ["step-00000003"]


def fail_on_rank_1(run_directory: Path, what: str) -> tuple[list[str], list[int], list[float]]:
    """Three saves, of which the second fails on one rank."""
    keeper = Saver(run_directory, keep=3)
    rank = dist.get_rank()
    tensors = {"model.weight": torch.arange(20.0).reshape(4, 5), f"rng.cpu.{rank}": torch.full((9,), rank)}
    stamp, torch_save, staging = checkpoint_dir.stamp, torch.save, keeper._staging

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("on purpose")

    asked = []
    for step in (1, 2, 3):
        if rank == 1 and step == 2:
            checkpoint_dir.stamp = fail if what == "hash" else stamp
            torch.save = fail if what == "tensors" else torch_save
            keeper._staging = fail if what == "copy" else staging
        keeper.save(step, tensors, {}, lambda: asked.append(1.0) or {})
        keeper.wait()
        checkpoint_dir.stamp, torch.save, keeper._staging = stamp, torch_save, staging
    keeper.close()
    return keeper.problems, keeper.saved, asked


@pytest.mark.ranks
@cases("what", ["copy", "tensors", "hash"], daily=["tensors"])
def test_where_one_rank_fails_all_note_it_and_go_on(tmp_path, what):
    (problems, saved, asked), of_second = on_ranks(2, fail_on_rank_1, tmp_path, what)
    assert problems == ["step 2: not saved: rank 1: OSError: on purpose"]
    assert saved == [1, 3]
    assert of_second == (problems, saved, [])  # facts are rank 0's
    assert len(asked) == 3
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    found = checkpoint_dir.newest(tmp_path).found
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} == set(found.manifest.files)
    assert found.manifest.world_size == 2
    assert torch.equal(loaded(tmp_path), torch.arange(20.0).reshape(4, 5))


def test_the_writing_thread_stands_back_and_the_others_do_not(alone, tmp_path, weight, monkeypatch):
    priorities, freed = [], []
    monkeypatch.setattr(
        checkpoint_dir,
        "write_manifest",
        lambda *_: priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
    )
    monkeypatch.setattr(settings, "unbind_thread", lambda: freed.append(threading.current_thread().name))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    keeper = Saver(tmp_path, keep=1)
    keeper.save(1, weight, {}, {})
    keeper.close()
    assert priorities == [min(before + saver._NICE, 19)]
    assert freed == ["checkpoint"]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
