"""Ranks that hold the same tensors save a share of them each."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ptdbench.checkpoints.saver import Saver, Shares
from ptdbench.checkpoints.state import stored_tensors
from ptdbench.local_part import local_part
from tests.checkpoints.test_state import Run
from tests.daily import cases
from tests.parallel.ranks import on_ranks


def staged(folder: Path, strategy: str) -> int:
    run = Run(strategy)
    keeper = Saver(folder, keep=1)
    for step in range(2):  # at the first one, the optimizer has no state
        keeper.save(step, run.tensors(), {}, {})
        keeper.wait()
        if step == 0:
            run.go(0)
    copies = keeper._staging(keeper._shares.select(run.tensors()))()
    copied = sum(local_part(copy).nbytes for copy in copies.values())
    keeper.close()
    assert keeper.problems == []
    return copied


@pytest.mark.ranks
@cases(
    ("ranks", "strategy"),
    [(2, "ddp"), (4, "ddp"), (4, "hsdp"), (4, "pdp"), (4, "stages in shards")],
    daily=[(2, "ddp"), (4, "stages in shards")],
)
def test_ranks_copy_each_byte_once(tmp_path, ranks, strategy):
    copied = on_ranks(ranks, staged, tmp_path, strategy)
    stored = stored_tensors(tmp_path / "checkpoints" / "step-00000001").values()
    saved = [size.numel() * dtype.itemsize for size, dtype in stored]
    assert sum(copied) == sum(saved)
    if strategy == "ddp":
        assert max(copied) <= sum(saved) / ranks + max(saved)


def selected(changed_on: int) -> list[list[str]]:
    """The names that this rank selects, of tensors that change on one rank."""
    shares = Shares(dist.group.WORLD)
    tensors = {"one": torch.zeros(4), "other": torch.zeros(4)}
    first, again = sorted(shares.select(tensors)), sorted(shares.select(tensors))
    if dist.get_rank() == changed_on:
        del tensors["one"]
    return [first, again, sorted(shares.select(tensors))]


@pytest.mark.ranks
def test_changed_tensors_of_one_rank_renew_all_shares():
    assert on_ranks(2, selected, 0) == [[["one"], ["one"], ["other"]], [["other"], ["other"], ["one"]]]
