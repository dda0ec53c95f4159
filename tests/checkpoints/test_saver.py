"""Saving beside the training: copies, what a failed save leaves, and how many stay."""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ptdbench.checkpoints import checkpoint_dir, saver
from ptdbench.checkpoints.saver import Saver
from ptdbench.checkpoints.state import load_tensors
from ptdbench.launch import settings
from tests.parallel.ranks import on_ranks


def names(run_directory: Path) -> list[str]:
    folder = run_directory / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def loaded(run_directory: Path) -> Tensor:
    tensors = {"model.weight": torch.full((4, 5), -1.0)}
    load_tensors(checkpoint_dir.newest(run_directory).checkpoint.path, tensors)
    return tensors["model.weight"]


@pytest.fixture(params=[True, False], ids=["asynchronous", "blocking"])
def keeper(request: pytest.FixtureRequest, tmp_path: Path, alone: None) -> Iterator[Saver]:
    made = Saver(tmp_path, keep=2, asynchronous=request.param)
    yield made
    made.close()


@pytest.fixture
def weight() -> dict[str, Tensor]:
    return {"model.weight": torch.arange(20.0).reshape(4, 5)}


def save(keeper: Saver, weight: dict[str, Tensor], *steps: int) -> None:
    for step in steps:
        keeper.save(step, weight, {}, {})
    keeper.wait()


def test_saved_checkpoint_is_complete(keeper, weight, tmp_path):
    keeper.save(3, weight, {"width": 5}, {"losses": [0.1, 0.2]})
    keeper.wait()
    search = checkpoint_dir.newest(tmp_path)
    assert (keeper.saved, keeper.problems, search.warnings) == ([3], [], [])
    manifest = search.checkpoint.manifest
    assert (manifest.step, manifest.world_size, manifest.model) == (3, 1, {"width": 5})
    assert (manifest.facts, manifest.torch) == ({"losses": [0.1, 0.2]}, torch.__version__)
    assert set(manifest.files) == {path.name for path in search.checkpoint.path.iterdir()} - {"manifest.json"}
    assert torch.equal(loaded(tmp_path), weight["model.weight"])


def test_newest_are_kept_and_a_step_can_be_saved_again(keeper, weight, tmp_path):
    save(keeper, weight, 1, 2, 3, 4)
    save(keeper, {"model.weight": weight["model.weight"] * 2}, 4)
    assert keeper.saved == [1, 2, 3, 4, 4]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert torch.equal(loaded(tmp_path), weight["model.weight"] * 2)


def test_broken_checkpoint_does_not_count_until_rewritten(keeper, weight, tmp_path):
    """Its files have their sizes: only a search, which reads them, knows."""
    save(keeper, weight, 30, 40)
    tensors = tmp_path / "checkpoints" / "step-00000040" / "__0_0.distcp"
    tensors.write_bytes(bytes(tensors.stat().st_size))
    search = checkpoint_dir.newest(tmp_path)
    assert search.checkpoint.manifest.step == 30
    keeper.broken |= search.broken.keys()
    kept = []
    for step in (33, 36, 40, 41):
        save(keeper, weight, step)
        kept.append([int(name.removeprefix("step-")) for name in names(tmp_path)])
    assert kept == [[30, 33, 40], [33, 36, 40], [36, 40], [40, 41]]


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_infinite_weights_are_not_saved_and_infinite_buffers_are(keeper, weight, tmp_path, lost):
    masked = {**weight, "model.mask": torch.full((3,), -torch.inf)}
    keeper.save(1, masked, {}, {}, steady=weight)
    for step in (2, 3, 4):
        weight["model.weight"][0, 1] = lost
        keeper.save(step, masked, {}, {}, steady=weight)
    keeper.wait()
    assert names(tmp_path) == ["step-00000001"]
    rule = "not saved: rank 0: FloatingPointError: model.weight is not finite"
    assert keeper.problems == [f"step {step}: {rule}" for step in (2, 3, 4)]


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


