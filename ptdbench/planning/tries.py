"""Tries: short runs with one micro-batch, which represent a run; their options, layouts, and missing memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ptdbench.nested import tensors
from ptdbench.parallel import experts
from ptdbench.parallel.dims import BatchPlan, divisors
from ptdbench.parallel.footprint import local_parts
from ptdbench.problems import ConfigError
from ptdbench.records import record, store
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Written
from ptdbench.setup.config import Config, Slurm
from ptdbench.setup.training_spec import TrainingSpec

#: Executes the run of a directory: :func:`ptdbench.run.door.run`.
Execute = Callable[[Path], None]

#: Values of the option that request a search.
SOUGHT = ("max", "best")

#: Options that shorten a run to a try.
_SHORT = {
    "train.warmup_steps": 0,
    "train.max_minutes": None,
    "eval.every": None,
    "checkpoint.every_steps": None,
    "profile.steps": 0,
    "objective": "throughput",
    "profile.trace": False,
    "resume": None,
    "logger": {"name": "none", "_target_": "ptdbench.report.loggers.none"},
}


def try_options(config: Config, steps: int = 3) -> dict[str, Any]:
    """Return the options that shorten a run to a try; its optimizer state exists from the second step on."""
    options: dict[str, Any] = _SHORT | {"train.steps": steps}
    if isinstance(config.cluster, Slurm):
        options["cluster.requeue"] = False  # it writes no checkpoint to resume from
    if config.resolved.get("precision") == "fp16" and not config.resolved.get("virtual"):
        # Overflows skip steps, which make no state: the loss scale starts at 2**16, and each skip halves it.
        options["train.steps"] += 16
    return options


def needs_search(config: Config) -> bool:
    """Return whether the micro-batch must be searched for."""
    train = config.resolved.get("train")
    return isinstance(train, dict) and train.get("micro_batch") in SOUGHT


def with_found_micro_batch(config: Config, record: RunRecord | None) -> Config:
    """Return the configuration of a run with the micro-batch that was found before its ranks were started."""
    size = record.micro_batch.found if record else None
    return config.changed({"train.micro_batch": size}) if size and needs_search(config) else config


def open_try(directory: Path, config: Config, fields: Written) -> None:
    """Open the record of a short run in a directory, with the fields of its summary."""
    store.write_record(directory, record.begin(config.resolved, directory, {}) | dict(fields))


#: Passes of a step in a try: the second accumulates gradients, and further ones need no more memory.
_PASSES = 2

#: Candidate micro-batches of a run whose global batch is not given.
_POWERS = [2**power for power in range(13)]


def layouts(training: TrainingSpec, is_free: bool = False) -> dict[int, BatchPlan]:
    """Return the possible layouts of a run by their micro-batches, in ascending order.

    Args:
        training: The run.
        is_free: Whether the global batch follows from the micro-batch. Then each replica has one pass, in a pipeline
            with at least as many micro-batches as ranks, so that no rank always idles.

    Raises:
        ConfigError: No layout is possible; with the reason for the smallest micro-batch.
    """
    strategy, dims, batch = training.strategy, training.layout.dims, training.layout.global_batch
    staged = strategy.applies("pipeline", dims)
    schedule = strategy.pipeline_schedule
    fewest = max(dims.pipeline, schedule.fewest(dims.pipeline, strategy.stages_on_rank)) if staged else 1
    if staged and isinstance(strategy.microbatches, int):
        fewest = strategy.microbatches
    free, divided = {size: dims.batch * size * fewest for size in _POWERS}, divisors(training.layout.replica_batch)
    possible = {}
    first: ConfigError | None = None
    for size, total in (free if is_free else dict.fromkeys(divided, batch)).items():
        try:
            possible[size] = strategy.layout(dims, total, size)
        except ConfigError as error:
            first = first or error
    if not possible and first:
        raise first.under("parallel")
    return possible


def held(training: TrainingSpec, possible: Mapping[int, BatchPlan], ranks: int = 1) -> dict[int, int]:
    """Return the bytes of unsharded gradients between the passes of a step of ``ranks`` ranks, by micro-batch.

    Of micro-batches of which a step has several.
    """
    model, strategy, dims = training.model, training.strategy, training.layout.dims
    of_experts, gradients = experts.parts(model, dims), 0
    for weight, shard in local_parts(model, strategy, dims).items():
        others = (dims.regroup_copies("expert") if weight in of_experts else dims.shards) - 1
        gradients += others * shard.nbytes * weight.requires_grad
    return {
        size: ranks * gradients * strategy.accumulates_whole(layout)
        for size, layout in possible.items()
        if layout.accumulation > 1
    }


def stand_in(training: TrainingSpec, layout: BatchPlan) -> BatchPlan:
    """Return the shortest step with the same memory peak, except for the samples of :func:`missing_sample_bytes`."""
    if layout.accumulation <= _PASSES:
        return layout
    batch = layout.global_batch // layout.accumulation * _PASSES
    shorter = training.strategy.layout(layout.dims, batch, layout.micro_batch)
    return shorter if shorter.microbatches == layout.microbatches else layout


def missing_sample_bytes(training: TrainingSpec, layout: BatchPlan) -> int:
    """Return the bytes of samples that the stand-in step omits: a rank holds all samples of a step from its start."""
    missing = layout.replica_batch - stand_in(training, layout).replica_batch
    return missing * sum(tensor.nbytes for tensor in tensors(training.data.example()))
