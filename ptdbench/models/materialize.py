"""Materializes meta tensors with values that do not depend on how the model is split.

Every tensor is drawn from its own generator, seeded by a hash of the run's seed and the tensor's full name, whichever
rank fills it and in whichever order.
"""

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
    """Move ``module`` to ``device``, and initialize its tensors that are still on the meta device.

    Parameters keep their identity, so that tied ones stay tied. Call it for parts of a model in any order, and again
    for the whole.

    Args:
        model: Defines the initial values (:meth:`Model.reset`) and tied weights (:meth:`Model.tied`); it may be the
            module itself, or a copy of the model that the module is a part of.
        module: The model, or a part of it, not yet sharded.
        prefix: Prefix that turns a name in ``module`` into a full name in the model, for example ``"blocks.3."``.
        device: Device of the real tensors.
        seed: The run's seed. Values are a function of the seed, the full name and the kind of device.
        placed: Returns the replacement of a tensor, given the meta tensor and its initial values; a sharded tensor
            keeps a part of them.
    """
    twins = {second: first for first, second in model.tied()}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if not tensor.is_meta:
            continue
        full_name = twins.get(prefix + name, prefix + name)
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        digest = hashlib.blake2b(f"{seed}:{full_name}".encode(), digest_size=8).digest()
        generator = torch.Generator(values.device).manual_seed(int.from_bytes(digest, "big", signed=True))
        model.reset(full_name, values, generator)
        real = placed(tensor, values)
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, real)
    _move(module, torch.device(device))  # tensors that were not on the meta device


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
    """Return the number of parameters of ``module``, including frozen ones; a tied weight counts once."""
    return sum(parameter.numel() for parameter in module.parameters())
