"""The stages of a model: their parts and their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

from ptdbench.models.protocol import FlopsUnknown, Model, members


@dataclass(frozen=True)
class Cut:
    """A split of a model into stages.

    Attributes:
        stages: The names of each stage's parts, in the model's order.
        ranks: Each stage's rank in the pipeline.
        holds: The names of each stage's submodules: of its parts, or of what these are made of.
    """

    stages: Sequence[Sequence[str]]
    ranks: Sequence[int]
    holds: Sequence[Sequence[str]]

    def of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def owner(self, weight: str) -> int:
        """The stage that holds a weight, by its full name."""
        return next(
            number for number, names in enumerate(self.holds) if any(weight.startswith(f"{name}.") for name in names)
        )


def cut(model: Model, ranks: Sequence[int]) -> Cut:
    """Split a model that is a chain of parts into stages of nearly equal cost.

    By cost and not by number: the head of a small model with a large vocabulary can outweigh several layers.

    Args:
        model: Its :meth:`~ptdbench.models.protocol.Model.parts` are not ``None``.
        ranks: Each stage's rank in the pipeline.
    """
    parts = model.parts() or {}
    names = list(parts)
    stages = [names[run.start : run.stop] for run in balance(costs(model, parts), len(ranks))]
    return Cut(stages, ranks, [[held for name in stage for held in members(name, parts[name])] for stage in stages])


def unrepeated(model: Model, stages: Cut) -> list[list[str]]:
    """Of each stage the names of the submodules with weights that are no repeated layers, such as the head."""
    parts, layers = model.parts() or {}, set(model.layers())
    modules = {held: module for name, part in parts.items() for held, module in members(name, part).items()}

    def is_told(name: str) -> bool:
        return not layers & set(modules[name].modules()) and next(modules[name].parameters(), None) is not None

    return [list(filter(is_told, names)) for names in stages.holds]


def costs(model: Model, parts: Mapping[str, nn.Module]) -> list[float]:
    """The cost of each part: its FLOPs if the model states them by part, else its parameters."""
    try:
        flops = model.train_flops()
    except FlopsUnknown:
        flops = {}
    if parts.keys() <= flops.keys():
        return [flops[name] for name in parts]
    return [sum(weight.numel() for weight in part.parameters()) for part in parts.values()]


class Stage(nn.Module):
    """Consecutive parts of a model.

    Args:
        parts: The parts by their dotted names in the whole model, so that weights, checkpoints and gradients
            have the same names for any number of stages.
        is_last: Whether this is the last stage; other stages ignore the targets.
    """

    def __init__(self, parts: Mapping[str, nn.Module], is_last: bool = False) -> None:
        super().__init__()
        for name, part in ((name, member) for key, one in parts.items() for name, member in members(key, one).items()):
            *path, leaf = name.split(".")
            holder: nn.Module = self
            for step in path:
                if step not in holder._modules:
                    holder.add_module(step, nn.Module())
                holder = holder.get_submodule(step)
            holder.add_module(leaf, part)
        self._chain = list(parts.values())
        self._is_last = is_last

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Activations for the next stage; with targets, on the last stage, the mean loss as ``(1,)``.

        The schedule concatenates the results of micro-batches along the first dimension, which a scalar lacks.
        """
        for part in self._chain[:-1]:
            inputs = part(inputs)
        last = self._chain[-1]
        if targets is not None and self._is_last:
            return last(inputs, targets).reshape(1).clone()  # FSDP does not accept a view
        # Messages must be contiguous, and images may be channels-last.
        return last(inputs).contiguous()


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Split ``costs`` into ``stages`` non-empty runs with the smallest possible maximum sum.

    A pipeline is as fast as its slowest stage. Among equally good splits it takes the one with shorter early stages,
    because under 1F1B an earlier stage holds more micro-batches in memory.

    Args:
        costs: Cost of each part in order, in any unit.
        stages: Number of runs; at most ``len(costs)``.

    Returns:
        The indices of the parts, one range per stage.

    Raises:
        ValueError: There are more stages than parts.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{stages} stages cannot be made of {len(costs)} parts")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @cache
    def best(start: int, left: int) -> tuple[float, int]:
        """Smallest possible cost of the slowest of ``left`` stages from part ``start`` on, and the first one's end."""
        if left == 1:
            return before[-1] - before[start], len(costs)
        last_end = len(costs) - left + 1
        return min(
            (max(before[end] - before[start], best(end, left - 1)[0]), end) for end in range(start + 1, last_end + 1)
        )

    cuts, start = [], 0
    for left in range(stages, 0, -1):
        end = best(start, left)[1]
        cuts.append(range(start, end))
        start = end
    return cuts
