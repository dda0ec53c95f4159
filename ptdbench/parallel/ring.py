"""Ring attention: keys and values of all positions pass through each rank, which keeps its own queries.

The exchange, its order and the merging of partial results are torch's (Liu et al. 2023, arXiv 2310.01889); torch's
``context_parallel`` applies them to DTensors on GPUs. Here they are applied to plain tensors, with the kernels of any
device, including CPUs. These functions are private to torch.

Each rank has two pieces of the positions, one from each end (:class:`ptdbench.parallel.context.Positions`), which
balances the work under a causal mask.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

#: The dimensions of ``[batch, heads, length, head width]``.
HEADS, LENGTH = 1, 2

#: GPU kernels need head widths that are multiples of this.
_WIDTH = 8

#: Queries per tile of memory-efficient attention, which pads the log-sum-exp to whole tiles.
_TILE = 32


def attention(mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function for causal attention over the positions of all ranks of a mesh.

    It maps queries, keys and values of a rank's positions, ``[batch, heads, length, head width]``, to their mixture;
    keys and values may have fewer heads.
    """
    return torch.compiler.disable(lambda q, k, v: RingAttention.apply(q, k, v, mesh))


@dataclass(frozen=True)
class Kernel:
    """A device's attention kernel; tensors are ``[batch, heads, length, head width]``, all with as many heads."""

    #: From query, key, value and ``is_causal`` to the mixture and its log-sum-exp.
    forward: Callable[..., tuple[Tensor, ...]]
    #: From the mixture's gradient, query, key, value, mixture, log-sum-exp and ``is_causal`` to the gradients of query,
    #: key and value.
    backward: Callable[..., tuple[Tensor, ...]]


def _flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    scale, width = _scale(query), query.shape[-1]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*_padded(query, key, value), 0.0, is_causal, scale=scale)
    return out[..., :width], lse


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    """Call torch's backward pass with empty tensors for the unused sequence lengths and dropout state."""
    none = torch.empty(0, dtype=torch.int64)
    lengths = query.shape[LENGTH], key.shape[LENGTH]
    gradient, query_, key, value, out = _padded(gradient, query, key, value, out)
    gradients = aten._scaled_dot_product_flash_attention_backward(
        gradient, query_, key, value, out, lse, None, None, *lengths, 0.0, is_causal, none, none, scale=_scale(query)
    )
    return tuple(gradient[..., : query.shape[-1]] for gradient in gradients)


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
    scale, width, length = _scale(query), query.shape[-1], query.shape[LENGTH]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *_padded(query, key, value), None, True, 0.0, is_causal, scale=scale
    )
    return out[..., :width], lse[..., :length]


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    none, needed = torch.empty(0, dtype=torch.int64), [True, True, True, False]
    lse = F.pad(lse, (0, -lse.shape[-1] % _TILE), value=math.inf)
    gradient, query_, key, value, out = _padded(gradient, query, key, value, out)
    # In 16-bit formats the kernel assumes that the heads of a position are adjacent in memory, whatever the strides.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    gradients = aten._scaled_dot_product_efficient_attention_backward(
        gradient, query_, key, value, None, out, lse, none, none, 0.0, needed, is_causal, scale=_scale(query)
    )
    return tuple(gradient[..., : query.shape[-1]] for gradient in gradients[:3])


def _scale(query: Tensor) -> float:
    """Return the scale of query-key products, from the unpadded head width."""
    return 1 / math.sqrt(query.shape[-1])


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Pad heads to a width that GPU kernels accept."""
    missing = -tensors[0].shape[-1] % _WIDTH
    return [F.pad(tensor, (0, missing)) if missing else tensor for tensor in tensors]


#: torch's operations take the fraction of dropout before ``is_causal``.
CPU = Kernel(
    lambda *given: aten._scaled_dot_product_flash_attention_for_cpu(*given[:-1], 0.0, given[-1]),
    lambda *given: aten._scaled_dot_product_flash_attention_for_cpu_backward(*given[:-1], 0.0, given[-1]),
)
CUDNN = Kernel(_cudnn, _cudnn_backward)
FLASH = Kernel(_flash, _flash_backward)
EFFICIENT = Kernel(_efficient, _efficient_backward)

#: GPU kernels by torch's choice; memory-efficient attention replaces its choice of no fused kernel.
_CHOSEN = {SDPBackend.CUDNN_ATTENTION: CUDNN, SDPBackend.FLASH_ATTENTION: FLASH}


def kernel(query: Tensor, trains: bool) -> Kernel:
    """Return the kernel that torch would choose for causal attention with these queries and as many heads of keys.

    ``trains``: whether a backward pass follows, which some kernels do not have for all head widths.
    """
    if query.device.type == "cpu":
        return CPU
    query = query.detach().requires_grad_(trains)
    with torch.enable_grad():  # off in the forward pass of an autograd function, where torch would choose for inference
        chosen = torch._fused_sdp_choice(query, query, query, None, 0.0, True)
    return _CHOSEN.get(SDPBackend(chosen), EFFICIENT)


class RingAttention(torch.autograd.Function):
    """Ring attention over a mesh; traces attribute its messages to this class name."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the mixture for a rank's positions."""
        groups, chosen = q.shape[HEADS] // k.shape[HEADS], kernel(q, trains=any(ctx.needs_input_grad))

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
