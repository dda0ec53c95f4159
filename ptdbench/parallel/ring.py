"""Ring attention: keys and values of all positions pass each rank, which attends with the queries of its own.

The exchange, its order and the merging of partial results are torch's own (Liu et al. 2023, arXiv 2310.01889), which
torch's ``context_parallel`` applies to DTensors on GPUs. Here they are applied to plain tensors, with the kernels of
the device, a CPU's too. They are private to torch: :func:`missing` says what this version lacks.

Each rank has two pieces of the positions, one from each end (:class:`ptdbench.parallel.context.Positions`), so that a
causal mask leaves all of them the same number of products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

#: The dimensions of ``[batch, heads, length, head width]``.
_HEADS, _LENGTH = 1, 2

_OF_TORCH = "torch.distributed.tensor.experimental._context_parallel._attention"
_NEEDED = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options")

#: The widths of heads that kernels of GPUs compute are multiples of this.
_WIDTH = 8

#: Queries of a tile of memory-efficient attention, to whole ones of which it pads the log-sum-exp.
_TILE = 32


def missing() -> str | None:
    """Return what this version of torch lacks for ring attention; ``None`` if it has all."""
    try:
        module = import_module(_OF_TORCH)
    except ImportError:
        return _OF_TORCH
    return next((f"{_OF_TORCH}.{name}" for name in _NEEDED if not hasattr(module, name)), None)


def attention(mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention over the positions of all ranks of a mesh.

    Returns:
        Takes queries, keys and values of a rank's positions, ``[batch, heads, length, head width]``, keys and values
        perhaps of fewer heads, and returns their mixture.
    """

    @torch.compiler.disable
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = RingAttention.apply(q, k, v, mesh)  # type: ignore[no-untyped-call]
        return found

    return forward


@dataclass(frozen=True)
class Kernel:
    """A device's attention, of ``[batch, heads, length, head width]`` and as many heads of keys as of queries."""

    #: Of query, key, value and whether it is causal: the mixture and its log-sum-exp.
    forward: Callable[..., tuple[Tensor, ...]]
    #: Of the mixture's gradient, query, key, value, mixture, log-sum-exp and whether it is causal: the gradients of
    #: query, key and value.
    backward: Callable[..., tuple[Tensor, ...]]


def _of_cpu(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        query, key, value, 0.0, is_causal
    )


def _of_cpu_backward(*tensors_causal: Any) -> tuple[Tensor, ...]:
    *tensors, is_causal = tensors_causal
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        *tensors, 0.0, is_causal
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    scale, width = _scale(query), query.shape[-1]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*_padded(query, key, value), 0.0, is_causal, scale=scale)
    return out[..., :width], lse


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    """Sequences of one length and no dropout: what torch asks for of both is empty."""
    none = torch.empty(0, dtype=torch.int64)
    lengths = query.shape[_LENGTH], key.shape[_LENGTH]
    gradient, query_, key, value, out = _padded(gradient, query, key, value, out)
    found = aten._scaled_dot_product_flash_attention_backward(
        gradient, query_, key, value, out, lse, None, None, *lengths, 0.0, is_causal, none, none, scale=_scale(query)
    )
    return tuple(one[..., : query.shape[-1]] for one in found)


def _cudnn(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """Its log-sum-exp has a last dimension of one."""
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, is_causal)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    """Without dropout nothing is drawn; no bias, and sequences of one length, are ``None``."""
    drawn = torch.empty((), dtype=torch.int64, device=query.device)
    lse, lengths = lse.unsqueeze(-1).contiguous(), (query.shape[_LENGTH], key.shape[_LENGTH])
    return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        gradient, query, key, value, out, lse, drawn, drawn, None, None, None, *lengths, 0.0, is_causal
    )


