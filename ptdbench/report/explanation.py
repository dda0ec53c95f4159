"""The output of ``ptdbench explain``: where time and memory of a step went, and why one run is faster than another."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from ptdbench.comparison import ranking
from ptdbench.comparison.ranking import Alternative, Standing, of_sweeps
from ptdbench.profiling.phases import KINDS, PHASES
from ptdbench.records.load import is_run, read
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Communication
from ptdbench.report import labels, virtual
from ptdbench.report.steps import (
    against_first,
    behind_first,
    by_work,
    compare_steps,
    compute_seconds,
    operation_name,
    rank_name,
    recorded_step,
    shares_of_step,
    step_remarks,
    why_no_phases,
)
from ptdbench.report.text import decimals, difference, drawn, figure_text, range_text, wrap
from ptdbench.terminal import plural
from ptdbench.units import three_digits


def explain(directories: Sequence[Path], width: int) -> str:
    """Explain the runs of directories, each run once, side by side; a single run by its ranks.

    Raises:
        FileNotFoundError: There is nothing to explain; the message has a line for each reason.
    """
    unique = {Path(run.directory).resolve(): run for directory in directories for run in read(directory)}
    runs = list(unique.values())
    imitated = [run for run in runs if virtual.has_figures(run)]  # on virtual GPUs, without times
    others = [run for run in runs if not virtual.has_figures(run)]
    reasons = [f"{run.directory}: {reason}" for run in others if (reason := why_no_phases(run))]
    if not imitated and len(reasons) == len(others):
        raise FileNotFoundError("\n".join(reasons))
    if len(runs) == 1 and is_run(directories[0]):
        blocks = [_by_rank(run, width) for run in others]
    else:
        measured = of_sweeps(run for run in others if run.model and not run.kind)
        blocks = [block for places in ranking.of_models(measured) for block in _of_model(places, width)]
    blocks += [virtual.explained(run, name, width) for run, name in zip(imitated, labels.names(imitated), strict=True)]
    return "\n\n".join([*blocks, *(["\n".join(reasons)] if reasons else [])])


def _of_model(places: Sequence[Standing], width: int) -> list[str]:
    """Explain the alternatives, separately for each work that they did, using their runs with phases."""
    is_known = any(place.against_best for place in places)
    phased = [
        replace(place, alternative=Alternative(kept, {}))
        for place in places
        if (kept := [run for run in place.alternative.runs if not why_no_phases(run)])
    ]
    typical = {number: place.alternative.median_run for number, place in enumerate(phased)}
    return [_side_by_side([phased[number] for number in group], is_known, width) for group in by_work(typical)]


def _side_by_side(places: Sequence[Standing], is_known: bool, width: int) -> str:
    """Explain why the first run is faster, if that is known, or else compare the typical runs."""
    named = dict(zip(labels.names([place.alternative.median_run for place in places]), places, strict=True))
    runs = {name: place.alternative.median_run for name, place in named.items()}
    (reference, first), *others = runs.items()
    if others and not is_known:
        lines = [compare_steps(run, first, name, reference) for name, run in others]
    else:
        (behind,) = behind_first(named)
        lines = against_first([behind])
        if tied := [name for name, _ in others if name not in behind]:
            lines.append(f"{', '.join(tied)}: not significantly slower than {reference}, so not explained")
    lines += [line for name, run in others for line in compare_memory(run, first, name, reference)]
    repeats = {name: len(place.alternative.runs) for name, place in named.items()}
    if max(repeats.values()) > 1:
        listed = ", ".join(f"{name} ({plural(count, 'run')})" for name, count in repeats.items())
        lines.append(f"shown: the run with the median throughput of {listed}")
    return "\n".join([_title(first), tables_of_runs(runs, width), "", *(wrap(line, width) for line in lines)])


def _by_rank(run: RunRecord, width: int) -> str:
    (called,) = labels.names([run])
    return f"{_title(run)}\n{tables_of_ranks(run, called, width)}"


def _title(run: RunRecord) -> str:
    return labels.title([run], [f"batch {run.global_batch}"] if run.global_batch else [])


#: With more ranks, only their mean, the slowest and the fastest one are shown.
_MOST_RANKS = 16

#: The heading of each phase.
_HEADINGS = [{"communication": "exposed"}.get(phase, phase) for phase in PHASES]

#: Meanings of headings of phases, which get a column only if any run has them.
_PHASES = {
    "data": "waiting for the batch",
    "exposed": "communication not overlapped with compute",
    "stragglers": "waiting for slower ranks",
    "experts": "waiting for the rank with the fullest experts",
    "bubble": "waiting for other stages",
    "host": "the GPU waiting for its host to launch the next kernel",
    "optimizer": "clipping gradients, updating weights",
    "other": "the rest",
}

#: The phases in the order in which they are omitted if there is no room.
_SPARED = ("other", "host", "data", "optimizer", "experts")


def tables_of_runs(records: Mapping[str, RunRecord], width: int) -> str:
    """Return tables with a row per run, and a row for each of its communication operations."""
    steps = {called: recorded_step(record) for called, record in records.items()}
    rows = {called: [step.seconds, *step.phases.values()] for called, step in steps.items()}
    remarks = [remark for called, record in records.items() for remark in step_remarks(record, called)]
    times = _times("run", "ms of a step, means over ranks", rows, width)
    return _blocks(times, records, memory_of_runs(records, width), remarks, width)


def tables_of_ranks(record: RunRecord, called: str, width: int) -> str:
    """Return tables with a row for the mean and one per rank; for many ranks only the slowest and the fastest."""
    step = recorded_step(record)
    rows = {"mean": [step.seconds, *step.phases.values()]}
    ranks = record.phases.ranks or {}
    for title, rank in _shown_ranks(record).items():
        seconds = [ranks[phase][rank] if phase in ranks else 0.0 for phase in PHASES]
        rows[title] = [sum(seconds), *seconds]
    times = _times("rank", "ms of a step", rows, width)
    remarks = [shares_of_step(record, called), *step_remarks(record, called)]
    return _blocks(times, {called: record}, memory_of_ranks(record, width), remarks, width)


def _shown_ranks(record: RunRecord) -> dict[str, int]:
    """Return the ranks to show, by title: all, or for many the slowest and the fastest in forward and backward."""
    seconds = compute_seconds(record.phases)
    if len(seconds) <= _MOST_RANKS:
        return {rank_name(record.phases, rank): rank for rank in range(len(seconds))}
    ends = {"slowest": seconds.index(max(seconds)), "fastest": seconds.index(min(seconds))}
    return {f"{end}: {rank_name(record.phases, rank)}": rank for end, rank in ends.items()}


def _blocks(
    times: Sequence[str], records: Mapping[str, RunRecord], memory: Sequence[str], remarks: Iterable[str], width: int
) -> str:
    taken = [*times, *_profiled(records.values(), width)]
    blocks = [taken, list(_operations(records, width)), memory, [wrap(remark, width) for remark in remarks]]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _times(heading: str, unit: str, rows: Mapping[str, Sequence[float]], width: int) -> list[str]:
    """Return a table of steps and phases, and what its columns mean; rows are seconds of step and phases."""
    shortest = 1e3 * min(seconds for seconds, *_ in rows.values())
    places = next((number for number, least in enumerate((1e3, 10.0, 1.0)) if shortest >= least), 3)
    cells = [[f"{1e3 * seconds:,.{places}f}" for seconds in row] for row in rows.values()]
    columns = dict(zip(("step", *_HEADINGS), zip(*cells, strict=True), strict=True))
    kept = {name: texts for name, texts in columns.items() if name not in _PHASES or any(t.strip("-0.") for t in texts)}
    shown = list(zip(rows, *kept.values(), strict=True))
    return [drawn([heading, *kept], shown, width, [heading], _SPARED), wrap(_legend(unit, _PHASES, kept), width)]


def _profiled(records: Iterable[RunRecord], width: int) -> Iterator[str]:
    """Yield how many steps were profiled, and how much slower they were."""
    phases = [record.phases for record in records]
    seconds = [(of_run.profiled_step_seconds, of_run.step_seconds) for of_run in phases]
    if slower := [profiled / timed for profiled, timed in seconds if profiled and timed]:
        steps, times = range_text([of_run.steps or 0 for of_run in phases], str), range_text(slower, "{:.2f}".format)
        yield wrap(f"from {steps} profiled steps, {times} times as long as the timed ones, and rescaled to them", width)


#: The figures of an operation by heading, ``None`` if unknown, and what they mean.
_FIGURES: dict[str, tuple[Callable[[Communication], float | None], str]] = {
    "calls": (lambda sent: sent.calls, ""),
    "MB": (lambda sent: sent.bytes / 1e6, "sent, or received if more"),
    "ms": (lambda sent: 1e3 * sent.seconds, "in flight, from the moment the last rank reaches it"),
    "exposed ms": (lambda sent: 1e3 * sent.exposed_seconds, "not overlapped with compute"),
    "GB/s": (
        lambda sent: sent.bytes / sent.seconds / 1e9 if sent.seconds and sent.bytes else None,
        "MB over ms",
    ),
}


def _operations(records: Mapping[str, RunRecord], width: int) -> Iterator[str]:
    rows = [
        [called, operation_name(name), *(figure_text(figure(sent), three_digits) for figure, _ in _FIGURES.values())]
        for called, record in records.items()
        for name, sent in recorded_step(record).operations.items()
    ]
    if not rows:
        return
    yield drawn(["run", "operation", *_FIGURES], rows, width, ["run", "operation"])
    meanings = {heading: meaning for heading, (_, meaning) in _FIGURES.items()}
    yield wrap(_legend("per step, means over ranks", meanings, [*_FIGURES]), width)


def _legend(unit: str, meanings: Mapping[str, str], headings: Iterable[str]) -> str:
    return "; ".join([unit, *(f"{heading}: {meanings[heading]}" for heading in headings if meanings.get(heading))])


_MEMORY = {
    "activations": "other allocations of the forward and backward pass",
    "communication": "buffers, gathered weights included",
    "other": "the batch and temporaries",
    "rank": "the one with the highest peak",
    "peak in": "the part of the step at the peak",
}

#: Peaks are equal if they differ by less than this fraction of the larger one.
_EQUAL = 0.01


@dataclass(frozen=True)
class _Rank:
    """The memory of a rank at the peak of a step."""

    number: int
    bytes: Mapping[str, int]  #: Bytes of each of :data:`KINDS`.
    moment: str  #: The part of the step at the peak.

    @property
    def peak(self) -> int:
        return sum(self.bytes.values())


def memory_of_runs(records: Mapping[str, RunRecord], width: int) -> list[str]:
    """Return a table with a row per run, for its rank with the highest peak; empty if no run has recorded memory."""
    rows = {called: rank for called, record in records.items() if (rank := _fullest(record))}
    return _table("run", rows, width)


def memory_of_ranks(record: RunRecord, width: int) -> list[str]:
    """Return a table with a row per rank; for many ranks only those with the highest and the lowest peak."""
    ranks = _ranks(record)
    if len(ranks) > _MOST_RANKS:
        ranks = [choose(ranks, key=attrgetter("peak")) for choose in (max, min)]
    return _table("rank", {rank_name(record.phases, rank.number): rank for rank in ranks}, width)


def compare_memory(record: RunRecord, against: RunRecord, called: str, reference: str) -> Iterator[str]:
    """Yield how much higher or lower one run's peak is than another's, and why, if both are recorded."""
    ours, theirs = _fullest(record), _fullest(against)
    if not (ours and theirs):
        return
    if abs(ours.peak - theirs.peak) <= _EQUAL * max(ours.peak, theirs.peak):
        peak, other = (f"{size:,.{decimals(size, 3)}f} MiB" for size in (ours.peak / 2**20, theirs.peak / 2**20))
        yield f"memory: {called} {peak} vs {reference} {other}: within {_EQUAL:.0%}"
        return
    parts = {kind: (ours.bytes[kind] - theirs.bytes[kind]) / 2**20 for kind in KINDS}
    yield f"memory: {difference(called, reference, 'MiB', parts, {}, digits=3)}"


def memory_of_largest_rank(record: RunRecord) -> Mapping[str, int] | None:
    """Return the bytes of each of :data:`KINDS` on the rank with the highest peak; ``None`` if not recorded."""
    rank = None if why_no_phases(record) else _fullest(record)
    return rank.bytes if rank else None


def _ranks(record: RunRecord) -> list[_Rank]:
    """Return the ranks of a record with phases; empty if its memory is incomplete, or of other ranks."""
    memory, count = record.memory, len(compute_seconds(record.phases))
    moments, kinds = memory.moments or [], [(memory.ranks or {}).get(kind) or [] for kind in KINDS]
    if {len(moments), *map(len, kinds)} != {count}:
        return []
    sizes = (dict(zip(KINDS, of_rank, strict=True)) for of_rank in zip(*kinds, strict=True))
    return [_Rank(number, *peak) for number, peak in enumerate(zip(sizes, moments, strict=True))]


def _fullest(record: RunRecord) -> _Rank | None:
    return max(_ranks(record), key=attrgetter("peak"), default=None)


def _table(heading: str, rows: Mapping[str, _Rank], width: int) -> list[str]:
    if not rows:
        return []
    kinds = [kind for kind in KINDS if any(rank.bytes[kind] for rank in rows.values())]
    of_runs = heading == "run"
    headings = [heading, "peak", *kinds, *["rank"] * of_runs, "peak in"]
    places = decimals(min(rank.peak for rank in rows.values()) / 2**20, 3)
    shown = []
    for title, rank in rows.items():
        sizes = [f"{size / 2**20:,.{places}f}" for size in (rank.peak, *(rank.bytes[kind] for kind in kinds))]
        shown.append([title, *sizes, *[str(rank.number)] * of_runs, rank.moment])
    spared = ["rank", "peak in", "other"] if of_runs else ["peak in", "other"]
    meant = _legend("MiB allocated by torch at the peak of a step", _MEMORY, headings[1:])
    return [drawn(headings, shown, width, ["peak in", heading], spared), wrap(meant, width)]
