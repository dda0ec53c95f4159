"""torchtitan's Llama 3.1 and how it was laid out for its published runs, as far as memory depends on it.

Written after torchtitan's sources of December 2024, commit 9dec370 (``models/llama/model.py``, ``models/norms.py``,
``parallelisms/parallelize_llama.py``, ``float8.py``, ``optimizer.py``, ``train.py``) and of June 2025, commit e7c0cae:
the same operations in the same order, which is what the allocator sees. Weights have no values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class Shape:
    """A Llama 3.1."""

    layers: int
    width: int
    heads: int
    hidden: int
    key_value_heads: int = 8
    vocabulary: int = 128256


MODELS = {
    "8B": Shape(32, 4096, 32, 14336),
    "70B": Shape(80, 8192, 64, 28672),
    "405B": Shape(126, 16384, 128, 53248),
}


@dataclass(frozen=True)
class Recipe:
    """How a run was set up."""

    model: str  #: Key of :data:`MODELS`.
    ranks: int  #: GPUs.
    batch: int  #: Sequences of a data-parallel rank in a step.
    length: int  #: Tokens of a sequence.
    #: ``full``: whole blocks; ``selective``: what is not on torchtitan's list, and every second product.
    recompute: str
    compile: bool  #: Whether each block is compiled.
    float8: bool  #: Whether the blocks' linear layers compute in float8, and FSDP gathers it.
    shard: int  #: Data-parallel ranks.
    context: int = 1  #: Ranks that divide the sequences; rows with more than one are left out.
    tensor: int = 1  #: Ranks that divide the matrices.
    #: Whether the loss is compiled too, and norms and the optimizer are torch's fused ones, as from 2025.
    of_2025: bool = False


class Norm(nn.Module):
    """Root mean square norm, computed in fp32 operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    """Causal attention; queries and keys are turned as complex numbers, and keys and values repeated for all heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.repeats = shape.heads // shape.key_value_heads
        self.wq = nn.Linear(shape.width, shape.width, bias=False)
        self.wk = nn.Linear(shape.width, shape.key_value_heads * self.head_width, bias=False)
        self.wv = nn.Linear(shape.width, shape.key_value_heads * self.head_width, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, self.head_width) for part in (self.wq, self.wk, self.wv))
        wide_q, wide_k = (torch.view_as_complex(one.float().reshape(*one.shape[:-1], -1, 2)) for one in (q, k))
        here = turns[:length].view(1, length, 1, -1)
        turned_q = torch.view_as_real(wide_q * here).flatten(3)
        turned_k = torch.view_as_real(wide_k * here).flatten(3)
        q, k = turned_q.type_as(q), turned_k.type_as(k)
        k, v = _repeated(k, self.repeats), _repeated(v, self.repeats)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(mixed.transpose(1, 2).contiguous().view(batch, length, -1))


def _repeated(x: Tensor, times: int) -> Tensor:
    """Each head of ``[batch, length, heads, head_width]`` so many times."""
    batch, length, heads, width = x.shape
    return x.unsqueeze(3).expand(batch, length, heads, times, width).reshape(batch, length, heads * times, width)


class FeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and MLP, each added to the stream."""

    def __init__(self, shape: Shape, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.attention_norm = norm(shape.width)
        self.ffn_norm = norm(shape.width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """The model."""

    turns: Tensor

    def __init__(self, shape: Shape, length: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.register_buffer("turns", torch.zeros(length, shape.width // shape.heads // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(number): Block(shape, norm) for number in range(shape.layers)})
        self.norm = norm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` to logits ``[batch, length, vocabulary]``."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of whole logits in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def meshes(recipe: Recipe) -> dict[str, DeviceMesh]:
    """The ranks that shard the data, and those that divide the matrices, where some do."""
    if recipe.tensor == 1:
        return {"shard": init_device_mesh("cuda", (recipe.shard,), mesh_dim_names=("shard",))}
    mesh = init_device_mesh("cuda", (recipe.shard, recipe.tensor), mesh_dim_names=("shard", "tp"))
    return {"shard": mesh["shard"], "tp": mesh["tp"]}


def laid_out(model: Transformer, recipe: Recipe, mesh: dict[str, DeviceMesh]) -> Transformer:
    """The model with its weights on this rank, laid out in torchtitan's order."""
    if recipe.float8:
        _in_float8(model)
    if recipe.tensor > 1:
        _cut(model, mesh["tp"], recipe.float8)
    how: dict[str, Any] = {"context_fn": _selecting} if recipe.recompute == "selective" else {}
    for name, block in model.layers.items():
        recomputed = checkpoint_wrapper(block, preserve_rng_state=False, **how)
        compiled: Any = torch.compile(recomputed, fullgraph=True) if recipe.compile else recomputed
        model.layers[name] = compiled
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    share = partial(fully_shard, mesh=mesh["shard"], mp_policy=policy)
    last = list(model.layers)[-1]
    for name, block in model.layers.items():  # the last one is gathered again at once: it stays
        share(block, reshard_after_forward=name != last)
    share(model, reshard_after_forward=True)
    return model.to_empty(device="cuda").train()


def _in_float8(model: Transformer) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "output")


def _cut(model: Transformer, mesh: DeviceMesh, float8: bool) -> None:
    """Tensor and sequence parallelism."""
    rows, columns, entry = RowwiseParallel, ColwiseParallel, PrepareModuleInput
    if float8:
        from torchao.float8 import float8_tensor_parallel as of_float8

        rows, columns = of_float8.Float8RowwiseParallel, of_float8.Float8ColwiseParallel
        entry = of_float8.PrepareFloat8ModuleInput
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": entry(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            **{f"attention.{name}": columns() for name in ("wq", "wk", "wv")},
            "attention.wo": rows(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": entry(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": columns(),
            "feed_forward.w2": rows(output_layouts=Shard(1)),
            "feed_forward.w3": columns(),
        }
        parallelize_module(block, mesh, plan)


#: Operations whose results selective recomputation keeps, of products every second one.
_KEPT = frozenset({
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.abs.default,
    torch.ops.aten.max.default,
})  # fmt: skip


def _selecting() -> Any:
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        products[context.is_recompute] += operation == torch.ops.aten.mm.default
        skipped = operation == torch.ops.aten.mm.default and products[context.is_recompute] % 2 == 0
        keeps = operation in _KEPT and not skipped
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Training:
    """A rank's part of a run: :meth:`step` takes one.

    Args:
        recipe: The run.
    """

    def __init__(self, recipe: Recipe) -> None:
        # Today's compiler checks strides of attention's gradients, which it foresees wrong for one head of keys a rank.
        torch._inductor.config.size_asserts = False
        self._recipe = recipe
        self._mesh = meshes(recipe)
        shape = MODELS[recipe.model]
        with torch.device("meta"):
            norm = partial(nn.RMSNorm, eps=1e-5) if recipe.of_2025 else Norm
            model = Transformer(shape, recipe.length, norm)
        self._model = laid_out(model, recipe, self._mesh)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1,
            fused=recipe.of_2025, foreach=not recipe.of_2025,
        )  # fmt: skip
        self._loss_of = torch.compile(loss_of) if recipe.of_2025 else loss_of

    def step(self) -> None:
        """Forward and backward, clipping, and the optimizer's step."""
        tokens, targets = (
            torch.zeros(self._recipe.batch, self._recipe.length, dtype=torch.long).to("cuda") for _ in range(2)
        )
        self._optimizer.zero_grad()
        # Flash attention is what torch took at that time.
        attention = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
        with attention, loss_parallel() if self._recipe.tensor > 1 else nullcontext():
            logits = self._model(tokens)
            loss = self._loss_of(logits, targets)
            del logits
            loss.backward()
        parameters = list(self._model.parameters())
        norm = nn.utils.get_total_norm([weight.grad for weight in parameters if weight.grad is not None], foreach=True)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
        self._optimizer.step()
        if self._recipe.float8:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self._model)