def test_saved_weights_are_those_before_later_steps(alone, tmp_path, weight, monkeypatch):
    """Also where the copies' memory is used again."""
    keeper = Saver(tmp_path, keep=1)
    gate = Gate(monkeypatch)
    for step in (1, 2, 3):
        expected = weight["model.weight"].clone()
        keeper.save(step, weight, {}, {})
        assert gate.reached.wait(60)
        weight["model.weight"].add_(1)  # before a byte is written
        assert names(tmp_path)[-1] == f"step-0000000{step}.partial"
        gate.open.set()
        keeper.wait()
        assert torch.equal(loaded(tmp_path), expected)
        gate.open.clear()
        gate.reached.clear()
    keeper.close()
    assert keeper.problems == []


def test_save_waits_for_the_previous_one(alone, tmp_path, weight, monkeypatch):
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
    load_tensors(tmp_path / "checkpoints" / "step-00000001", older)
    assert torch.equal(older["model.weight"], weight["model.weight"])


@contextmanager
def full_disk() -> Iterator[None]:
    """A limit for the size of files fails as a full disk does."""
    _, hard = was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)


def no_manifest() -> Any:
    return mock.patch.object(checkpoint_dir, "write_manifest", side_effect=ValueError("on purpose"))


@pytest.mark.parametrize(
    ("failing", "why"), [(full_disk, "OSError: [Errno 27] File too large"), (no_manifest, "ValueError: on purpose")]
)
def test_failed_save_is_noted_and_later_ones_work(keeper, weight, tmp_path, failing, why):
    save(keeper, weight, 1)
    before = loaded(tmp_path)
    with failing():
        save(keeper, {"model.weight": torch.zeros(4, 5)}, 2)
    (problem,) = keeper.problems
    assert problem == f"step 2: not saved: rank 0: {why}"
    assert names(tmp_path) == ["step-00000001"]
    assert torch.equal(loaded(tmp_path), before)
    save(keeper, weight, 3)
    assert keeper.saved == [1, 3]


def test_failed_deletion_is_noted(keeper, weight, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_dir, "_set_aside", mock.Mock(side_effect=PermissionError("on purpose")))
    save(keeper, weight, 1, 2, 3)
    assert keeper.saved == [1, 2, 3]
    note = "step 3: saved, but cannot delete older checkpoints: rank 0: PermissionError: on purpose"
    assert keeper.problems == [note]


#: What fails on rank 1 in the saves after some steps.
FAILS_THERE = {2: "copy", 3: "tensors", 4: "hash"}


def fail_on_rank_1(run_directory: Path) -> tuple[list[str], list[int]]:
    """Five saves, of which three fail on one rank: the problems, and what is saved."""
    keeper = Saver(run_directory, keep=3)
    rank = dist.get_rank()
    tensors = {"model.weight": torch.arange(20.0).reshape(4, 5), f"rng.cpu.{rank}": torch.full((9,), rank)}
    failing = {"copy": (keeper, "_staging"), "tensors": (torch, "save"), "hash": (checkpoint_dir, "stamp")}
    for step in range(1, 6):
        fails = FAILS_THERE.get(step) if rank == 1 else None
        failure = mock.Mock(side_effect=OSError("on purpose"))
        with mock.patch.object(*failing[fails], failure) if fails else nullcontext():
            keeper.save(step, tensors, {}, {"of": rank})
            keeper.wait()
    keeper.close()
    return keeper.problems, keeper.saved


@pytest.mark.ranks
def test_failure_of_one_rank_is_noted_by_all(alone, tmp_path):
    problems = [f"step {step}: not saved: rank 1: OSError: on purpose" for step in FAILS_THERE]
    assert on_ranks(2, fail_on_rank_1, tmp_path) == [(problems, [1, 5])] * 2
    assert names(tmp_path) == ["step-00000001", "step-00000005"]
    newest = checkpoint_dir.newest(tmp_path).checkpoint
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} == set(newest.manifest.files)
    assert (newest.manifest.world_size, newest.manifest.facts) == (2, {"of": 0})
    assert torch.equal(loaded(tmp_path), torch.arange(20.0).reshape(4, 5))


def test_only_the_writing_thread_has_lower_priority(alone, tmp_path, weight, monkeypatch):
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
