"""Expert parallelism: the ranks of a group share the experts of a layer, and send each other the tokens for them.

Groups consist of neighbors in shard, context and tensor, whose ranks are regrouped as in torchtitan. Each rank holds
some whole experts and receives all their tokens (Lepikhin et al. 2020, arXiv 2006.16668): none is dropped, as ranks
exchange the counts first. The other groups hold replicas of each expert, over which FSDP shards it.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ptdbench.launch import stacks
from ptdbench.local_part import local_part
from ptdbench.models.experts import Router, places_in, take
from ptdbench.models.protocol import Model, module_of, roles_of, wrap_forward
from ptdbench.parallel.dims import BatchPlan, Dims
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.tensor import spread
from ptdbench.profiling.events import COMBINE, DISPATCH

#: The dimension of stacked matrices along which FSDP shards a rank's experts.
SHARDED = 1

stacks.waits_in(__file__)  # for the token counts of other ranks


def units(model: Model) -> int:
    """Return the number of experts per layer, which the degree must divide; 0 if the model has none."""
    return math.gcd(*(role.units for role in roles_of(model).values() if role.kind == "experts"))


def modules(model: Model, inside: nn.Module | None = None) -> list[nn.Module]:
    """Return the modules of experts of a model, or of one of its modules."""
    members = set((inside or module_of(model)).modules())
    named = [name for name, role in roles_of(model).items() if role.kind == "experts"]
    return [module for module in map(module_of(model).get_submodule, named) if module in members]


def parts(model: Model, dims: Dims) -> dict[nn.Parameter, Tensor]:
    """Return a rank's part of each weight of experts that ranks share, on the meta device."""
    if dims.expert == 1:
        return {}
    shards = {}
    for weight in (weight for module in modules(model) for weight in module.parameters()):
        first, second, *rest = weight.shape
        shape = first // dims.expert, second // dims.regroup_copies("expert"), *rest
        shards[weight] = torch.empty(shape, dtype=weight.dtype, device="meta")
    return shards


def divide(layers: Sequence[nn.Module], mesh: DeviceMesh, *, virtual: bool = False) -> None:
    """Give each rank of ``mesh`` its experts, on the meta device, to compute on the tokens of all ranks.

    ``virtual``: other ranks may be absent, so all are assumed to send the same as this one.
    """
    for layer in layers:
        spread(layer, mesh, Shard(0), Shard(0))
        received: list[int] = []
        layer.received = received  # type: ignore[assignment]
        wrap_forward(layer, partial(_with_exchange, mesh, virtual, received))


Forward = Callable[[Tensor, Tensor], Tensor]


def _with_exchange(mesh: DeviceMesh, virtual: bool, noted: list[int], compute: Forward) -> Forward:
    group, ranks = mesh.get_group(), mesh.size()

    def dispatch(tokens: Tensor, counts: Tensor) -> Tensor:
        leaving = counts.unflatten(0, (ranks, -1))
        with _labeled(DISPATCH):  # counts per rank and local expert
            arriving = all_to_all_single(leaving.contiguous(), None, None, group)
        if virtual:  # nothing arrives from those that are absent
            arriving = leaving[mesh.get_local_rank()].expand_as(leaving)
        sent, received = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
        dispatched = _Sent.apply(tokens, received, sent, group, (DISPATCH, COMBINE))
        # Tokens arrive ordered by rank, then expert; reorder them by expert.
        expert = torch.arange(arriving.shape[1], device=arriving.device).repeat(ranks)
        order = expert.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
        places = places_in(order, len(order))
        computed = compute(take(dispatched, order, places), arriving.sum(0))
        if computed.requires_grad:  # count in the backward pass, as a recomputation would count the forward pass twice
            computed.register_hook(lambda _: noted.append(sum(received)))
        elif torch.is_grad_enabled():
            noted.append(sum(received))
        return _Sent.apply(take(computed, places, order), sent, received, group, (COMBINE, DISPATCH))

    return dispatch


