"""Your own ``nn.Module`` as a model of ptdbench.

Any module works whose ``forward(inputs)`` returns one tensor. It may define these methods, all of them optional:

``loss(outputs, targets)``
    The mean loss, a scalar. Default: cross entropy for integer targets, mean squared error for floating-point
    ones. A module whose ``forward`` itself takes ``targets`` returns the loss from there, and needs no
    ``loss``.
``layers()``
    The repeated blocks, a list of modules (an attribute that is a ``ModuleList`` will do): the unit of
    sharding (fsdp), recomputation and compilation. Default: none, so that fsdp shards the module as one.
``parts()``
    The module as an ordered chain, a dict from the full name of each submodule to the submodule; ``forward``
    then takes ``targets``, and so does the last part. Default: none, and the module cannot be pipelined.
``tied()``
    Pairs of full parameter names in different parts that are one weight. Default: none.
``tensor_plan()``
    Linear layers that tensor parallelism may cut, a dict from full name to ``outputs`` or ``inputs``; see
    :meth:`ptdbench.models.protocol.Model.tensor_plan`. Default: none.
``train_flops()``
    FLOPs of forward and backward for one sample, a dict by part. Default: counted on the meta device.
``reset(name, tensor, generator)``
    Fills one parameter or buffer in place with its initial value. With it a module may be larger than a
    machine, as it is built on the meta device; without it each rank builds it whole in host memory, under the
    run's seed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import hydra
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ptdbench.models.protocol import Cut, FlopsUnknown, Model, default_loss

Example = tuple[Tensor, Tensor]


PREFIX = "module."


def build(config: Mapping[str, Any], *, seed: int, example: Callable[[], Example]) -> Model:
    """Build the model that ``config`` describes: on the meta device if it has ``reset``, else with its weights.

    Args:
        config: A class or function under ``_target_``, and its arguments.
        seed: The run's seed, for a module that gets its values from its constructor.
        example: ``(inputs, targets)`` of one sample on the meta device; see ``Data.example``.

    Raises:
        hydra.errors.InstantiationException: If the constructor raises; its cause is what was raised.
    """
    target = hydra.utils.get_object(config["_target_"])
    if callable(getattr(target, "reset", None)):
        with torch.device("meta"):
            return adapt(hydra.utils.instantiate(config), example)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return adapt(hydra.utils.instantiate(config), example)


def adapt(module: nn.Module, example: Callable[[], Example]) -> Model:
    """``module`` itself if it implements the protocol :class:`Model`, else a wrapper that does."""
    if not hasattr(module, "tensor_plan"):  # optional, even if all other methods exist
        module.tensor_plan = lambda: None  # type: ignore[assignment]
    return module if isinstance(module, Model) else Adapted(module, example)


class Adapted(nn.Module):
    """A wrapper with defaults for the methods of the protocol that a module lacks; names begin ``module.``."""

    def __init__(self, module: nn.Module, example: Callable[[], Example]) -> None:
        super().__init__()
        self.module = module
        self._example = example
        self._takes_targets = "targets" in inspect.signature(module.forward).parameters

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The module's outputs, or with ``targets`` its mean loss in fp32."""
        if targets is None:
            return self.module(inputs)
        if self._takes_targets:
            return self.module(inputs, targets).float()
        loss = getattr(self.module, "loss", default_loss)
        return loss(self.module(inputs), targets).float()

    def layers(self) -> list[nn.Module]:
        """The module's blocks, or none."""
        layers: Any = getattr(self.module, "layers", [])
        return list(layers() if inspect.ismethod(layers) else layers)

    def parts(self) -> dict[str, nn.Module] | None:
        """The module's chain, or ``None``: then it cannot be pipelined."""
        parts = self._method("parts")
        return None if parts is None else _prefixed(parts())

    def tensor_plan(self) -> dict[str, Cut] | None:
        """The module's plan, or ``None``: then tensor parallelism is not available."""
        plan = self._method("tensor_plan")
        found = None if plan is None else plan()
        return None if found is None else _prefixed(found)

    def train_flops(self) -> dict[str, float]:
        """The module's own figures; else PyTorch's count for one sample, under the key ``module``.

        Raises:
            FlopsUnknown: If the module does not run on the meta device, where they are counted.
        """
        train_flops = self._method("train_flops")
        if train_flops is None:
            return {"module": count_train_flops(self, *self._example())}
        return _prefixed(train_flops())

    def tied(self) -> list[tuple[str, str]]:
        """The module's tied weights, or none."""
        tied = self._method("tied")
        pairs = [] if tied is None else tied()
        return [(PREFIX + first, PREFIX + second) for first, second in pairs]

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Let the module fill one of its tensors; one without ``reset`` gets its values in :func:`build`.

        Raises:
            NotImplementedError: If the module has no ``reset``.
        """
        reset = self._method("reset")
        if reset is None:
            raise NotImplementedError(f"{type(self.module).__name__} has no reset() to fill {name} with")
        reset(name.removeprefix(PREFIX), tensor, generator)

    def _method(self, name: str) -> Callable[..., Any] | None:
        """The module's own method of that name, not a submodule."""
        attribute = getattr(self.module, name, None)
        return attribute if inspect.ismethod(attribute) else None


def count_train_flops(module: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Count FLOPs of forward and backward for one sample with PyTorch's counter, without computing.

    Args:
        module: Called as ``module(inputs, targets)``; its own tensors are not changed.
        inputs: One sample, batch dimension included, on the meta device.
        targets: Its targets, likewise.

    Raises:
        FlopsUnknown: If the module does not run on the meta device.
    """
    tensors = {
        **{name: p.detach().to("meta").requires_grad_(p.requires_grad) for name, p in module.named_parameters()},
        **{name: buffer.to("meta") for name, buffer in module.named_buffers()},
    }
    # Counted on two samples, as batch norm refuses to train on one.
    two = inputs.repeat_interleave(2, 0), targets.repeat_interleave(2, 0)
    # The counter has no formula for some fused attention kernels and would count them as zero.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        try:
            functional_call(module, tensors, two).backward()
        except Exception as error:  # third-party code may raise anything
            reason = str(error).partition("\n")[0]
            raise FlopsUnknown(
                f"the model has no train_flops(), and counting on the meta device failed: {reason}"
            ) from error
    return counter.get_total_flops() / 2


def _prefixed(by_part: Mapping[str, Any]) -> dict[str, Any]:
    return {PREFIX + name: value for name, value in by_part.items()}
