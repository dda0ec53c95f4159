"""The communicators that carry messages between stages."""

from __future__ import annotations

import torch
import torch.distributed as dist

#: torch's option for one communicator a direction, since 2.14.
_OPTION = "pipeline_per_direction_p2p"


def open_links(group: dist.ProcessGroup, device: torch.device) -> str:
    """Let torch open a communicator for each direction where messages of one would wait for the other's.

    NCCL carries out what is sent through one communicator in the order of its calls. Activations and gradients of a
    link then exclude each other, and under schedules whose ranks have several stages they may wait for each other for
    ever, as ``torch.distributed.config`` says. Call this before stages are made, which open them.

    Args:
        group: The ranks of the pipeline.
        device: This rank's device.

    Returns:
        What messages go through, for the record: ``messages``, each by itself, as under gloo; ``directions``; or, with
        NCCL under an older torch, ``one``.
    """
    if device.type != "cuda" or "nccl" not in dist.get_backend_config(group):
        return "messages"
    from torch.distributed import config

    if not hasattr(config, _OPTION):
        return "one"
    setattr(config, _OPTION, True)
    return "directions"
