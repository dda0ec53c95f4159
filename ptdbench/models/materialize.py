"""From the meta device to real weights that do not depend on how the model was split.

Every tensor is drawn from its own generator, seeded by a hash of the run's seed and the tensor's full name. So the
values do not depend on which rank fills which part of a model, or in which order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ptdbench.models.protocol import Model


@torch.no_grad()
def materialize(
    model: Model,
    module: nn.Module,
    *,
    prefix: str = "",
    device: torch.device | str,
    seed: int,
    placed: Callable[[Tensor, Tensor], Tensor] = lambda _, values: values,
) -> None:
    """Move ``module`` to ``device``, and initialize every tensor of it that is still on the meta device.

    Parameters keep their identity, so that shared ones stay shared. May be called for parts of a model in any order,
    and again for the whole.

    Args:
        model: Knows the initial values (:meth:`Model.reset`) and which weights are one (:meth:`Model.tied`); it may be
            the module itself, or a copy of the model of which the module is a part.
        module: The model, or a part of it: shard it afterwards.
        prefix: What makes a name in ``module`` a full name in the model, for example ``"blocks.3."``.
        device: Where the tensors go.
        seed: The run's seed. The values are a function of it, the full name and the kind of device.
        placed: Returns what takes the place of a tensor, given that on the meta device and its initial values: one that
            is divided among ranks keeps a part of them.
    """
    twins = {second: first for first, second in model.tied()}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if not tensor.is_meta:
            continue
        full_name = prefix + name
        full_name = twins.get(full_name, full_name)
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        model.reset(full_name, values, _generator(seed, full_name, values.device))
        real = placed(tensor, values)
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, real)
    _move(module, torch.device(device))  # what is not on the meta device


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module, but nothing that FSDP has sharded: its policy may keep shards in host memory."""
    if isinstance(module, FSDPModule):
        return
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        for part in module.children():
            _move(part, device)
        module._apply(lambda tensor: tensor.to(device), recurse=False)
    else:
        module.to(device)


def parameter_count(module: nn.Module) -> int:
    """Number of parameters of ``module``, frozen ones included; a shared weight counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big", signed=True))
