"""The memory that a run will need, and the largest micro-batch that fits, by running it on virtual GPUs."""

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import convert, structs

from ptdbench.files import strict
from ptdbench.launch import settings
from ptdbench.measure.hardware import tf32_allowed
from ptdbench.measure.memory import host_memory
from ptdbench.parallel.dims import BatchPlan, Dims
from ptdbench.parallel.footprint import StateBytes
from ptdbench.parallel.precision import arithmetic
from ptdbench.planning import recordings, step_time
from ptdbench.planning.classes import classes, merged
from ptdbench.planning.recordings import Recording
from ptdbench.planning.search import Search
from ptdbench.planning.tries import (
    Execute,
    held,
    layouts,
    missing_sample_bytes,
    needs_search,
    open_try,
    stand_in,
    try_options,
)
from ptdbench.prediction import log
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records import failure, schema, store
from ptdbench.records.schema import Plan, Predicted, Record, Try
from ptdbench.report.display import Heading, headed
from ptdbench.setup import checks, run_spec
from ptdbench.setup.config import Config
from ptdbench.setup.run_spec import RunSpec
from ptdbench.setup.training_spec import Flops
from ptdbench.units import memory_text
from ptdbench.virtual.watch import LOGS

#: Allocatable bytes while needs are determined, so that a run that does not fit still reports its need.
_ROOMY = 1 << 40

#: A global batch that every layout can split, to determine degrees if no batch is given.
_ANY_BATCH = 2**10 * 3**2 * 5 * 7

#: Tries before a line proposes, as multiples of the smallest: here even a try that does not fit reports its need.
_POINTS = (8, 32)

#: Sources of the figures for memory outside torch's allocator.
_SOURCES = {
    "CUDA context": "estimate of conf/virtual; drivers differ",
    "NCCL": "estimate from NCCL's documented buffer sizes",
    "samples": "exact: the samples of the passes of a step that were not run",
}

#: Fields of a virtual run's record that its plan has too.
_OF_RUN = ("environment", "virtual", "memory", "metrics", "parameters", "tokens_per_sample", "world_size")


class Failed(Exception):
    """A run on virtual GPUs that failed for a reason other than GPU memory."""

    def __init__(self, record: schema.Written) -> None:
        super().__init__(schema.error(record).message)
        self.record = record  #: The record of that run.


@dataclass(frozen=True)
class PlanRequest:
    """A configuration to plan for."""

    config: Config  #: The configuration.
    is_free: bool  #: Whether no global batch was given, which would limit ``train.micro_batch=max``.
    title: str  #: Its title in the display.
    execute: Execute  #: :func:`ptdbench.run.door.run`.
    cores: int = 1  #: Number of ranks to run at once.
    key: Mapping[str, Any] | None = None  #: Code and environment, for recordings; ``None``: none is cached.
    again: bool = False  #: Ignore cached recordings.

    @property
    def sets_batch(self) -> bool:
        """Whether the global batch follows from the micro-batch."""
        return self.is_free and needs_search(self.config)


def plan(request: PlanRequest) -> schema.Draft:
    """Return the record fields of a plan, in JSON types.

    Raises:
        ConfigError: The run's configuration is invalid.
        Failed: The run fails on virtual GPUs for a reason other than their memory.
    """
    name = request.config.call("workload").name
    require(None if name == "train" else Problem("workload", name, "only training can be planned", "omit it"))
    short = request.config.changed(try_options(request.config, 2) | {"memory_reserve": None})
    spec = run_spec.specify(_with_any_batch(short) if request.sets_batch else short, None)
    assert spec.training
    if (obstacle := _obstacle(short, spec)) is not None:
        return strict(_state_only(request, spec, obstacle))
    return strict(_Virtual(request, short, spec).fields())


def _with_any_batch(config: Config) -> Config:
    """Return the configuration with a global batch that its ranks and micro-batches divide, to find the degrees."""
    options = config.call("parallel").options
    degrees = (options.get(name) for name in (*Dims.rows(), "microbatches"))
    counts = (config.cluster.nodes, config.cluster.ranks_per_node, *degrees)
    positive = (count for count in counts if isinstance(count, int) and count > 0)
    return config.changed({"train.global_batch": math.prod([_ANY_BATCH, *positive])})


