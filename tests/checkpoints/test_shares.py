"""Ranks that hold the same tensors save a share of them each."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ptdbench.checkpoints import safe_load
from ptdbench.checkpoints.saver import Saver, Shares, assign_shares
from ptdbench.local_part import local_part
from tests.checkpoints.test_state import Run
from tests.daily import cases
from tests.parallel.ranks import on_ranks


class TestAssign:
    def test_replicas_share_bytes_evenly(self):
        parts = {(f"weight {number}", (0, 0)): bytes for number, bytes in enumerate([5, 1, 8, 2, 3, 7])}
        shares = assign_shares([parts, parts])
        assert shares[0] | shares[1] == set(parts)
        assert not shares[0] & shares[1]
        assert [sum(parts[part] for part in share) for share in shares] == [13, 13]

    def test_shards_count_in_the_share_of_their_rank_and_tensor(self):
        both = {("one", (0,)): 4, ("other", (0,)): 4}
        shares = assign_shares([both | {("first", (0,)): 8}, both])
        assert shares == [{("first", (0,))}, {("one", (0,)), ("other", (0,))}]
        first, second = ("weight", (0, 0)), ("weight", (2, 0))
        assert assign_shares([{first: 8}, {second: 8}, {first: 8}, {second: 8}]) == [{first}, {second}, set(), set()]


def staged(folder: Path, strategy: str) -> int:
    run = Run(strategy)
    keeper = Saver(folder, keep=1)
    for step in range(2):  # at the first one, the optimizer has no state
        keeper.save(step, run.tensors(), {}, {})
        keeper.wait()
        if step == 0:
            run.go(0)
    copied = sum(local_part(copy).nbytes for copy in keeper._staging._copies.values())
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
    stored = safe_load.names(tmp_path / "checkpoints" / "step-00000001").values()
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