class _Sent(torch.autograd.Function):
    """All-to-all of rows, and of their gradients the other way; labels tell dispatch from combine in a trace."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup, ways: tuple[str, str]
    ) -> Tensor:
        """Send rows and receive those of other ranks; ``ways``: the labels of the forward and backward pass."""
        ctx.back = sent, received, group
        ctx.way = ways[1]
        with _labeled(ways[0]):
            return wait_tensor(all_to_all_single(rows, received, sent, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        with _labeled(ctx.way):
            return wait_tensor(all_to_all_single(gradient.contiguous(), *ctx.back)), None, None, None, None


def _labeled(name: str) -> AbstractContextManager[Any]:
    """Return a context that labels a trace, only while the profiler runs and so not in timed steps."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


class Routing:
    """Keeps the routers of a model or a stage equal on all ranks, counts their choices, and scales experts' gradients.

    ``experts``: its modules of experts that ranks share, whichever class sends them tokens.
    """

    def __init__(self, module: nn.Module, experts: Sequence[nn.Module], mesh: Mesh, layout: BatchPlan) -> None:
        dims = layout.dims
        self._routers = {name: part for name, part in module.named_modules() if isinstance(part, Router)}
        self._experts = experts
        self._groups = [ranks.get_group() for ranks in (mesh.dp_cp, mesh["tp"]) if ranks and ranks.size() > 1]
        self._tensor = dims.tensor
        # FSDP averages over the replicas of an expert, each with the tokens of its group; but a loss is a mean over the
        # ranks of all groups, except that tensor-parallel ranks have shares of one loss.
        self._scale = dims.tensor / dims.expert
        self._totals = {name: torch.zeros(part.experts + 1).double() for name, part in self._routers.items()}
        self._loads = array("d")  # tokens that this rank computes, per step and module of experts
        self._ranks = mesh.dp_cp.size() * dims.tensor

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Return a context whose passes are not counted."""
        totals, loads = self._totals, self._loads
        self._totals, self._loads = dict(totals), loads[:]
        yield
        self._totals, self._loads = totals, loads

    def begin(self, share: Tensor) -> None:
        """Begin a step; ``share``: the factor of a micro-batch's loss."""
        for router in self._routers.values():
            router.share = share / self._tensor

    @torch.no_grad()
    def settle(self) -> None:
        """Complete the gradients of experts and balance their load, after the last backward pass of a step."""
        for weight in (weight for layer in self._experts for weight in layer.parameters()):
            if weight.grad is not None:
                local_part(weight.grad).mul_(self._scale)
        counted = {name: torch.stack(router.counts).sum(0) for name, router in self._routers.items() if router.counts}
        for name, counts in counted.items():
            self._totals[name] = self._totals[name].to(counts.device) + counts
            self._routers[name].counts.clear()
        for layer in self._experts:
            received: list[int] = layer.received  # type: ignore[assignment]
            self._loads.append(sum(received))
            received.clear()
        if balanced := {name: counts[:-1] for name, counts in counted.items() if self._routers[name].balances}:
            whole = self._over_ranks(torch.cat([*balanced.values()]))
            for name, counts in zip(balanced, whole.split([len(counts) for counts in balanced.values()]), strict=True):
                self._routers[name].balance(counts)

    def totals(self) -> dict[str, list[float]]:
        """Return each expert's choices in all steps, then the dropped ones, by router name; called in all ranks."""
        return {name: self._over_ranks(counts.clone()).tolist() for name, counts in self._totals.items()}

    def fullest(self) -> float | None:
        """Return the tokens of the fullest rank relative to the mean over ranks, averaged over layers and steps.

        ``None`` without shared experts, or routers that count their choices. Called in all ranks.
        """
        if not (self._loads and self._routers):
            return None
        device = next(iter(self._totals.values())).device
        loads = torch.tensor(self._loads, dtype=torch.float64, device=device)
        largest = self._over_ranks(loads.clone(), dist.ReduceOp.MAX)
        return float((largest * self._ranks / self._over_ranks(loads)).mean())

    def _over_ranks(self, counts: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce counts in place."""
        for group in self._groups:
            dist.all_reduce(counts, operation, group)
        return counts
