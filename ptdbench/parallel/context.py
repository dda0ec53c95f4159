"""Context parallelism: the ranks of a group split the positions of each sequence.

Everything but attention works on a rank's own positions. For attention, ranks exchange positions for heads, as in
DeepSpeed-Ulysses (Jacobs et al. 2023): each rank then has some heads of all positions. Or they gather the keys and
values of all positions (:mod:`ptdbench.parallel.ring`). The ranks have different tokens and the same weights, so
gradients are averaged over them as over replicas.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from ptdbench.models.protocol import Model, roles_of, wrap_forward
from ptdbench.parallel import ring
from ptdbench.parallel.engine import Engine, Scale
from ptdbench.parallel.options import Method
from ptdbench.parallel.ring import HEADS, LENGTH

#: The dimension of positions in ``[batch, length]``.
_POSITIONS = 1


@dataclass(frozen=True)
class Positions:
    """The positions of a sequence in equal pieces, and the pieces of one rank."""

    ranks: int  #: Number of ranks that share a sequence.
    rank: int  #: This rank among them.
    #: Whether each rank has two pieces, one from each end: ``[0, 7]``, ``[1, 6]``, ..., which balances the work under a
    #: causal mask; else one.
    paired: bool

    def share(self, tensor: Tensor, dimension: int) -> Tensor:
        """Return this rank's share of a whole sequence, whose length is a multiple of the number of pieces."""
        return tensor.index_select(dimension, self._positions_of(self.rank, tensor.shape[dimension], tensor.device))

    def numbers(self, local: Tensor) -> Tensor:
        """Convert positions in this rank's share, ``[length of the share]``, to positions in the whole sequence."""
        return self._positions_of(self.rank, len(local) * self.ranks, local.device)[local]

    def whole(self, shares: Sequence[Tensor], dimension: int) -> Tensor:
        """Reassemble the whole sequence from the shares of all ranks, in rank order."""
        joined = torch.cat([*shares], dimension)
        order = [self._positions_of(rank, joined.shape[dimension], joined.device) for rank in range(self.ranks)]
        return joined.index_select(dimension, torch.cat(order).argsort())

    def _positions_of(self, rank: int, length: int, device: torch.device) -> Tensor:
        """Return the positions of a rank in a sequence of this length, ``[length / ranks]`` in int64."""
        pieces = torch.arange(length, device=device).view(self.ranks * (1 + self.paired), -1)
        return torch.cat([pieces[rank], pieces[-1 - rank]]) if self.paired else pieces[rank]


def positions_of(mesh: DeviceMesh, method: Method) -> Positions:
    """Return this rank's positions of a sequence that the ranks of ``mesh`` split."""
    return Positions(mesh.size(), mesh.get_local_rank(), paired=method == "ring")


def exchange(model: Model, module: nn.Module, mesh: DeviceMesh, method: Method) -> None:
    """Let ``module``, the model or one of its stages, compute on a rank's share of the positions."""
    names, positions = dict(module.named_modules()), positions_of(mesh, method)
    for name, role in roles_of(model).items():
        if name in names and role.kind == "positions":
            names[name].register_forward_pre_hook(partial(_number, positions))
        if name in names and role.kind == "attention":
            wrap_forward(
                names[name], partial(_of_heads, mesh) if method == "ulysses" else lambda _: ring.attention(mesh)
            )


def _number(positions: Positions, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert positions in a rank's share to positions in the whole sequence."""
    local, *others = arguments
    return positions.numbers(local), *others


def _of_heads(mesh: DeviceMesh, mix: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(*of_positions: Tensor) -> Tensor:
        return _reshard([mix(*_reshard(of_positions, mesh, LENGTH, HEADS))], mesh, HEADS, LENGTH)[0]

    return forward


def _reshard(tensors: Sequence[Tensor], mesh: DeviceMesh, whole: int, sharded: int) -> list[Tensor]:
    """Gather tensors along dimension ``whole`` and shard them along ``sharded``, by one all-to-all each.

    All messages are sent before the first is awaited. torch's functional collectives have gradients and can be
    compiled; on a CPU, a DTensor's ``redistribute`` would gather everything.
    """
    stacked = [torch.stack(tensor.tensor_split(mesh.size(), sharded)).contiguous() for tensor in tensors]
    arriving = [all_to_all_single_autograd(parts.flatten(0, 1), None, None, mesh.get_group()) for parts in stacked]
    arrived = [flat.view_as(parts) for flat, parts in zip(arriving, stacked, strict=True)]
    return [torch.cat(parts.unbind(), whole) for parts in arrived]


class Sliced(Engine):
    """An engine that runs an ``inner`` engine on this rank's share of the positions, split over ``mesh``."""

    def __init__(self, inner: Engine, mesh: DeviceMesh, method: Method) -> None:
        self.module = inner.module
        self.parts = inner.parts
        self.owns_loss = inner.owns_loss and mesh.get_local_rank() == 0
        self.rehearsals = inner.rehearsals
        self._inner = inner
        self._mesh = mesh
        self._positions = positions_of(mesh, method)

    def gradients(self, inputs: Any, targets: Tensor, scale: Scale) -> Tensor:
        """See :meth:`ptdbench.parallel.engine.Engine.gradients`."""
        loss = self._inner.gradients(self._share(inputs), self._share(targets), scale)
        return self._mean(loss) if self._inner.owns_loss else loss

    def gradient_norm(self) -> Tensor:
        """See :meth:`ptdbench.parallel.engine.Engine.gradient_norm`; these ranks have the same gradients."""
        return self._inner.gradient_norm()

    def outputs(self, inputs: Any, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`ptdbench.parallel.engine.Engine.outputs`."""
        outputs = self._inner.outputs(self._share(inputs), None if targets is None else self._share(targets))
        if outputs is None:
            return None
        if targets is not None:
            outputs = self._mean(outputs)
        else:
            shares = [torch.empty_like(outputs) for _ in range(self._mesh.size())]
            dist.all_gather(shares, outputs.contiguous(), group=self._mesh.get_group())
            outputs = self._positions.whole(shares, _POSITIONS)
        return outputs if self.owns_loss else None

    def _share(self, tensor: Tensor) -> Tensor:
        """Return this rank's positions of ``[batch, length]``."""
        return self._positions.share(tensor, _POSITIONS)

    def _mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks on the rank that owns the loss, else zero."""
        mean = loss / self._mesh.size()
        dist.all_reduce(mean, group=self._mesh.get_group())
        return mean if self.owns_loss else torch.zeros_like(mean)
