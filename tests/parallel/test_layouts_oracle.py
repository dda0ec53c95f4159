"""Faults of layouts without experts, injected one by one: each is detected by losses or norms.

``docs/injected-faults.md`` lists them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import PrepareModuleOutput, RowwiseParallel
from torch.nn.utils import get_total_norm

from ptdbench.kernels import Kernels
from ptdbench.models.gpt import GPT
from ptdbench.parallel import apply, context, engine, fsdp, replicas, tensor
from ptdbench.parallel import pipeline_engine as pipelined
from ptdbench.parallel.dims import BatchPlan
from ptdbench.parallel.engine import Accumulating, LaidOutModule
from ptdbench.parallel.strategy import Strategy
from tests.parallel.few_steps import by_engine, by_hand
from tests.parallel.made import gpt, laid_out
from tests.parallel.oracle import Faults, after, is_on, of
from tests.parallel.ranks import each, mesh_of, on_ranks

SAMPLES = 8

#: By name: the options of a layout on four ranks, and the samples of a micro-batch.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "replicas": ({"replicate": 4}, 1),
    "shards": ({"shard": 4}, 2),
    "shards in replicas": ({"replicate": 2, "shard": 2}, 4),
    "zero1": ({"replicate": 4, "optimizer": "zero1"}, 2),
    "tensor": ({"tensor": 2, "replicate": 2}, 4),
    "sequence": ({"tensor": 2, "shard": 2, "sequence": True}, 4),
    "context": ({"context": 2, "replicate": 2}, 4),
    "ring": ({"context": 2, "replicate": 2, "context_method": "ring"}, 4),
    "pipeline": ({"pipeline": 2, "replicate": 2, "microbatches": 2}, 2),
}


def model() -> GPT:
    """On the meta device; its two stages have a weight in common."""
    return gpt(layers=2, vocabulary=20)


def by_layout(layout: str, fault: str, kernels: Kernels = "fused") -> list[list[float]]:
    """In each of four ranks: losses and norms of a program with a fault, or of the right one."""
    options, micro_batch = LAYOUTS[layout]
    with FAULTS[fault][0]() if fault else nullcontext():
        return by_engine(*laid_out(Strategy(**options), model(), SAMPLES, micro_batch, kernels=kernels))


def added_up(part: LaidOutModule) -> LaidOutModule:
    def add(_, bucket):  # torch wants annotations that are no strings, or none
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    part.runner.register_comm_hook(None, add)
    return part


def last_alone(part: LaidOutModule) -> LaidOutModule:
    @contextmanager
    def deferred() -> Iterator[None]:
        with part.deferred():
            yield
        part.module.zero_grad()

    return replace(part, deferred=deferred)


def of_each(how: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def done(module: Any) -> Any:
        how(module)
        return module

    return done


def undivided(module: Any) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # the other way is NCCL's


class Kept(torch.autograd.Function):
    """Hands over a stream whose gradient each rank keeps a summand of."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, mesh: Any) -> Tensor:
        return DTensor.from_local(output, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.to_local(), None


def taken_for_sums(self: Any, module: nn.Module, device_mesh: Any) -> nn.Module:
    for part in module.modules():
        tensor.spread(part, device_mesh, Replicate(), Replicate())
    return PrepareModuleOutput._apply(self, module, device_mesh)


_broadcast, _materialize, _gradients = dist._broadcast_coalesced, apply.materialize, Accumulating.gradients
_rows, _over_ranks, _share = tensor._Vocabulary._look_up_own, tensor._over_ranks, pipelined.Pipelined._share_of_loss


def counted_twice(self: Any) -> Tensor:
    square = engine.norm_of(self.module.parameters()).square()
    dist.all_reduce(square, group=self._group)
    return square.sqrt()


#: By what is broken: the fault, and the layout in which it matters.
FAULTS: Faults = {
    "gradients not averaged over replicas": (
        after(apply, "replicate", lambda part: replace(part, runner=part.module, deferred=nullcontext)), "replicas"),
    "gradients summed, not averaged, over replicas": (after(apply, "replicate", added_up), "replicas"),
    "gradients of all but the last micro-batch dropped": (after(apply, "replicate", last_alone), "replicas"),
    "gradients summed, not averaged, over micro-batches": (
        of(Accumulating, "gradients", lambda *values: _gradients(*values[:-1], lambda loss: 2 * values[-1](loss))),
        "replicas"),
    "gradients of the previous step not cleared": (of(torch.optim.SGD, "zero_grad", lambda _: None), "replicas"),
    "every replica trains on the same samples": (
        of(BatchPlan, "rows", lambda self, step, _: (step * SAMPLES, step * SAMPLES + self.replica_batch)), "replicas"),
    "FSDP gradients summed, not averaged": (after(fsdp, "fully_shard", of_each(undivided)), "shards"),
    "gathered weights not refreshed after an update": (
        after(fsdp, "fully_shard", of_each(lambda it: it.set_reshard_after_backward(False))), "shards"),
    "gradient norm of the local shards only": (
        of(engine, "norm_of", lambda weights: get_total_norm([it.grad.to_local() for it in weights])), "shards"),
    "weights drawn from a seed per rank": (
        of(apply, "materialize", lambda *values, **named: _materialize(*values, **named | {"seed": dist.get_rank()})),
        "shards"),
    "HSDP gradients not all-reduced between replicas": (
        after(fsdp, "fully_shard", of_each(lambda it: it.set_requires_all_reduce(False))), "shards in replicas"),
    "ZeRO-1 weights not broadcast after an update": (of(replicas.Zero1, "_share", lambda *_: None), "zero1"),
    "ZeRO-1 weights broadcast by the wrong rank": (
        of(dist, "_broadcast_coalesced", lambda group, weights, size, owner=0: _broadcast(
            group, weights, size, (owner + 1) % dist.get_world_size(group))), "zero1"),
    "row-wise outputs not all-reduced": (
        of(RowwiseParallel, "_prepare_output_fn", staticmethod(  # torch counts the parameters
            lambda _layouts, _local, _module, outputs, _mesh: outputs.to_local())), "tensor"),
    "residual-stream gradients not all-reduced over tensor ranks": (
        of(tensor._Sequence, "_prepare_out_fn", lambda _, output, mesh: Kept.apply(output, mesh)), "tensor"),
    "embedding rows of another tensor rank": (
        of(tensor._Vocabulary, "_look_up_own", staticmethod(lambda table, mesh, look_up: lambda tokens: _rows(
            table, mesh, look_up)((tokens + len(table.weight)) % (len(table.weight) * mesh.size())))), "tensor"),
    "cross-entropy sums not all-reduced over vocabulary shards": (
        of(tensor, "_over_ranks", lambda share, mesh, reduction: (
            share if reduction == "sum" else _over_ranks(share, mesh, reduction))), "tensor"),
    "norm gradients not all-reduced over tensor ranks": (of(tensor._Sequence, "_apply", taken_for_sums), "sequence"),
    "positions from 0 on every context rank": (of(context, "_number", lambda _p, _m, arguments: arguments), "context"),
    "all-to-all results in the wrong rank order": (
        after(context, "all_to_all_single_autograd", lambda sent: torch.cat(sent.tensor_split(2)[::-1])), "context"),
    "gradients not averaged over context ranks": (
        lambda: of(mesh := mesh_of(Strategy(**LAYOUTS["context"][0]).dims(4)), "dp_cp", mesh.dp)(), "context"),
    "ring positions numbered as one contiguous piece": (
        of(context, "positions_of", lambda mesh, _: context.Positions(mesh.size(), mesh.get_local_rank(), False)),
        "ring"),
    "gradients of a weight on two stages not summed": (of(pipelined, "add_up_shared", lambda *_: None), "pipeline"),
    "gradient norm counts a shared weight twice": (of(pipelined.Pipelined, "gradient_norm", counted_twice), "pipeline"),
    "gradient norm of the local stage only": (
        of(pipelined.Pipelined, "gradient_norm", lambda self: engine.norm_of(self.module.parameters())), "pipeline"),
    "gradients summed, not averaged, over a pipeline's micro-batches": (
        of(pipelined.Pipelined, "_share_of_loss", lambda it, *values: _share(it, *values) * it._layout.microbatches),
        "pipeline"),
}  # fmt: skip


#: The faults that only our kernels can have.
OF_FUSED = {"cross-entropy sums not all-reduced over vocabulary shards"}


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_every_fault_is_detected(kernels):
    right = [(layout, "", kernels) for layout in LAYOUTS]
    apt = FAULTS.keys() - (OF_FUSED if kernels == "torch" else set())
    injected = [(layout, name, kernels) for name, (_, layout) in FAULTS.items() if name in apt]
    (of_first, *_) = on_ranks(4, each, by_layout, right + injected)
    expected = [pytest.approx(step, rel=1e-5) for step in by_hand(model(), SAMPLES)]
    assert {name for _, name, _ in (case for case, numbers in of_first.items() if numbers == expected)} == {""}
    assert [case for case in right if of_first[case] != expected] == []


def test_the_page_lists_them():
    assert is_on("injected-faults.md", FAULTS)
