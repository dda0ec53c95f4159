"""Ranks that hold the same tensors save a share of them each."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ptdbench.checkpoints import safe_load
from ptdbench.checkpoints.saver import Saver, Shares, assign_shares
from tests.checkpoints.test_state import Run
from tests.daily import cases
from tests.parallel.ranks import on_ranks


class TestAssign:
    def test_replicas_share_the_bytes(self):
        parts = {(f"weight {number}", (0, 0)): bytes for number, bytes in enumerate([5, 1, 8, 2, 3, 7])}
        shares = assign_shares([parts, parts])
        assert shares[0] | shares[1] == set(parts)
        assert not shares[0] & shares[1]
        assert [sum(parts[part] for part in share) for share in shares] == [13, 13]

    def test_what_one_rank_alone_holds_is_its_own_and_counts(self):
        both = {("one", (0,)): 4, ("other", (0,)): 4}
        shares = assign_shares([both | {("first", (0,)): 8}, both])
        assert shares == [{("first", (0,))}, {("one", (0,)), ("other", (0,))}]

    def test_parts_of_one_tensor_are_apart(self):
        first, second = ("weight", (0, 0)), ("weight", (2, 0))
        assert assign_shares([{first: 8}, {second: 8}, {first: 8}, {second: 8}]) == [{first}, {second}, set(), set()]


def staged(folder: Path, strategy: str) -> dict[str, Any]:
    """The bytes that this rank copies in its second save and those that it holds."""
    run = Run(strategy, "gpt", "adamw")
    keeper = Saver(folder, keep=1)
    for step in range(2):  # at the first one, the optimizer has no state
        keeper.save(step, run.tensors(), {}, {})
        keeper.wait()
        if step == 0:
            run.go(0)
    copies = keeper._staging._copies.values()
    found = {"problems": list(keeper.problems), "copied": size(copies), "held": size(run.tensors().values())}
    keeper.close()
    return found


def size(tensors: Any) -> int:
    return sum(tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes for tensor in tensors)


@pytest.mark.ranks
@cases(
    ("ranks", "strategy"),
    [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "hsdp"), (2, "pdp"), (4, "pdp"), (4, "stages in shards")],
    daily=[(2, "ddp"), (4, "stages in shards")],
)
def test_what_all_ranks_copy_is_what_is_saved(tmp_path, ranks, strategy):
    found = on_ranks(ranks, staged, tmp_path, strategy)
    items = safe_load._read_metadata(tmp_path / "checkpoints" / "step-00000001").state_dict_metadata
    saved = {name: item for name, item in items.items() if isinstance(item, TensorStorageMetadata)}
    total = sum(item.size.numel() * item.properties.dtype.itemsize for item in saved.values())
    assert all(of_rank["problems"] == [] for of_rank in found)
    assert sum(of_rank["copied"] for of_rank in found) == total
    largest = max(item.size.numel() * item.properties.dtype.itemsize for item in saved.values())
    if strategy == "ddp":
        assert all(of_rank["held"] >= total - ranks * 6000 for of_rank in found)
        assert max(of_rank["copied"] for of_rank in found) <= total / ranks + largest


def selected(changed_on: int) -> list[list[str]]:
    """The names that this rank selects, of tensors that change on one rank."""
    shares = Shares(dist.group.WORLD)
    tensors = {"one": torch.zeros(4), "other": torch.zeros(4)}
    first, again = sorted(shares.select(tensors)), sorted(shares.select(tensors))
    if dist.get_rank() == changed_on:
        del tensors["one"]
    return [first, again, sorted(shares.select(tensors))]


@pytest.mark.ranks
def test_shares_are_made_anew_where_tensors_change_on_one_rank():
    assert on_ranks(2, selected, 0) == [[["one"], ["one"], ["other"]], [["other"], ["other"], ["one"]]]