def _efficient(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """Its log-sum-exp is padded to whole tiles, which a ring that merges halves of it does not expect."""
    scale, width, length = _scale(query), query.shape[-1], query.shape[_LENGTH]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *_padded(query, key, value), None, True, 0.0, is_causal, scale=scale
    )
    return out[..., :width], lse[..., :length]


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    none, wanted = torch.empty(0, dtype=torch.int64), [True, True, True, False]
    lse = F.pad(lse, (0, -lse.shape[-1] % _TILE), value=math.inf)
    gradient, query_, key, value, out = _padded(gradient, query, key, value, out)
    # In 16 bits the kernel takes the heads of a position to follow each other in memory, whatever the strides say.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    found = aten._scaled_dot_product_efficient_attention_backward(
        gradient, query_, key, value, None, out, lse, none, none, 0.0, wanted, is_causal, scale=_scale(query)
    )
    return tuple(one[..., : query.shape[-1]] for one in found[:3])


def _scale(query: Tensor) -> float:
    """Of the products of queries and keys; that of a padded width would be another."""
    return 1 / math.sqrt(query.shape[-1])


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Heads as wide as the kernels of GPUs want them."""
    missing = -tensors[0].shape[-1] % _WIDTH
    return [F.pad(tensor, (0, missing)) if missing else tensor for tensor in tensors]


CPU = Kernel(_of_cpu, _of_cpu_backward)
CUDNN = Kernel(_cudnn, _cudnn_backward)
FLASH = Kernel(_flash, _flash_backward)
EFFICIENT = Kernel(_efficient, _efficient_backward)

#: Kernels of a GPU by what torch chooses; what it would compute without one, memory-efficient attention does.
_CHOSEN = {SDPBackend.CUDNN_ATTENTION: CUDNN, SDPBackend.FLASH_ATTENTION: FLASH}


def kernel(query: Tensor) -> Kernel:
    """The kernel by which torch would compute causal attention of these queries, and as many heads of keys."""
    if query.device.type == "cpu":
        return CPU
    chosen = torch._fused_sdp_choice(query, query, query, None, 0.0, True)
    return _CHOSEN.get(SDPBackend(chosen), EFFICIENT)


class RingAttention(torch.autograd.Function):
    """The ring of a mesh; traces name what it sends by its name."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh) -> Tensor:
        """The mixture of a rank's positions."""
        groups, chosen = q.shape[_HEADS] // k.shape[_HEADS], kernel(q)

        def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
            return chosen.forward(query, _repeated(key, groups), _repeated(value, groups), is_causal)

        ring = _balanced()._templated_ring_attention
        out, logsumexp = ring(mesh.get_group(), _LENGTH, attend, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.mesh, ctx.kernel = mesh, chosen
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of its queries, keys and values."""
        q, k, v, out, logsumexp = ctx.saved_tensors
        groups = q.shape[_HEADS] // k.shape[_HEADS]

        def attend(
            query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, gradient: Tensor
        ) -> tuple[Tensor, ...]:
            whole = _repeated(key, groups), _repeated(value, groups)
            found = ctx.kernel.backward(gradient, query, *whole, out, logsumexp, is_causal)
            return found[0], _summed(found[1], groups), _summed(found[2], groups)

        ring = _balanced()._templated_ring_attention_backward
        group, gradient = ctx.mesh.get_group(), gradients[0].contiguous()
        found = ring(group, _LENGTH, attend, gradient, "gradient", q, k, v, out, logsumexp, is_causal=True)
        return (*found[:3], None)


def _balanced() -> ModuleType:
    """Torch's ring, for two pieces of the positions a rank."""
    module = import_module(_OF_TORCH)
    module._cp_options.enable_load_balance = True
    return module


def _repeated(tensor: Tensor, groups: int) -> Tensor:
    """Each head of keys or values for ``groups`` heads of queries."""
    return tensor if groups == 1 else tensor.repeat_interleave(groups, _HEADS)


def _summed(gradient: Tensor, groups: int) -> Tensor:
    """The gradient of what was repeated."""
    return gradient if groups == 1 else gradient.unflatten(_HEADS, (-1, groups)).sum(_HEADS + 1)
