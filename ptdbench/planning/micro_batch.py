"""``train.micro_batch=max`` and ``best``: found by short runs of all ranks in fresh processes, before the run itself.

A try is a run in a directory of its own below the run's, which may end ``oom`` as any run may: its ranks end together,
whoever of them was out of memory, and none of them decides anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ptdbench.comparison import significance
from ptdbench.comparison.variation import Pool
from ptdbench.launch.slurm import JobSteps
from ptdbench.parallel.batch import BatchPlan
from ptdbench.parallel.dims import divisors
from ptdbench.planning.search import Search, Try
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import failure, schema, store
from ptdbench.records.schema import Metrics, MicroBatch, part
from ptdbench.report.display import Heading
from ptdbench.report.remarks import reason
from ptdbench.setup import checks, run_spec
from ptdbench.setup.config import Config, Slurm
from ptdbench.setup.run_spec import RunSpec, Summary
from ptdbench.setup.training_spec import TrainingSpec
from ptdbench.units import gib_text

#: Carries out the run of a directory.
CarryOut = Callable[[Path, Config, Summary, Heading], None]

#: How far a line is trusted beyond the largest try: resident memory is no exact figure.
_STRIDE = 64

#: Short runs at most to find the largest.
_MOST = 6

#: What is asked for instead of a number.
SOUGHT = ("max", "best")

#: Endings of a try that tell whether it fits.
_TELLING = ("ok", "oom", "diverged")

#: Blocks of the largest and the next smaller one at most, the steps of a run in them, and what counts as a tie.
_BLOCKS, _STEPS, _TIED = 12, 10, 0.02

#: What a try leaves out of a run.
_SHORT = {
    "train.warmup_steps": 0,
    "train.max_minutes": None,
    "eval.every": None,
    "checkpoint.every_steps": None,
    "profile.steps": 0,
    "objective": "throughput",
    "profile.trace": False,
    "resume": None,
    "check": False,
    "logger": {"name": "none", "_target_": "ptdbench.report.loggers.none"},
}


def of_try(config: Config, steps: int = 3) -> dict[str, Any]:
    """The options that make a try of a run; its optimizer's state is there from the second step on."""
    found: dict[str, Any] = _SHORT | {"train.steps": steps}
    if isinstance(config.cluster, Slurm):
        found["cluster.requeue"] = False  # it makes no checkpoint to go on after
    if config.call("parallel").options.get("gradients") == "powersgd":
        # Two steps at least are averaged as they are, and what the third one leaves out is in memory in the fourth.
        found |= {"parallel.powersgd_start": 2, "train.steps": max(steps, 4)}
    if config.resolved.get("precision") == "fp16" and not config.resolved.get("virtual"):
        # A step that overflows is skipped, and makes no state: the loss scale is 2**16 at first, and half after each.
        found["train.steps"] += 16
    return found


def is_sought(config: Config) -> bool:
    """Whether the micro-batch is to be found."""
    train = config.resolved.get("train")
    return isinstance(train, dict) and train.get("micro_batch") in SOUGHT


def as_found(config: Config, record: Mapping[str, Any] | None) -> Config:
    """The configuration of a run with the micro-batch that has been found for it before its ranks were started."""
    found = part(record or {}, MicroBatch).found
    return config.changed({"train.micro_batch": found}) if found and is_sought(config) else config


#: Bytes of a GPU, until a try has told them.
_UNKNOWN = 1 << 62


class Broken(RuntimeError):
    """A try failed for another reason than memory, and so would the run."""


@dataclass(frozen=True)
class Found:
    """What was found."""

    config: Config  #: That of the run, with the micro-batch.
    summary: Summary  #: That of the run, with its layout.
    field: dict[str, Any]  #: The record's field ``micro_batch``.


