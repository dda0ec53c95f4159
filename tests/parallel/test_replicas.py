"""Replicas under DDP, checksums of what ranks hold, and the message where copies differ."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ptdbench.models.foreign import Adapted
from ptdbench.parallel import replicas
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.replicas import bucket_size
from ptdbench.parallel.strategy import Strategy
from tests.models.assembled import assembled
from tests.parallel.few_steps import by_engine
from tests.parallel.made import gpt, laid_out, refused, unscaled
from tests.parallel.ranks import each, mesh_of, on_ranks, pretended
from tests.refusals import Abridged


def checksum(tensor: Tensor) -> int:
    ((_, value),) = replicas.checksums([("", tensor)])
    return value


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "int8", "bool", "complex64", "complex128", "uint32"]
)
def test_checksums_see_every_bit(dtype, monkeypatch):
    monkeypatch.setattr(replicas, "_AT_ONCE", 4)  # ten elements are three pieces
    tensor = torch.ones(10, dtype=getattr(torch, dtype))
    seen = {checksum(tensor)}
    for place in range(10):
        changed = tensor.clone()
        changed[place:].view(torch.uint8)[0] ^= 1
        seen.add(checksum(changed))
    assert len(seen) == 11


@pytest.mark.parametrize("change", [
    lambda x: x[[1, 0, *range(2, 10)]],
    lambda x: x[[*range(4, 8), *range(4), 8, 9]],  # pieces
    lambda x: x.view(torch.int32) + torch.tensor([1, -2, 1] + [0] * 7, dtype=torch.int32),
    lambda x: -x,
])  # fmt: skip
def test_checksums_see_cancelling_changes(change, monkeypatch):
    monkeypatch.setattr(replicas, "_AT_ONCE", 4)
    tensor = torch.arange(10.0)
    assert checksum(change(tensor)) != checksum(tensor)


def test_checksums_ignore_memory_order():
    tensor = torch.tensor([[torch.nan, -0.0], [torch.inf, 1.0]])
    assert checksum(tensor) == checksum(tensor.t().contiguous().t())
    assert checksum(torch.ones(1).expand(3)) == checksum(torch.ones(3))
    assert replicas.checksums([]) == []


def spread(odd: int | None, how: str) -> str:
    """What four ranks say of a weight, one of which has another value; as copies, two shards or four."""
    mesh = mesh_of(Dims(replicate=2, shard=2)).fsdp
    value = torch.full((4,), float(dist.get_rank() if odd is None else dist.get_rank() == odd))
    placements = {
        "copied": [Replicate(), Shard(0)], "divided": [Shard(0), Shard(0)], "whole": [Replicate(), Replicate()],
    }  # fmt: skip
    last = value if how in ("plain", "apart") else DTensor.from_local(value, mesh, placements[how], run_check=False)
    weights = [("first", torch.ones(3)), ("last", last)]
    try:
        weights.append((f"of {dist.get_rank()}", value))  # which others lack, as a stage's
        replicas.require_equal(weights, apart=how == "apart" and dist.get_rank() % 2)
    except RuntimeError as error:
        return str(error).partition(";")[0]
    return "equal"


@pytest.mark.ranks
def test_copies_are_compared_and_shards_are_not():
    differ = "replicas differ: last has other bits on {} than on rank {}".format
    cases = {
        (3, "plain"): differ("rank 3", 0), (None, "plain"): differ("ranks 1, 2, 3", 0),
        (0, "whole"): differ("rank 0", 1),
        (3, "apart"): differ("rank 3", 1), (3, "copied"): differ("rank 3", 1), (None, "copied"): differ("rank 2", 0),
        (3, "divided"): "equal", (None, "divided"): "equal",
    }  # fmt: skip
    assert on_ranks(4, each, spread, cases) == [cases] * 4


@pytest.mark.parametrize(("millions", "mebibytes"), [(1, 25), (124, 25), (355, 67.7), (1300, 100)])
def test_bucket_size_is_bounded(millions, mebibytes):
    assert bucket_size(4_000_000 * millions) == pytest.approx(mebibytes, abs=0.1)


def test_weight_without_gradient_is_named():
    def trained(micro_batch: int) -> None:
        model = gpt(layers=2, vocabulary=20)
        model.unused = nn.LayerNorm(2, bias=False, device="meta")
        by_engine(*laid_out(Strategy(replicate="auto"), model, 4, micro_batch))

    with pretended(1):
        trained(4)  # by a static graph
        refusal = "parallel.static_graph=auto: … unused.weight; freeze …, or try find_unused, …"
        assert refused(trained, 2) == Abridged(refusal)


def uses_one_at_times(self: Any, inputs: Tensor) -> Tensor:
    """Uses a weight for samples that begin with a positive number."""
    outputs, chosen = self.always(inputs), inputs[:, 0] > 0
    return outputs + chosen[:, None] * self.sometimes(inputs) if chosen.any() else outputs


#: Of four samples, which use the weight, step by step; each of two ranks has two of them.
CHOSEN = ["0000", "0010", "1111", "0000", "0100", "0000", "1001"]


def four_samples(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).split([3, 2], dim=1)
    inputs[:, 0] = inputs[:, 0].abs() * torch.tensor([1.0 if digit == "1" else -1.0 for digit in CHOSEN[step]])
    return inputs, targets


def branched() -> Adapted:
    torch.manual_seed(0)
    module = assembled(uses_one_at_times, always=nn.Linear(3, 2), sometimes=nn.Linear(3, 2))
    return Adapted(module, lambda: (torch.empty(1, 3, device="meta"), torch.empty(1, 2, device="meta")))


def adamw(named: Any) -> torch.optim.Optimizer:
    """Moves a weight with a gradient of zero, but none without a gradient."""
    return torch.optim.AdamW((weight for _, weight in named), lr=0.1, weight_decay=0.1)


def weights_of(micro_batch: int, *options: tuple[str, Any]) -> dict[str, Tensor]:
    strategy = Strategy(replicate="auto", static_graph="find_unused", **dict(options))
    engine, layout, replica = laid_out(strategy, branched(), 4, micro_batch)
    optimizer = engine.optimizer(adamw)
    for step in range(len(CHOSEN)):
        size = layout.replica_batch
        engine.gradients(*(tensor[replica * size :][:size] for tensor in four_samples(step)), unscaled)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in engine.module.named_parameters()}


@pytest.mark.ranks
def test_find_unused_trains_as_one_rank():
    model = branched()
    optimizer = adamw(model.named_parameters())
    for step in range(len(CHOSEN)):
        model(*four_samples(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters())
    cases = [(2,), (1,), (2, ("optimizer", "zero1"))]
    for of_rank in on_ranks(2, each, weights_of, cases):
        for weights in of_rank.values():
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [(0, 2), (2, 0, 0)], ids=["used later", "used first"])
def test_changing_graph_is_refused(steps):
    def trained() -> None:
        engine, *_ = laid_out(Strategy(replicate="auto"), branched(), 4)
        for step in steps:
            engine.gradients(*four_samples(step), unscaled)
            engine.module.zero_grad()

    with pretended(1):
        refusal = "parallel.static_graph=auto: some weights get gradients only …; try find_unused, …=fsdp …"
        assert refused(trained) == Abridged(refusal)
