"""Activations of the layers between the forward and the backward pass: kept, recomputed, or offloaded to the host."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from ptdbench.models.protocol import wrap_forward
from ptdbench.models.state import ModuleState, has_state
from ptdbench.parallel.offloading import Offloading
from ptdbench.problems import at_least, require


class Activations:
    """The type of ``activations=<choice>``."""

    after_compilation = False  #: Whether it is applied to compiled layers; otherwise the compiler sees it.

    def __call__(self, layers: Sequence[nn.Module]) -> None:
        """Apply to these layers, in place."""


@dataclass(frozen=True)
class Keep(Activations):
    """Keep what the backward pass needs."""


@dataclass(frozen=True)
class Recompute(Activations):
    """Keep only a layer's input, and run the layer again in the backward pass (activation checkpointing).

    Raises:
        ConfigError: ``every`` is less than 1.
    """

    every: int = 1  #: Recompute layers 0, ``every``, 2 ``every``, ... of a model or stage; the others keep theirs.

    def __post_init__(self) -> None:
        require(*at_least(1, every=self.every))

    def __call__(self, layers: Sequence[nn.Module]) -> None:
        """Apply activation checkpointing to these layers."""
        for layer in layers[:: self.every]:
            _recompute(layer)


@dataclass(frozen=True)
class Selective(Activations):
    """Keep a layer's input and the results of its expensive operations, :data:`EXPENSIVE`, and recompute the rest.

    Raises:
        ConfigError: ``products`` is less than 1.
    """

    products: int = 1  #: Keep the result of every n-th matrix product; 2 in torchtitan.

    def __post_init__(self) -> None:
        require(*at_least(1, products=self.products))

    def __call__(self, layers: Sequence[nn.Module]) -> None:
        """Apply selective activation checkpointing to these layers."""
        if all(type(layer).__module__.startswith("ptdbench.") for layer in layers):
            # If compiled, torch warns that in-place operations must not be recomputed: these layers have none.
            logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        for layer in layers:
            _recompute(layer, partial(_selecting, self.products))


#: Contexts for the first run of a layer, and for its recomputation.
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _selecting(products: int) -> _Contexts:
    """Return contexts that keep the results of expensive operations, but of matrix products one in ``products``."""
    seen: Counter[bool] = Counter()  # in the first run of a layer, and in its recomputation

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kind, is_kept = getattr(operation, "overloadpacket", operation), True
        if kind in PRODUCTS:
            is_kept = seen[context.is_recompute] % products == 0
            seen[context.is_recompute] += 1
        return MUST_SAVE if is_kept and kind in EXPENSIVE else PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _recompute(layer: nn.Module, contexts: Callable[[], _Contexts] = noop_context_fn) -> None:
    """Let a layer recompute under the second of ``contexts``, with the buffers and attributes of its first run.

    A compiled layer repeats operations of its graph, not Python code; the specification of a run checks that it changes
    no buffers but batch norm statistics, which it does not read.
    """

    def keeping_state() -> _Contexts:
        first, second = contexts()
        return first, _replayed(ModuleState(layer), second)

    def wrapper(forward: Callable[..., Any]) -> Callable[..., Any]:
        checkpointed = partial(checkpoint, forward, use_reentrant=False)
        # The compiler does not recognize the default if it is passed explicitly.
        plain = checkpointed if contexts is noop_context_fn else partial(checkpointed, context_fn=contexts)
        eager = partial(checkpointed, context_fn=keeping_state)

        def run(*arguments: Any, **named: Any) -> Any:
            return (plain if torch.compiler.is_compiling() else eager)(*arguments, **named)

        return run if has_state(layer) else plain

    wrap_forward(layer, wrapper)


@contextmanager
def _replayed(state: ModuleState, context: AbstractContextManager[Any]) -> Iterator[None]:
    with state.replayed(), context:
        yield


@dataclass(frozen=True)
class Offload(Activations):
    """Move a layer's saved tensors to host memory while the next layer runs, and fetch them for the backward pass."""

    after_compilation = True  # hooks see what a graph saves for autograd, not what happens inside it

    def __call__(self, layers: Sequence[nn.Module]) -> None:
        """Apply activation offloading to these layers."""
        offloading = Offloading()
        for number, layer in enumerate(layers):
            wrap_forward(layer, partial(offloading.of_layer, layer, number == 0))


MUST_SAVE, PREFER_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

#: Products of two matrices, which ``activations.products`` counts.
PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.linear, _aten._scaled_mm})

#: Operations whose results ``activations=selective`` keeps: matrix products, convolutions, all attention kernels, and
#: reductions over ranks. This is torchtitan's list, plus products of experts and the corresponding operations on a CPU.
EXPENSIVE = frozenset({
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.linear, _aten._scaled_mm, _aten._grouped_mm,
    _aten.convolution, _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention, _aten._scaled_dot_product_fused_attention_overrideable,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _c10d.all_reduce, _c10d.reduce_scatter_tensor, _c10d.all_to_all_single,
})  # fmt: skip