@dataclass
class Finder:
    """The search of one run."""

    directory: Path  #: The run's directory.
    config: Config  #: Its configuration.
    heading: Heading  #: What it is called.
    carry_out: CarryOut  #: Carries a try out.
    note: Callable[[dict[str, Any]], None]  #: Adds the record's field ``micro_batch`` after each try.
    #: Of the job whose script searches; ``None`` where the ranks are started on this machine.
    steps: JobSteps | None = None
    _rates: dict[int, list[float]] = field(default_factory=dict)

    def find(self) -> Found:
        """Find the micro-batch.

        Raises:
            ConfigError: There is no such run.
            MemoryError: Not even the smallest fits.
            Broken: See there.
        """
        self._spec = self._specify()
        if not self._spec.training:
            name, asked = self.config.call("workload").name, self.config.train.micro_batch
            raise ConfigError([Problem("train.micro_batch", asked, f"workload={name} does not train", "try auto")])
        self._layouts = layouts(self._spec.training)
        candidates = list(self._layouts)
        search = self._search = Search(candidates, self._room(None), self._tried, most=_MOST, stride=_STRIDE)
        largest = search.largest()
        if largest is None:
            smallest = next(one for one in search.tries if one.micro_batch == candidates[0])
            needs = "" if smallest.needed_bytes is None else f": it needs {gib_text(smallest.needed_bytes)}"
            room = "a GPU" if search.room == _UNKNOWN else gib_text(search.room)
            raise MemoryError(f"not even micro-batch {candidates[0]} fits into {room}{needs}")
        if self.config.train.micro_batch == "best":
            largest = self._fastest([one for one in candidates if one <= largest])
        return self._with(largest)

    def given(self, micro_batch: int) -> Found | None:
        """The same of a micro-batch that an earlier start of the run has found; ``None`` if these ranks have it not."""
        self._spec, self._search = self._specify(), Search([micro_batch], 0, self._tried)
        assert self._spec.training
        self._layouts = layouts(self._spec.training)
        return self._with(micro_batch) if micro_batch in self._layouts else None

    def _specify(self) -> RunSpec:
        if self.steps is None:
            return run_spec.specify(self.config, None)
        return run_spec.specify(self.config, self.steps.world, self.steps.gpus)

    def _with(self, micro_batch: int) -> Found:
        config = self.config.changed({"train.micro_batch": micro_batch})
        return Found(config, self._summary(self._layouts[micro_batch]), self._field(micro_batch))

    def _field(self, found: int | None) -> dict[str, Any]:
        tried = {one["micro_batch"]: one | {"rates": None} for one in self._search.as_dicts()}
        for size, rates in self._rates.items():  # of best, some of which nobody had to try before
            known = {"micro_batch": size, "status": "ok", "needed_bytes": None, "fits": True, "seconds": None}
            tried[size] = tried.get(size, known) | {"rates": [*rates]}
        tries = list(tried.values())
        asked, room = self.config.train.micro_batch, self._search.room
        return {"asked": asked, "found": found, "room_bytes": None if room == _UNKNOWN else room, "tries": tries}

    def _summary(self, layout: BatchPlan) -> Summary:
        known = self._spec.summary
        return replace(known, fields={**known.fields, "layout": layout.as_dict()})

    def _room(self, metrics: Metrics | None) -> int:
        """Bytes that the run may take: of this host on its ranks, or of a GPU, whose size the first try tells."""
        general, cluster = self.config.general, self.config.cluster
        if self._spec.device_type == "cpu":
            of_job = checks.in_job(cluster, self._ranks_here) if self.steps and isinstance(cluster, Slurm) else None
            here = checks.on_host(self._ranks_here, general.memory_reserve or 0.0, running=False).size
            return min(here, of_job.size) if of_job else here
        if self._spec.virtual:
            size = self._spec.virtual.gpu.memory
        else:
            size = (metrics and metrics.device_memory_bytes) or _UNKNOWN
        return size if size == _UNKNOWN else int(size * (1 - (general.memory_reserve or 0.0)))

    @property
    def _ranks_here(self) -> int:
        return self.steps.world.local_size if self.steps else self._spec.world_size

    def _needed(self, micro_batch: int, record: dict[str, Any]) -> int | None:
        """Bytes that a run would take: of the ranks of this host, or of the GPU of the rank that takes most."""
        assert self._spec.training
        metrics, waits = part(record, Metrics), waiting(self._spec.training, self._layouts[micro_batch])
        if self._spec.device_type == "cpu":
            peak = metrics.peak_memory_bytes
            return None if peak is None else (peak + waits) * self._ranks_here
        waits += self._spec.nccl_bytes if self._spec.virtual else 0  # which a real GPU has beside torch's allocator
        reserved = metrics.peak_reserved_bytes
        return None if reserved is None else reserved + waits + (metrics.outside_memory_bytes or 0)

    def _tried(self, micro_batch: int) -> Try:
        """One short run."""
        started = time.monotonic()
        record = self._carried_out(micro_batch, of_try(self.config), "")
        if self._spec.device_type != "cpu" and not self._spec.virtual and record.get("metrics"):
            self._search.room = self._room(part(record, Metrics))
        needed = None if record["status"] == "oom" else self._needed(micro_batch, record)
        fits = record["status"] != "oom" and (needed or 0) <= self._search.room
        found = Try(micro_batch, record["status"], needed, fits, time.monotonic() - started)
        so_far = self._field(None)
        self.note(so_far | {"tries": [*so_far["tries"], {**vars(found), "rates": None}]})
        return found

    def _carried_out(
        self, micro_batch: int, options: dict[str, Any], what: str, is_whole: bool = False
    ) -> dict[str, Any]:
        """The record of a short run; of whole steps, or of such as stand for them."""
        assert self._spec.training
        layout = self._layouts[micro_batch]
        layout = layout if is_whole else stand_in(self._spec.training, layout)
        tries = self.directory / store.TRIES
        tries.mkdir(exist_ok=True)
        directory = tries / f"{len([*tries.iterdir()]) + 1}_micro_batch_{micro_batch}"  # beside those of earlier starts
        directory.mkdir()
        size = {"train.micro_batch": micro_batch, "train.global_batch": layout.global_batch}
        config = self.config.changed({**options, **size})
        heading = replace(self.heading, title=f"{self.heading.title} · trying micro-batch {micro_batch}{what}")
        self.carry_out(directory, config, self._summary(layout), heading)
        record = store.load_record(directory)
        is_told = record["status"] != "oom" or not self._spec.virtual or failure.is_of_gpu(schema.error(record))
        if record["status"] not in _TELLING or not is_told:  # the memory of virtual GPUs is not this machine's
            raise Broken(f"the try of micro-batch {micro_batch} came to no result: {reason(record)}")
        return record

    def _fastest(self, fitting: list[int]) -> int:
        """The fastest, from the largest downward: the first that the next smaller one is known not to beat.

        Both are carried out in turns. A pair is settled when it is known to differ, or to be tied, by the statistics of
        ``repeat=auto``; a pair that is not settled after the last block counts as tied, and of a tie the larger one is
        kept.
        """
        best, *smaller = reversed(fitting)
        for other in smaller:
            if not self._is_slower(best, other):
                break
            best = other
        return best

    def _is_slower(self, best: int, other: int) -> bool:
        """Whether the larger one is known to be slower than the next smaller one."""
        level, looks = significance.level_of_look(_BLOCKS), significance.interim_looks(_BLOCKS)
        pair: dict[int, dict[Hashable, float]] = {best: {}, other: {}}
        for block in range(1, _BLOCKS + 1):
            for size in (best, other) if block % 2 else (other, best):
                rate = self._rate(size, f" ({block})")
                if rate is None:  # out of memory after all
                    return size == best
                pair[size][block] = rate
                self._rates.setdefault(size, []).append(rate)
            self.note(self._field(None))
            if block not in looks:
                continue
            apart = Pool([pair[best], pair[other]]).difference(pair[best], pair[other])
            (sign,) = significance.differing([apart], level)
            if sign:
                return sign < 0
            if apart:
                known = significance.compare(apart, level)
                if max(known.high, 1 / known.low) <= 1 + _TIED:
                    return False
        return False

    def _rate(self, size: int, what: str) -> float | None:
        """Samples a second of a short run; ``None`` if it was out of memory.

        Raises:
            Broken: It has no times.
        """
        options = of_try(self.config, _STEPS) | {"train.warmup_steps": 2}
        record = self._carried_out(size, options, what, is_whole=True)
        if record["status"] == "oom":
            return None
        rate = part(record, Metrics).samples_per_second
        if not rate:
            raise Broken(f"the try of micro-batch {size} has no throughput; train.micro_batch=max needs none")
        return rate


