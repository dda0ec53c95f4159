"""Ten steps of AdamW on four samples, on one rank and under a layout: what the numbers of a layout are held to."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptdbench.models.protocol import Model
from ptdbench.parallel.apply import Setting
from ptdbench.parallel.strategy import Strategy
from tests.parallel.ranks import mesh_of

SAMPLES, STEPS = 4, 10


def tokens(batch: int = 2, first: int = 0) -> Tensor:
    """``[batch, 6]`` of a vocabulary of 20."""
    return (torch.arange(batch * 6).reshape(batch, 6) * 7 + first) % 20


def on_one_rank(model: nn.Module) -> list[float]:
    """The losses of a model with its weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(tokens(SAMPLES, step), tokens(SAMPLES, step + 7))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert abs(losses[-1] / losses[0] - 1) > 1e-2  # wrong gradients would show
    return losses


def on_all_ranks(strategy: Strategy, model: Model, **options: Any) -> list[float]:
    """In each rank: the losses of a model on the meta device, laid out."""
    dims = strategy.dims(dist.get_world_size())
    layout, mesh = strategy.layout(dims, SAMPLES, "auto"), mesh_of(dims)
    engine = strategy(model, Setting(mesh, layout, torch.device("cpu"), **options))
    optimizer = engine.optimizer(lambda weights: torch.optim.AdamW(weights, lr=1e-2))
    share = SAMPLES // dims.batch
    rows = slice(mesh.batch.get_local_rank() * share, (mesh.batch.get_local_rank() + 1) * share)
    losses = []
    for step in range(STEPS):
        loss = engine.gradients(tokens(SAMPLES, step)[rows], tokens(SAMPLES, step + 7)[rows], lambda loss: loss)
        dist.all_reduce(loss)
        losses.append(loss.item() / dims.batch)
        optimizer.step()
        optimizer.zero_grad()
    return losses
