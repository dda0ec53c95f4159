"""Training state as it is foreseen, against what ranks have really allocated after a step."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ptdbench.data.synthetic import SyntheticTokens
from ptdbench.models.gpt import GPT
from ptdbench.models.resnet import ResNet
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.footprint import Footprint, footprints
from ptdbench.parallel.precision import Copies
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError
from tests.optim.made_muon import muon_of
from tests.parallel.made import gpt, laid_out, on_meta, unscaled
from tests.parallel.ranks import each, on_ranks
from tests.parallel.splitting import where_split
from tests.parallel.test_conflicts import layout_of
from tests.parallel.test_strategy import SEVERAL
from tests.parallel.test_strategy import STRATEGIES as TRIED

STRATEGIES = {
    **{name: (TRIED | SEVERAL)[name] for name in (
        "ddp", "fsdp", "hsdp", "1f1b", "stages in shards", "tensor and copies", "tensor and shards, sequence",
        "tensor and stages", "context and copies", "context and shards", "looped_bfs, copies",
    )},
    "zero1": Strategy(replicate="auto", optimizer="zero1"),
    "zero1 of stages": Strategy(replicate="auto", pipeline=2, microbatches=2, optimizer="zero1"),
    "zero1 of two stages a rank": Strategy(
        replicate="auto", pipeline=2, schedule="looped_bfs", microbatches=2, optimizer="zero1"
    ),
    **where_split({
        "both ends on a rank": lambda: Strategy(
            replicate="auto", pipeline=2, schedule="dualpipev", microbatches=4
        ),
    }),
}  # fmt: skip
ADAMW = partial(torch.optim.AdamW, fused=True)
SGD = torch.optim.SGD
#: Where the state is Muon's.
OF_MUON = ("zero1", "fsdp", "1f1b", "tensor and shards, sequence")
CASES = {name: (name, False) for name in STRATEGIES} | {f"{name}, muon": (name, True) for name in OF_MUON}


def uneven() -> GPT:
    """No number is a multiple of four shards, nor its half of two."""
    return gpt(heads=2, width=14, sequence_length=6, vocabulary=42)


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return on_ranks(4, each, allocated, CASES)


def allocated(name: str) -> tuple[Footprint, Footprint]:
    """In a rank: the foreseen and the real footprint."""
    of_strategy, with_muon = CASES[name]
    strategy, make = STRATEGIES[of_strategy], muon_of(uneven()) if with_muon else ADAMW
    engine, layout, _ = laid_out(strategy, uneven(), 16)
    foreseen = strategy.footprints(uneven(), layout, make, average=False)[layout.dims.stage(dist.get_rank())]
    optimizer = engine.optimizer(make)
    tokens = SyntheticTokens(sequence_length=6, vocabulary=42, seed=0)
    engine.gradients(*tokens.samples(0, layout.replica_batch), unscaled)
    weights = list(engine.module.parameters())
    gradients = storage([weight.grad for weight in weights])
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    return foreseen, Footprint(storage([*weights, *engine.module.buffers()]), gradients, storage(state))


def storage(tensors: list[Any]) -> int:
    """Bytes of the memory that these tensors are in, each counted once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_what_is_foreseen_is_what_ranks_allocate(of_ranks, name):
    dims = STRATEGIES[CASES[name][0]].dims(4)
    shards = dims.shard * (dims.context if dims.shard > 1 else 1)
    for rank, of_rank in enumerate(of_ranks):
        foreseen, real = of_rank[name]
        assert (real.weights, real.gradients) == (foreseen.weights, foreseen.gradients)
        if "zero1" in name:  # of the replica with the most
            stages = [one[name] for number, one in enumerate(of_ranks) if dims.stage(number) == dims.stage(rank)]
            assert max(real.optimizer for _, real in stages) == foreseen.optimizer
            assert sum(real.optimizer for _, real in stages) < 1.5 * foreseen.optimizer * len(stages)
        elif rank // dims.tensor % shards == 0:
            assert real.optimizer == foreseen.optimizer
        else:  # the last shards of a weight are padded, and their state is not
            assert 0 < real.optimizer <= foreseen.optimizer


class TestOneProcess:
    def test_buffers_count_and_frozen_weights_are_only_weights(self):
        model = ResNet(depth=18, classes=10)
        model.requires_grad_(False)
        trained = next(model.parameters()).requires_grad_(True)
        (found,) = footprints(model, SGD, average=False)
        assert found.weights == sum(tensor.nbytes for tensor in model.state_dict().values())
        assert (found.gradients, found.optimizer) == (trained.nbytes, 0)

    def test_an_average_is_another_copy(self):
        (plain,), (more,) = (footprints(uneven(), ADAMW, average=average) for average in (False, True))
        assert more == Footprint(plain.weights, plain.gradients, plain.optimizer + plain.weights)

    def test_copies_in_a_narrow_dtype_are_weights_too_unless_shards_are_gathered_in_it(self):
        module = on_meta(ResNet, depth=18, classes=10)

        def foreseen(shards: int, precision: Any) -> int:
            strategy = Strategy(replicate=4 // shards, shard=shards)
            layout = layout_of(strategy, 4, 16)
            (found,) = strategy.footprints(module, layout, SGD, average=False, precision=precision)
            return found.weights

        copies = Copies(module, [], torch.bfloat16)
        copies.begin()
        in_bf16 = sum(copy.nbytes for copy in copies.tensors)
        assert in_bf16 == sum(2 * weight.numel() for weight in module.parameters() if weight.ndim > 1) + 2 * 10
        assert foreseen(1, "bf16") == foreseen(1, "fp32") + in_bf16
        assert foreseen(4, "bf16") == foreseen(4, "fp32")

    @pytest.mark.parametrize(("in_buckets", "copies"), [(True, 1), (False, 2)])
    def test_ddp_has_its_buckets_beside_the_gradients_if_those_are_no_views(self, in_buckets, copies):
        strategy = Strategy(replicate="auto", gradient_as_bucket_view=in_buckets)
        (found,) = strategy.footprints(uneven(), layout_of(strategy, 4, 16), ADAMW, average=False)
        assert found.gradients == copies * found.weights

    def test_powersgd_keeps_what_it_has_not_sent_and_zero1_divides_state_and_average(self):
        layout = layout_of(Strategy(replicate="auto"), 4, 16)
        plain, divided = (
            Strategy(replicate="auto", gradients="powersgd", optimizer=optimizer).footprints(
                uneven(), layout, ADAMW, average=True
            )[0]
            for optimizer in ("replicated", "zero1")
        )
        assert plain.gradients == divided.gradients == 2 * plain.weights
        assert plain.optimizer / 4 < divided.optimizer < plain.optimizer / 3

    def test_an_optimizer_that_cannot_take_a_step_on_fake_tensors_is_refused(self):
        class Reader(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                return self.param_groups[0]["params"][0].sum().item()

        with pytest.raises(
            ConfigError, match="optimizer=Reader: the memory of its state is unknown, as it takes no step"
        ):
            footprints(uneven(), Reader, average=False)

    def test_nothing_is_allocated_for_a_model_of_a_trillion(self):
        model = on_meta(nn.Linear, in_features=10**6, out_features=10**6, bias=False)
        (found,) = footprints(model, ADAMW, Strategy(shard=8), Dims(shard=8), average=False)
        assert found == Footprint(5 * 10**11, 5 * 10**11, 10**12 + 4)
