"""The workload ``collectives``: time and correctness of each collective operation at each size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist
from msgspec.structs import asdict

from ptdbench.job import Job, Outcome
from ptdbench.measure import results, timing
from ptdbench.measure.operations import DTYPES, OPERATIONS, GroupRank, unsupported, verify
from ptdbench.measure.results import CollectiveResult, Series
from ptdbench.measure.timing import Effort, median_of, summary
from ptdbench.problems import Problem, divisors, nearest, require, try_these

#: Buffers per message on a rank: input, result, expected result, and the backend's copy.
_COPIES = 4


@dataclass(frozen=True)
class Collectives(Effort):
    """Time collective operations; ``conf/workload/collectives.yaml`` describes the options."""

    ops: str | list[str] = "all"
    min_bytes: int = 8
    max_bytes: int = 2**28
    factor: int = 2
    dtypes: str | list[str] = "fp32"
    group: str | list[int] = "all"
    pipeline_size: int | Literal["auto"] = "auto"

    trains = False

    def __post_init__(self) -> None:
        """Raise ConfigError for options that are invalid on any ranks."""
        wrong = timing.problems(vars(self))
        for option, names in (("ops", OPERATIONS), ("dtypes", DTYPES)):
            wrong += _unknown(option, getattr(self, option), names)
        if isinstance(self.group, str) and self.group not in ("all", "data", "pipeline"):
            wrong.append(Problem("group", self.group, "there is no such group", _GROUPS))
        require(*wrong)

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Raise ConfigError for missing ranks and for operations that the backend does not support."""
        missing = unsupported(backend, device_type)
        requested = [] if self.ops == "all" else [name for name in missing if name in _listed(self.ops, ())]
        rule = f"{backend} does not support {', '.join(requested)} on GPU tensors"
        remedy = f"try {', '.join(name for name in OPERATIONS if name not in missing)}, or backend=nccl"
        require(
            timing.single_rank("collectives", world_size),
            Problem("workload.ops", self.ops, rule, remedy) if requested else None,
            *_group_problems(self.group, self.pipeline_size, world_size),
        )

    def __call__(self, job: Job) -> Outcome:
        """Run one rank's part."""
        return Outcome(collectives=measure(job, self))

    def series(self, without: Sequence[str] = ()) -> Iterator[Series]:
        """Yield all series to measure, except those of the operations ``without``."""
        for op in _listed(self.ops, OPERATIONS):
            for dtype in _listed(self.dtypes, DTYPES) if OPERATIONS[op].bus_factor else [None]:
                if op not in without:
                    yield Series(op, dtype, "sum" if OPERATIONS[op].reduces else None)


def measure(job: Job, options: Collectives) -> results.Collectives:
    """Run the requested measurements; called in all ranks, with the same result.

    All groups work at the same time, and the slowest rank of all counts.

    Raises:
        ArithmeticError: An operation gave a wrong result on this rank.
        ConfigError: The messages do not fit into memory.
    """
    need = _COPIES * options.max_bytes
    timing.require_memory(job.device, job.world.local_size, need, "workload.max_bytes", options.max_bytes)
    groups = groups_of(options.group, job.world.size, options.pipeline_size)
    member = _join(groups, job)
    figures = results.Collectives(
        group=options.group,
        groups=groups,
        results=[],
        left_out=unsupported(job.spec.backend, job.device.type),
    )
    for series in options.series(figures.left_out):
        figures.results += _measure_series(job, options, series, member, len(groups[0]))
    if member and member.group:
        dist.destroy_process_group(member.group)
    return figures


def groups_of(group: str | Sequence[int], world_size: int, pipeline_size: int | Literal["auto"]) -> list[list[int]]:
    """Return the ranks of each group.

    ``data`` and ``pipeline`` are the dimensions of the mesh of ``parallel=pdp`` (:class:`ptdbench.parallel.mesh.Mesh`):
    neighbors are the stages of one replica, and the ranks that hold the same stage are one data-parallel group.
    """
    if group == "all":
        return [list(range(world_size))]
    if not isinstance(group, str):
        return [sorted(group)]  # torch numbers ranks in this order
    stages = _stages(pipeline_size, world_size)
    if group == "pipeline":
        return [list(range(first, first + stages)) for first in range(0, world_size, stages)]
    return [list(range(stage, world_size, stages)) for stage in range(stages)]


