"""Context parallelism: the ranks of a group split the positions of each sequence.

Everything but attention works on a rank's own positions. For attention, ranks exchange positions for heads, as in
DeepSpeed-Ulysses (Jacobs et al. 2023): each rank then has some heads of all positions. Or they pass the keys and values
of all positions around, as in ring attention (Liu et al. 2023, arXiv 2310.01889), and each rank keeps its queries. The
ranks have different tokens and the same weights, so gradients are averaged over them as over replicas.

The exchange of a ring, its order and the merging of partial results are torch's, whose functions are private. torch's
``context_parallel`` applies them to DTensors on GPUs; here they are applied to plain tensors, with the kernels of any
device, including CPUs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

from ptdbench.models.protocol import Model, roles_of, wrap_forward
from ptdbench.parallel.engine import Engine, Scale
from ptdbench.parallel.options import Method

aten = torch.ops.aten

#: The dimension of positions in ``[batch, length]``.
_POSITIONS = 1

#: The dimensions of ``[batch, heads, length, head width]``.
HEADS, LENGTH = 1, 2

#: Queries per tile of memory-efficient attention, which pads the log-sum-exp to whole tiles.
_TILE = 32


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
            exchanged = partial(_of_heads, mesh) if method == "ulysses" else lambda _: ring_attention(mesh)
            wrap_forward(names[name], exchanged)


def _number(positions: Positions, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
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
        return self._positions.share(tensor, _POSITIONS)

    def _mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks on the rank that owns the loss, else zero."""
        mean = loss / self._mesh.size()
        dist.all_reduce(mean, group=self._mesh.get_group())
        return mean if self.owns_loss else torch.zeros_like(mean)


def ring_attention(mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function for causal attention over the positions of all ranks of a mesh.

    It maps queries, keys and values of a rank's positions, ``[batch, heads, length, head width]``, to their mixture;
    keys and values may have fewer heads.
    """
    return torch.compiler.disable(lambda q, k, v: RingAttention.apply(q, k, v, mesh))


class RingAttention(torch.autograd.Function):
    """Ring attention over a mesh; traces attribute its messages to this class name."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the mixture for a rank's positions."""
        groups, chosen = q.shape[HEADS] // k.shape[HEADS], attention_kernel(q, trains=any(ctx.needs_input_grad))

        def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
            return chosen.forward(query, _repeated(key, groups), _repeated(value, groups), is_causal)

        ring = _balanced()._templated_ring_attention
        out, logsumexp = ring(mesh.get_group(), LENGTH, attend, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.mesh, ctx.kernel = mesh, chosen
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of a rank's queries, keys and values."""
        q, k, v, out, logsumexp = ctx.saved_tensors
        groups = q.shape[HEADS] // k.shape[HEADS]

        def attend(
            query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, gradient: Tensor
        ) -> tuple[Tensor, ...]:
            whole = _repeated(key, groups), _repeated(value, groups)
            gradients = ctx.kernel.backward(gradient, query, *whole, out, logsumexp, is_causal)
            return gradients[0], _summed(gradients[1], groups), _summed(gradients[2], groups)

        ring = _balanced()._templated_ring_attention_backward
        group, gradient = ctx.mesh.get_group(), gradients[0].contiguous()
        results = ring(group, LENGTH, attend, gradient, "gradient", q, k, v, out, logsumexp, is_causal=True)
        return (*results[:3], None)


def _balanced() -> ModuleType:
    """Return torch's ring module, set to two pieces of the positions per rank."""
    from torch.distributed.tensor.experimental._context_parallel import _attention  # slow to import

    _attention._cp_options.enable_load_balance = True
    return _attention


def _repeated(tensor: Tensor, groups: int) -> Tensor:
    return tensor if groups == 1 else tensor.repeat_interleave(groups, HEADS)


def _summed(gradient: Tensor, groups: int) -> Tensor:
    return gradient if groups == 1 else gradient.unflatten(HEADS, (-1, groups)).sum(HEADS + 1)


@dataclass(frozen=True)
class AttentionKernel:
    """A device's attention kernel; tensors are ``[batch, heads, length, head width]``, all with as many heads."""

    #: From query, key, value and ``is_causal`` to the mixture and its log-sum-exp.
    forward: Callable[..., tuple[Tensor, ...]]
    #: From the mixture's gradient, query, key, value, mixture, log-sum-exp and ``is_causal`` to the gradients of query,
    #: key and value.
    backward: Callable[..., tuple[Tensor, ...]]


def _flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)
    return out, lse


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    """Call torch's backward pass with empty tensors for the unused sequence lengths and dropout state."""
    none = torch.empty(0, dtype=torch.int64)
    lengths = query.shape[LENGTH], key.shape[LENGTH]
    return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        gradient, query, key, value, out, lse, None, None, *lengths, 0.0, is_causal, none, none
    )


def _cudnn(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """Drop the last dimension of cuDNN's log-sum-exp, which has size 1."""
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, is_causal)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    """Call torch's backward pass with an unused random state, and ``None`` for the bias and the sequence lengths."""
    drawn = torch.empty((), dtype=torch.int64, device=query.device)
    lse, lengths = lse.unsqueeze(-1).contiguous(), (query.shape[LENGTH], key.shape[LENGTH])
    return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        gradient, query, key, value, out, lse, drawn, drawn, None, None, None, *lengths, 0.0, is_causal
    )


def _efficient(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """Trim the log-sum-exp, which is padded to whole tiles: the ring merges halves of it."""
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, is_causal)
    return out, lse[..., : query.shape[LENGTH]]


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    none, needed = torch.empty(0, dtype=torch.int64), [True, True, True, False]
    lse = F.pad(lse, (0, -lse.shape[-1] % _TILE), value=math.inf)
    # In 16-bit formats the kernel assumes that the heads of a position are adjacent in memory, whatever the strides.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    gradients = aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, None, out, lse, none, none, 0.0, needed, is_causal
    )
    return tuple(gradients[:3])


#: torch's operations take the fraction of dropout before ``is_causal``.
CPU = AttentionKernel(
    lambda *arguments: aten._scaled_dot_product_flash_attention_for_cpu(*arguments[:-1], 0.0, arguments[-1]),
    lambda *arguments: aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments[:-1], 0.0, arguments[-1]),
)
CUDNN = AttentionKernel(_cudnn, _cudnn_backward)
FLASH = AttentionKernel(_flash, _flash_backward)
EFFICIENT = AttentionKernel(_efficient, _efficient_backward)

#: GPU kernels by torch's choice; memory-efficient attention replaces its choice of no fused kernel.
_CHOSEN = {SDPBackend.CUDNN_ATTENTION: CUDNN, SDPBackend.FLASH_ATTENTION: FLASH}


def attention_kernel(query: Tensor, trains: bool) -> AttentionKernel:
    """Return the kernel that torch would choose for causal attention with these queries and as many heads of keys.

    ``trains``: whether a backward pass follows, which some kernels do not have for all head widths.
    """
    if query.device.type == "cpu":
        return CPU
    query = query.detach().requires_grad_(trains)
    with torch.enable_grad():  # off in the forward pass of an autograd function, where torch would choose for inference
        chosen = torch._fused_sdp_choice(query, query, query, None, 0.0, True)
    return _CHOSEN.get(SDPBackend(chosen), EFFICIENT)
