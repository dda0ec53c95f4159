"""How a global batch falls onto the ranks: the numbers, and the rules they must satisfy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from ptdbench.problems import Problem, nearest_numbers, require, try_these


@dataclass(frozen=True)
class Layout:
    """One factorisation of ranks and batch.

    ``data * pipeline`` is the world size; ``data * accumulation * microbatches * micro_batch`` the global batch.

    Attributes:
        data: Replicas of the model; each takes an equal share of the global batch.
        pipeline: Stages that a replica is cut into.
        global_batch: Samples of one optimizer step over all ranks.
        micro_batch: Samples of one forward and backward through one stage.
        microbatches: Micro-batches that one pass of a pipeline schedule works on; 1 without a pipeline.
        accumulation: Passes whose gradients are added up before the optimizer steps.
    """

    data: int
    pipeline: int
    global_batch: int
    micro_batch: int
    microbatches: int
    accumulation: int

    @property
    def replica_batch(self) -> int:
        """Samples of one step that one replica works on."""
        return self.global_batch // self.data

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.data * self.pipeline

    def rows(self, step: int, replica: int) -> tuple[int, int]:
        """The samples, numbered over the whole run, that a replica takes at a step: ``(start, stop)``."""
        start = step * self.global_batch + replica * self.replica_batch
        return start, start + self.replica_batch

    def as_dict(self) -> dict[str, int]:
        """The numbers by name, as they stand in a record."""
        return asdict(self)


def arrange(
    world_size: int,
    global_batch: int,
    micro_batch: int | Literal["auto"] = "auto",
    *,
    pipeline: int = 1,
    microbatches: int | Literal["auto"] = 1,
) -> Layout:
    """The layout of these ranks and this batch.

    Args:
        world_size: Ranks in all.
        global_batch: Samples of one optimizer step.
        micro_batch: Samples of one forward and backward; ``auto``: no accumulation.
        pipeline: Stages a replica is cut into.
        microbatches: Micro-batches of one pass; ``auto``: all of a replica's share where ``micro_batch`` is set,
            else enough to keep the stages busy (:func:`_busy`).

    Raises:
        ConfigError: With every rule that the numbers break.
    """
    require(_divides("parallel.pipeline_size", pipeline, world_size, "the world size", least=min(2, world_size)))
    data = world_size // pipeline
    require(_is_multiple("train.global_batch", global_batch, data, "the number of data-parallel replicas"))
    share = global_batch // data

    if micro_batch == "auto":
        microbatches = _busy(share, pipeline) if microbatches == "auto" else microbatches
        require(_divides("parallel.microbatches", microbatches, share, "a replica's share of the batch"))
        return Layout(data, pipeline, global_batch, share // microbatches, microbatches, 1)
    require(_divides("train.micro_batch", micro_batch, share, "a replica's share of the batch"))
    if microbatches == "auto":
        return Layout(data, pipeline, global_batch, micro_batch, share // micro_batch, 1)
    passes = share // micro_batch
    require(_divides("parallel.microbatches", microbatches, passes, "the micro-batches of a replica's step"))
    return Layout(data, pipeline, global_batch, micro_batch, microbatches, passes // microbatches)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _busy(share: int, pipeline: int) -> int:
    """Micro-batches that keep ``pipeline`` stages busy: at least two a stage where the batch allows it.

    Of ``m + p - 1`` slots a stage idles in ``p - 1`` (GPipe, Huang et al. 2019), so more micro-batches
    mean a smaller bubble, and smaller, less efficient matrix products.
    """
    allowed = divisors(share)
    return next((number for number in allowed if number >= 2 * pipeline), allowed[-1]) if pipeline > 1 else 1


def _divides(option: str, value: int, total: int, what: str, least: int = 1) -> Problem | None:
    if value >= 1 and total % value == 0:
        return None
    close = nearest_numbers(value, [number for number in divisors(total) if number >= least])
    return Problem(option, value, f"must divide {what}, {total}", try_these(close))


def _is_multiple(option: str, value: int, factor: int, what: str) -> Problem | None:
    if value >= 1 and value % factor == 0:
        return None
    below = value // factor * factor
    close = [number for number in (below, below + factor) if number > 0]
    return Problem(option, value, f"must be a multiple of {what}, {factor}", try_these(close))