def _join(groups: Sequence[Sequence[int]], job: Job) -> GroupRank | None:
    """Return this rank in its group, or ``None`` if it is in none; creating the groups is collective over all ranks."""
    world, member = job.world, None
    for ranks in groups:
        everybody = list(ranks) == list(range(world.size))
        handle = None if everybody else dist.new_group(list(ranks))
        if world.rank in ranks:
            assert not isinstance(handle, int)  # NON_GROUP_MEMBER
            member = GroupRank(handle, ranks, ranks.index(world.rank), job.device, DTYPES["fp32"])
    return member


_GROUPS = "try all, data, pipeline, or ranks as in [0,2]"


def _stages(pipeline_size: int | Literal["auto"], world_size: int) -> int:
    """Return the number of stages; ``auto`` is the smallest divisor above 1, as for ``parallel=pdp``."""
    if pipeline_size != "auto":
        return pipeline_size
    return ([*divisors(world_size), 1])[1]


def _group_problems(
    group: str | Sequence[int], pipeline_size: int | Literal["auto"], world_size: int
) -> Iterator[Problem]:
    if isinstance(group, str):
        stages = _stages(pipeline_size, world_size)
        if group != "all" and (stages < 1 or world_size % stages):
            rule = f"must divide the number of ranks, {world_size}"
            yield Problem("workload.pipeline_size", pipeline_size, rule, try_these(divisors(world_size)))
        elif group != "all" and len(groups_of(group, world_size, pipeline_size)[0]) < 2:
            rule = f"has one rank per group, with {world_size} ranks in pipelines of {stages}"
            yield Problem("workload.group", group, rule, "try all, or another workload.pipeline_size")
        return
    missing = [rank for rank in group if not isinstance(rank, int) or not 0 <= rank < world_size]
    if missing:
        rule = f"there is no rank {', '.join(str(rank) for rank in missing)}"
        yield Problem("workload.group", list(group), rule, f"the ranks are 0 to {world_size - 1}")
    if len(set(group)) < max(2, len(group)):
        yield Problem("workload.group", list(group), "must name at least two ranks, each once")


def _measure_series(
    job: Job, options: Collectives, series: Series, member: GroupRank | None, ranks: int
) -> list[CollectiveResult]:
    operation, dtype = OPERATIONS[series.op], DTYPES[series.dtype or "fp32"]
    place = member and replace(member, dtype=dtype)
    item = dtype.itemsize
    sizes = timing.sizes(options.min_bytes, options.max_bytes, options.factor)
    counts = dict.fromkeys(operation.count(size, ranks, item) for size in sizes) if series.dtype else [0]
    rows: list[CollectiveResult] = []
    for count in counts:
        job.watchdog.alive()
        size = operation.bytes(count, ranks, item)
        name = f"{series} of {size} bytes over ranks {place.ranks if place else []}"
        message = operation.prepare(place, count) if place else None
        if message and place:
            verify(message, name, place)
        seconds = timing.repeat(message.call if message else None, job.device, options)
        if message and place:
            verify(message, name, place)
        times = summary(seconds)
        rate, bus_factor = size / median_of(times), operation.bus_factor
        result = CollectiveResult(
            **asdict(series),
            bytes=size,
            ranks=ranks,
            repetitions=len(seconds),
            seconds=times,
            algbw=rate if bus_factor else None,
            busbw=rate * bus_factor(ranks) if bus_factor else None,
        )
        rows.append(result)
    return rows


def _listed(option: str | Sequence[str], everything: Iterable[str]) -> list[str]:
    if option == "all":
        return list(everything)
    return [option] if isinstance(option, str) else list(option)


def _unknown(option: str, value: str | Sequence[str], names: Iterable[str]) -> list[Problem]:
    """Return a problem for each name that is not among ``names``, or for an empty list."""
    listed, everything = _listed(value, names), ["all", *names]
    if not listed:
        return [Problem(option, value, "must name at least one", try_these(everything))]
    return [
        Problem(option, value, f"there is no {name}", try_these(nearest(str(name), names) or everything))
        for name in listed
        if name not in names
    ]
