"""``train.micro_batch=max`` and ``best``: found by short runs of all ranks in fresh processes, before the run itself.

A try is a separate run in a directory below the run's. Like any run, it may end ``oom``: its ranks end together,
whichever was out of memory, and none of them decides anything.
"""

import math
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from ptdbench.comparison import significance
from ptdbench.comparison.significance import Pool
from ptdbench.launch import local
from ptdbench.parallel.dims import BatchPlan
from ptdbench.planning.search import Search
from ptdbench.planning.tries import (
    Execute,
    held,
    layouts,
    missing_sample_bytes,
    open_try,
    stand_in,
    try_options,
)
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import failure, record, store
from ptdbench.records.ownership import Attempt
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Draft, Metrics, Try, Written
from ptdbench.report import display
from ptdbench.report.display import Heading
from ptdbench.report.remarks import reason
from ptdbench.run import ending
from ptdbench.setup import checks, run_spec
from ptdbench.setup.config import Config, Slurm
from ptdbench.setup.runs import Shape
from ptdbench.terminal import echo
from ptdbench.units import memory_text

#: Factor beyond the largest try up to which a line is trusted: resident memory is not an exact figure.
_STRIDE = 64

#: Maximum number of short runs to find the largest.
_MOST = 6

#: Statuses of a try that tell whether it fits.
_TELLING = ("ok", "oom", "diverged")

#: Maximum number of blocks to compare two micro-batches, and the largest difference of a tie.
_BLOCKS, _TIED = 10, 0.02

#: Steps before the timed ones of a run to compare micro-batches; the fewest and the most timed steps; and the seconds
#: that suffice: runs differ more than the steps within them, so that more of a slow step decide nothing sooner.
_WARMUP, _FEWEST, _STEPS, _SECONDS = 2, 3, 8, 4.0

#: Stand-in for the size of a GPU in bytes, until a try has reported it.
_UNKNOWN = 1 << 62


class Broken(RuntimeError):
    """A try failed for a reason other than memory, and so would the run."""


def find(config: Config, attempt: Attempt, heading: Heading, execute: Execute, shape: Shape | None = None) -> bool:
    """Find the micro-batch of a run, and record it with the run's layout; the ranks take both from the record.

    Args:
        config: The run's configuration.
        attempt: The start of the run, which has claimed its record.
        heading: The heading of its display.
        execute: Executes a try.
        shape: The shape of the job whose batch script searches; ``None`` if this machine executes the tries.

    Returns:
        Whether there is one; if not, the run has failed, and its record says why.

    Raises:
        Stopped: A signal asked this process to stop; the record is written.
    """

    def note(fields: Written) -> None:
        attempt.amend(lambda written: written | {"micro_batch": fields}, durable=False)

    earlier = store.read_record(attempt.directory).micro_batch.found
    try:
        finder = Finder(attempt.directory, config, heading, execute, note, shape)
        fields = (finder.reuse(earlier) if earlier else None) or finder.find()
    except (ConfigError, MemoryError, RuntimeError) as error:
        ending.fail(attempt, failure.describe(error, rank=-1))
        return False
    except local.Stopped as stop:
        ending.fail_if_open(attempt, failure.describe(stop, rank=-1))
        raise
    attempt.amend(lambda written: written | fields)
    return True


def in_step(command: Sequence[str], directory: Path) -> None:
    """Execute a run as a step of the job; if the step ends without a result, record that as the failure."""
    echo(str(display.heading(store.read_record(directory))), sys.stderr)
    status, stopped = local.attended([*command, str(directory)])
    if stopped:
        raise local.Stopped(stopped)
    written = store.load_record(directory)
    if record.is_open(written):
        cause = failure.Failure(-1, "Gone", f"its step ended with exit status {status} and without a result")
        store.write_record(directory, record.failed(written, cause))