def _obstacle(config: Config, spec: RunSpec) -> str | None:
    """Return why the run cannot be executed on virtual GPUs here; ``None`` if it can."""
    assert spec.training
    if spec.virtual is None:
        return "the rest needs virtual GPUs, such as virtual=h100"
    try:
        run_spec.place(config, spec.world_size)
    except ConfigError as error:
        return str(error)
    if not spec.is_on_host:
        return None
    needed, available = max(state.total for state in spec.training.footprints()), host_memory().available
    if needed <= available:
        return None
    offload = f"offload={spec.config.general.offload} keeps {memory_text(needed)} per rank in host memory"
    return f"{offload}, but this machine has {memory_text(available)} to run one"


def _state_only(request: PlanRequest, spec: RunSpec, reason: str) -> dict[str, object]:
    training = spec.training
    assert training
    layout = next(iter(layouts(training, is_free=True).values())) if request.sets_batch else training.layout
    reserve = request.config.general.memory_reserve or 0.0
    room = run_spec.memory(spec, reserve, spec.world_size, 0, running=False)
    state = training.footprints()
    stages = [training.layout.dims.stage(rank) for rank in range(min(room.ranks, spec.world_size))]
    needs = sum(state[stage].total for stage in stages) if room.ranks > 1 else max(of_rank.total for of_rank in state)
    planned = Plan(state=_recorded(state), needed_bytes=needs, reason=reason)
    shortfall = ""
    if not (spec.virtual and spec.is_on_host):  # the memory of these GPUs' hosts is unknown
        planned.capacity_bytes, planned.capacity_of, planned.room_bytes = room.size, room.origin, room.size
        if needs > room.size:
            planned.fits = False
            shortfall = f"weights, gradients and optimizer state take {memory_text(needs)}, but {room.owner} has "
            shortfall += f"{memory_text(room.size)}; {checks.remedy(training, room)}"
    return {**spec.summary, **_as_planned(layout, planned, shortfall)}


def _recorded(state: Sequence[StateBytes]) -> list[schema.Footprint]:
    return [schema.Footprint(of_rank.weights, of_rank.gradients, of_rank.optimizer) for of_rank in state]


def _as_planned(layout: BatchPlan, planned: Plan, shortfall: str) -> dict[str, object]:
    """Return the fields of every plan; ``shortfall``: why it does not fit, or empty if it does."""
    fields = {"layout": layout.as_dict(), "global_batch": layout.global_batch, "kind": "planned", "plan": planned}
    if not shortfall:
        return fields | {"status": "ok", "error": None}
    return fields | {"status": "oom", "error": schema.NO_ERROR | {"type": "DoesNotFit", "message": shortfall}}


