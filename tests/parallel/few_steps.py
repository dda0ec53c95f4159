"""Steps on a few samples, of 8 tokens each: what the numbers of a layout are held to."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from ptdbench.models.experts import Router
from ptdbench.parallel.dims import BatchPlan
from ptdbench.parallel.engine import Engine
from tests.parallel.made import unscaled, with_weights

STEPS = 5


def tokens(batch: int = 2, first: int = 0) -> Tensor:
    """``[batch, 6]`` of a vocabulary of 20."""
    return (torch.arange(batch * 6).reshape(batch, 6) * 7 + first) % 20


def samples(step: int, batch: int) -> tuple[Tensor, ...]:
    """``[batch, 8]``; inputs and targets."""
    twice = (torch.cat([tokens(batch, step + k), tokens(batch, step + k + 3)], 1) for k in (0, 7))
    return tuple(tensor[:, :8].contiguous() for tensor in twice)  # stages of torch 2.11 take no parts of rows


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD((weight for _, weight in weights), lr=0.1, momentum=0.9)


def by_hand(model: Any, batch: int) -> list[list[float]]:
    """Losses and norms of gradients without any of what lays a model out."""
    numbers, optimizer = [], sgd(with_weights(model).named_parameters())
    for step in range(STEPS):
        loss = model(*samples(step, batch))
        loss.backward()
        numbers.append([loss.item(), get_total_norm([weight.grad for weight in model.parameters()]).item()])
        for router in (part for part in model.modules() if isinstance(part, Router)):
            (counts,) = router.counts
            router.balance(counts[:-1])
            router.counts.clear()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(numbers[-1][0] / numbers[0][0] - 1) > 1e-2
    return numbers


def by_engine(engine: Engine, layout: BatchPlan, replica: int) -> list[list[float]]:
    """In a rank: the same under a layout."""
    numbers, optimizer = [], engine.optimizer(sgd)
    for step in range(STEPS):
        first, beyond = (row - step * layout.global_batch for row in layout.rows(step, replica))
        inputs, targets = (tensor[first:beyond] for tensor in samples(step, layout.global_batch))
        loss = engine.gradients(inputs, targets, unscaled)
        dist.all_reduce(loss)
        numbers.append([loss.item() / layout.replicas, engine.gradient_norm().item()])
        optimizer.step()
        optimizer.zero_grad()
    return numbers