@dataclass
class Finder:
    """The search for the micro-batch of one run; raises ConfigError for a configuration that is invalid."""

    directory: Path  #: The run's directory.
    config: Config  #: Its configuration.
    heading: Heading  #: The heading of its display.
    execute: Execute  #: Executes a try.
    note: Callable[[dict[str, Any]], None]  #: Updates the record's field ``micro_batch`` after each try.
    shape: Shape | None = None  #: Of the job whose batch script searches; ``None`` on this machine.
    _rates: dict[int, list[float]] = field(default_factory=dict)
    _step_seconds: float = 0.0  #: Of a whole step of the largest micro-batch that fits; 0 if unknown.

    def __post_init__(self) -> None:
        world, gpus = (self.shape.world, self.shape.gpus_per_node) if self.shape else (None, None)
        self._spec = run_spec.specify(self.config, world, gpus)
        if not self._spec.training:
            name, wanted = self.config.call("workload").name, self.config.train.micro_batch
            raise ConfigError([Problem("train.micro_batch", wanted, f"workload={name} does not train", "try auto")])
        self._training = self._spec.training
        self._layouts = layouts(self._training)

    def find(self) -> dict[str, Any]:
        """Find the micro-batch; return the record's fields that it determines.

        Raises:
            MemoryError: Not even the smallest fits.
            Broken: A try failed for a reason other than memory.
        """
        candidates = list(self._layouts)
        stride = 0 if self._spec.virtual else _STRIDE
        always = held(self._training, self._layouts, self._ranks_here if self._spec.device_type == "cpu" else 1)
        search = self._search = Search(candidates, self._room(None), self._tried, _MOST, stride, held=always)
        largest = search.largest()
        if largest is None:
            smallest = next(attempt for attempt in search.tries if attempt.micro_batch == candidates[0])
            needs = "" if smallest.needed_bytes is None else f": it needs {memory_text(smallest.needed_bytes)}"
            room = "a GPU" if search.room == _UNKNOWN else memory_text(search.room)
            raise MemoryError(f"not even micro-batch {candidates[0]} fits into {room}{needs}")
        if self.config.train.micro_batch == "best":
            largest = self._fastest(search.fitting())
        return self._summary(self._layouts[largest]) | {"micro_batch": self._field(largest)}

    def reuse(self, micro_batch: int) -> dict[str, Any] | None:
        """Return the fields for a micro-batch found by an earlier start, whose search is on record.

        ``None`` if these ranks cannot run it.
        """
        return self._summary(self._layouts[micro_batch]) if micro_batch in self._layouts else None

    def _field(self, micro_batch: int | None) -> dict[str, Any]:
        tried = {attempt.micro_batch: to_builtins(attempt) for attempt in self._search.tries}
        for size, rates in self._rates.items():  # under `best`; some were not tried in the search
            tried[size] = tried.get(size, to_builtins(Try(size, "ok", fits=True))) | {"rates": [*rates]}
        tries = list(tried.values())
        wanted, room = self.config.train.micro_batch, self._search.room
        return {"asked": wanted, "found": micro_batch, "room_bytes": None if room == _UNKNOWN else room, "tries": tries}

    def _summary(self, layout: BatchPlan) -> Draft:
        return {**self._spec.summary, "layout": layout.as_dict()}

    def _room(self, metrics: Metrics | None) -> int:
        """Return the bytes available to the run: of this host, or of a GPU, whose size the first try reports."""
        general, cluster = self.config.general, self.config.cluster
        if self._spec.device_type == "cpu":
            of_job = checks.in_job(cluster, self._ranks_here) if self.shape and isinstance(cluster, Slurm) else None
            host = checks.on_host(self._ranks_here, general.memory_reserve or 0.0, running=False).size
            return min(host, of_job.size) if of_job else host
        if self._spec.virtual:
            size = self._spec.virtual.gpu.memory
        else:
            size = (metrics and metrics.device_memory_bytes) or _UNKNOWN
        return size if size == _UNKNOWN else int(size * (1 - (general.memory_reserve or 0.0)))

    @property
    def _ranks_here(self) -> int:
        return self.shape.ranks_per_node if self.shape else self._spec.world_size

    def _needed(self, micro_batch: int, metrics: Metrics) -> int | None:
        """Return the bytes that a run would take: all ranks of this host together, or the GPU of the largest rank."""
        waits = missing_sample_bytes(self._training, self._layouts[micro_batch])
        if self._spec.device_type == "cpu":
            peak = metrics.peak_memory_bytes
            return None if peak is None else (peak + waits) * self._ranks_here
        waits += self._spec.nccl_bytes if self._spec.virtual else 0  # on a real GPU, outside_memory_bytes has them
        reserved = metrics.peak_reserved_bytes
        return None if reserved is None else reserved + waits + (metrics.outside_memory_bytes or 0)

    def _tried(self, micro_batch: int) -> Try:
        started = time.monotonic()
        record = self._short_run(micro_batch, try_options(self.config), "")
        if self._spec.device_type != "cpu" and not self._spec.virtual and record.metrics.device_memory_bytes:
            self._search.room = self._room(record.metrics)
        needed = None if record.status == "oom" else self._needed(micro_batch, record.metrics)
        fits = record.status != "oom" and (needed or 0) <= self._search.room
        if fits and (seconds := record.step_seconds.median):  # the last try that fits is of the largest
            layout = self._layouts[micro_batch]
            self._step_seconds = seconds * layout.accumulation / stand_in(self._training, layout).accumulation
        tried = Try(micro_batch, record.status, needed, fits, time.monotonic() - started)
        so_far = self._field(None)
        self.note(so_far | {"tries": [*so_far["tries"], to_builtins(tried)]})
        return tried

    def _short_run(self, micro_batch: int, options: dict[str, Any], what: str, is_whole: bool = False) -> RunRecord:
        """Return the record of a short run, with whole steps if ``is_whole``, otherwise with shorter stand-ins."""
        layout = self._layouts[micro_batch]
        layout = layout if is_whole else stand_in(self._training, layout)
        tries = self.directory / store.TRIES
        tries.mkdir(exist_ok=True)
        directory = tries / f"{len([*tries.iterdir()]) + 1}_micro_batch_{micro_batch}"  # earlier starts left some, too
        directory.mkdir()
        size = {"train.micro_batch": micro_batch, "train.global_batch": layout.global_batch}
        config = self.config.changed({**options, **size})
        heading = replace(self.heading, title=f"{self.heading.title} · trying micro-batch {micro_batch}{what}")
        open_try(directory, config, self._summary(layout))
        with display.headed(heading):
            self.execute(directory)
        record = store.read_record(directory)
        is_told = record.status != "oom" or not self._spec.virtual or failure.is_of_gpu(record.error)
        if record.status not in _TELLING or not is_told:  # with virtual GPUs, host memory may have run out instead
            raise Broken(f"the trial run of micro-batch {micro_batch} ended without a result: {reason(record)}")
        return record

    def _fastest(self, fitting: list[int]) -> int:
        """Return the fastest: going down from the largest, stop at the first that the next smaller one does not beat.

        The two run alternately, until the smaller one is known to be faster, or to be no more than a tie faster, by the
        statistics of ``repeat=auto``. If neither is known after the last block, the larger one is kept.
        """
        best, *smaller = reversed(fitting)
        for other in smaller:
            if not self._is_slower(best, other):
                break
            best = other
        return best

    def _is_slower(self, best: int, other: int) -> bool:
        """Return whether the larger one is known to be slower than the next smaller one.

        Both intervals are one-sided. Only that of the slower one is widened for several looks: to keep the larger one
        too early costs a little speed, but is no false statement.
        """
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
            assert apart  # with at least three runs of each
            is_slower = significance.compare(apart, 2 * level).high < 1
            if is_slower or 1 / significance.compare(apart, 2 * significance.LEVEL).low <= 1 + _TIED:
                return is_slower
        return False

    def _rate(self, size: int, what: str) -> float | None:
        """Return the samples per second of a short run; ``None`` if it was out of memory."""
        enough = math.ceil(_SECONDS / self._step_seconds) if self._step_seconds else _STEPS
        timed = min(max(enough, _FEWEST), _STEPS)
        options = try_options(self.config, _WARMUP + timed)
        options["train.warmup_steps"] = options["train.steps"] - timed  # those fp16 may skip come first; half at most
        record = self._short_run(size, options, what, is_whole=True)
        if record.status == "oom":
            return None
        rate = record.metrics.samples_per_second
        if not rate:
            raise Broken(f"the trial run of micro-batch {size} has no throughput; try train.micro_batch=max")
        return rate