#: Passes of a step that are carried out: from the second one on gradients are accumulated, and none needs more.
_PASSES = 2

#: Micro-batches of a run whose global batch is not given.
_POWERS = [2**power for power in range(13)]


def layouts(training: TrainingSpec, is_free: bool = False) -> dict[int, BatchPlan]:
    """The layouts of a run by their micro-batches, in ascending order.

    Args:
        training: The run.
        is_free: Whether the global batch follows from the micro-batch, so that a replica has one pass, of a pipeline
            with at least as many micro-batches as ranks: with fewer, some of them would always idle.

    Raises:
        ConfigError: There is none; why not of the smallest.
    """
    strategy, dims, batch = training.strategy, training.layout.dims, training.layout.global_batch
    staged = strategy.applies("pipeline", dims)
    schedule = strategy.pipeline_schedule
    fewest = max(dims.pipeline, schedule.fewest(dims.pipeline, strategy.stages_on_rank)) if staged else 1
    if staged and isinstance(strategy.microbatches, int):
        fewest = strategy.microbatches
    free, given = {size: dims.batch * size * fewest for size in _POWERS}, divisors(training.layout.replica_batch)
    found = {}
    first: ConfigError | None = None
    for size, total in (free if is_free else dict.fromkeys(given, batch)).items():
        try:
            found[size] = strategy.layout(dims, total, size)
        except ConfigError as error:
            first = first or error
    if not found and first:
        raise first.under("parallel")
    return found


def stand_in(training: TrainingSpec, layout: BatchPlan) -> BatchPlan:
    """A step with no more passes than it takes to see the peak of this one without its :func:`waiting` samples."""
    if layout.accumulation <= _PASSES:
        return layout
    batch = layout.global_batch // layout.accumulation * _PASSES
    shorter = training.strategy.layout(layout.dims, batch, layout.micro_batch)
    return shorter if shorter.microbatches == layout.microbatches else layout


def waiting(training: TrainingSpec, layout: BatchPlan) -> int:
    """Bytes of a replica's samples that the step in its place lacks: a rank has all of a step's from its start on."""
    missing = layout.replica_batch - stand_in(training, layout).replica_batch
    return missing * sum(one.nbytes for one in training.data.example())