class _Virtual:
    """A run that is planned on virtual GPUs."""

    def __init__(self, request: PlanRequest, short: Config, spec: RunSpec) -> None:
        assert spec.training and spec.virtual  # noqa: PT018 - one fact
        self._request, self._short, self._spec = request, short, spec
        self._training, self._gpu = spec.training, spec.virtual.gpu
        self._reserve = request.config.general.memory_reserve or 0.0
        self._classes = dict.fromkeys(spec.virtual.ranks, 1) if spec.virtual.ranks else classes(spec.training)
        self._room = int(self._gpu.memory * (1 - self._reserve))
        self._state = spec.training.footprints()  # before anything runs, as this raises for some optimizers
        self._on_gpu = 0 if spec.is_on_host else max(state.total for state in self._state)
        self._outside = {"CUDA context": self._gpu.context} | ({"NCCL": spec.nccl_bytes} if spec.nccl_bytes else {})
        self._layouts = layouts(spec.training, is_free=request.sets_batch)
        self._held = held(spec.training, self._layouts)
        self._records: dict[int, Record] = {}
        self._allocatable: dict[int, int] = {}  # the bytes that a record's run could allocate
        stages = {spec.training.layout.dims.stage(rank) for rank in self._classes}
        nodes = spec.config.cluster.nodes
        self._no_time = step_time.obstacle(self._gpu, 1 if nodes == "auto" else nodes)
        if spec.training.layout.dims.pipeline > len(stages):
            self._no_time = self._no_time or "not all stages of the pipeline ran"
        self._logs: Sequence[log.Log] = []  # of the last profiled run

    def fields(self) -> dict[str, object]:
        """Run the requested micro-batch, or one that fits, and search for the largest."""
        candidates, attempt = list(self._layouts), partial(self._tried, profiled=False)
        search = Search(candidates, self._room, attempt, points=_POINTS, held=self._held)
        if needs_search(self._request.config):
            shown = search.largest() or candidates[0]
        else:
            shown = self._training.layout.micro_batch
            search.tries.append(self._tried(shown, profiled=True))
            search.largest()
        if self._records[shown].virtual and not self._records[shown].memory:
            self._records[shown] = self._run(shown, self._allocatable[shown], profiled=True)
        return self._planned(shown, search)

    def _tried(self, micro_batch: int, profiled: bool) -> Try:
        """Run a micro-batch with ample memory; if it is still unclear whether it fits, again with the real limit."""
        started = time.monotonic()
        self._allocatable[micro_batch] = roomy = max(self._room, _ROOMY)
        self._records[micro_batch] = record = self._run(micro_batch, roomy, profiled)
        if not (account := record.virtual):
            return Try(micro_batch, "oom", None, False, time.monotonic() - started)
        allocated = self._most(micro_batch, account.allocated_bytes)
        needed = self._most(micro_batch, account.reserved_bytes)
        fits = needed <= self._room
        if not fits and allocated <= self._room:  # torch frees its cache before it reports out of memory
            outside = sum(self._outside_allocator(micro_batch).values()) - self._gpu.context  # which the GPU counts
            limited = self._run(micro_batch, self._room - outside, profiled)
            if fits := limited.virtual is not None:
                self._allocatable[micro_batch] = self._room - outside
                self._records[micro_batch], needed = limited, self._most(micro_batch, limited.virtual.reserved_bytes)
        return Try(micro_batch, "ok" if fits else "oom", needed, fits, time.monotonic() - started)

    def _most(self, micro_batch: int, of_ranks: Sequence[int] | None) -> int:
        return max(of_ranks or (0,)) + sum(self._outside_allocator(micro_batch).values())

    def _outside_allocator(self, micro_batch: int) -> dict[str, int]:
        """Return the bytes outside torch's allocator, and of samples missing from the stand-in step."""
        samples = missing_sample_bytes(self._training, self._layouts[micro_batch])
        return self._outside | ({"samples": samples} if samples else {})

    def _run(self, micro_batch: int, allocatable: int, profiled: bool) -> Record:
        """Return the record of one micro-batch, run on a rank of each class, as many at once as there are cores.

        It has no account of virtual GPUs if they were out of memory.
        """
        step = stand_in(self._training, self._layouts[micro_batch])
        options = {
            "train.micro_batch": micro_batch,
            "train.global_batch": step.global_batch,
            "profile.steps": int(profiled),
            "virtual.gpu.allocatable": allocatable,
        }
        config, is_logged = self._short.changed(options), profiled and self._no_time is None
        key = None
        if self._request.key:
            memory = recordings.visible_memory(self._training, micro_batch, self._gpu)
            more = {"ranks": list(self._classes), "is_logged": is_logged}
            gpu = replace(self._gpu, allocatable=allocatable)
            key = recordings.key(self._request.key, config.resolved, gpu, memory, **more)
        recording = recordings.look_up(key) if key and not self._request.again else None
        if recording is None:
            recording = self._recorded(config, step, is_logged)
            if key:
                recordings.keep(key, recording)
        self._logs = recording.logs or self._logs
        assert self._spec.virtual
        return recording.on(self._spec.virtual)

    def _recorded(self, config: Config, step: BatchPlan, is_logged: bool) -> Recording:
        """Run a configuration on a rank of each class, as many at once as there are cores."""
        ranks, records, logs = list(self._classes), list[Record](), list[log.Log]()
        # The profiler's events of a large model take half a gigabyte.
        cores = 1 if config.profile.steps else self._request.cores
        for start in range(0, len(ranks), cores):
            group = config.changed({"virtual.ranks": ranks[start : start + cores]})
            fields = {**self._spec.summary, "layout": step.as_dict()}
            with tempfile.TemporaryDirectory(prefix="ptdbench-plan-") as folder:
                open_try(Path(folder), group, fields)
                title = headed(Heading(f"{self._request.title} · micro-batch {step.micro_batch}"))
                with title, settings.added({LOGS: f"{folder}/logs"} if is_logged else {}):
                    self._request.execute(Path(folder))
                written = store.load_record(Path(folder))
                logs += [of_rank.last() for of_rank in log.read(Path(folder, "logs"))]
            is_out_of_memory = written["status"] == "oom" and failure.is_of_gpu(schema.error(written))
            if written["status"] != "ok" and not is_out_of_memory:
                raise Failed(written)
            records.append(convert(written, Record))
            if is_out_of_memory:
                return Recording(structs.replace(records[-1], virtual=None), [])
        return Recording(merged(records, self._classes), logs)

    def _planned(self, shown: int, search: Search) -> dict[str, object]:
        """Return the fields of a plan; its micro-batch was run, unless it exceeds even the roomy limit."""
        record, layout, outside = self._records[shown], self._layouts[shown], self._outside_allocator(shown)
        planned = Plan(
            capacity_bytes=self._gpu.memory,
            capacity_of=f"virtual {self._gpu.name}",
            room_bytes=self._room,
            state=_recorded(self._state),
            outside=outside,
            sources={name: _SOURCES[name] for name in outside},
            largest_micro_batch=search.best or 0,
            tries=search.tries,
            fits=next((attempt.fits for attempt in reversed(search.tries) if attempt.micro_batch == shown), False),
        )
        fields: Mapping[str, object] = self._spec.summary
        if (account := record.virtual) and account.ranks and account.allocated_bytes and account.reserved_bytes:
            most = account.reserved_bytes.index(max(account.reserved_bytes))
            planned.rank = account.ranks[most]
            planned.stands_for = [self._classes[rank] for rank in account.ranks]
            planned.allocated_bytes = account.allocated_bytes[most]
            planned.reserved_bytes = account.reserved_bytes[most]
            planned.needed_bytes = self._most(shown, account.reserved_bytes)
            planned.accumulation = stand_in(self._training, layout).accumulation
            fields = {name: getattr(record, name) for name in _OF_RUN}
        elif sum(attempt.needed_bytes is not None for attempt in search.tries) > 1:
            planned.needed_bytes = int(search.predicted(shown))
        shortfall = "" if planned.fits else self._shortfall(shown, planned.needed_bytes, search)
        timed = {"predicted": self._predicted(layout)} if planned.fits else {}
        return {**fields, **_as_planned(layout, planned, shortfall), **timed}

    def _predicted(self, layout: BatchPlan) -> Predicted:
        """Return the step of the last run that was profiled, with the passes of a layout."""
        if self._no_time or not self._logs:
            return Predicted(reason=self._no_time or "no log was written")
        is_whole = stand_in(self._training, layout) == layout
        step = step_time.predicted(self._logs, self._gpu, None if is_whole else layout.accumulation)
        return self._rated(step, layout.global_batch) if step.step_seconds else step

    def _rated(self, step: Predicted, batch: int) -> Predicted:
        """Return a predicted step of a global batch with its throughput and MFU."""
        rate, tokens = batch / (step.step_seconds or math.inf), self._training.data.tokens_per_sample
        flops = Flops.of(self._training.model).per_sample
        precision = self._spec.config.general.precision
        with tf32_allowed(precision == "tf32"):  # as in ranks, of which this process is none
            peak = self._gpu.peaks.get(arithmetic(precision, "cuda"))
        mfu = rate * flops / self._spec.world_size / peak if flops and peak else None
        tokens_per_second = rate * tokens if tokens else None
        return structs.replace(step, samples_per_second=rate, tokens_per_second=tokens_per_second, mfu=mfu)

    def _shortfall(self, shown: int, needed: int | None, search: Search) -> str:
        """Return the message about what does not fit, and what would."""
        left = f"memory_reserve={self._reserve:g} leaves {memory_text(self._room)}"
        has = f"a GPU has {memory_text(self._gpu.memory)}, and {left}"
        needs = memory_text(needed) if needed else f"more than {memory_text(self._gpu.memory // 8 * 9)}"
        rule = f"micro-batch {shown} needs {needs}, but {has}"
        if search.best:
            return f"{rule}; train.micro_batch={search.best} fits"
        state = f": {memory_text(self._on_gpu)} are weights, gradients and optimizer state" if self._on_gpu else ""
        savings = ", ".join(self._savings())
        return f"{rule}; none fits{state}" + (f"; try {savings}" if savings else "")

    def _savings(self) -> Iterator[str]:
        """Yield options that reduce memory, if no micro-batch fits."""
        config, strategy, smallest = self._request.config, self._training.strategy, next(iter(self._layouts.values()))
        if (dims := smallest.dims).replicate * dims.shard == dims.world_size and dims.replicate > 1:
            yield "parallel=fsdp"
        elif strategy.shards(dims):
            yield "more cluster.nodes"
        if strategy.accumulates_whole(smallest):
            yield "parallel.reduce_scatter_each_microbatch=true"
        if config.call("activations").name == "keep":
            yield "activations=recompute"
        if config.general.precision == "fp32":
            yield "precision=bf16"
        if self._training.model.roles():
            yield "parallel.tensor or parallel.context"
