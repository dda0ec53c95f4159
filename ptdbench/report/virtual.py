"""Virtual runs and plans in tables and lines: virtual runs have no times, and plans predicted ones."""

import math
import pickle
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import astuple

from ptdbench.comparison.ranking import rank_predicted, spoken
from ptdbench.grouping import grouped
from ptdbench.problems import in_shell
from ptdbench.profiling.phases import KINDS, PHASES
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import FirstStep, Messages, Plan, Virtual
from ptdbench.report.text import drawn, figure_text, wrap
from ptdbench.terminal import command, plain, plural, rank_names
from ptdbench.units import memory_text, size_text, three_digits


def is_ok(record: RunRecord) -> bool:
    """Return whether a run on virtual GPUs, or a plan, finished: neither has a throughput."""
    return record.kind in ("virtual", "planned") and record.status == "ok"


def has_figures(record: RunRecord) -> bool:
    """Return whether a run finished on virtual GPUs, by itself or for a plan."""
    return bool(record.virtual.ranks) and (record.kind == "planned" or is_ok(record))


def does_not_fit(record: RunRecord) -> bool:
    """Return whether a plan says that a run does not fit, which is an answer, and no failure."""
    return record.kind == "planned" and record.status == "oom"


#: The columns of a plan besides its name and ranks, in display order, each with its place in the order of omission.
PLANNED = {
    "mb": None, "rank": 4, "weights": 7, "gradients": 3, "optimizer": 6, "activations": None, "gathered": None,
    "other": 1, "allocated": 5, "reserved": None, "outside": 2, "of GPU": 0, "left": None, "fits": None, "max mb": None,
}  # fmt: skip

#: The order of omission in a table with predicted times, where it differs.
BESIDE_TIMES = {"gathered": 8, "activations": 9, "reserved": 10, "max mb": 11}

#: The columns that are not sizes.
NO_SIZES = ("mb", "rank", "fits", "max mb")


def plan_figures(record: RunRecord) -> dict[str, int | str | None]:
    """Return the figures of a plan by :data:`PLANNED`, sizes in bytes, of the largest rank; empty for a run."""
    if record.kind != "planned":
        return {}
    plan, kinds = record.plan, record.memory.ranks or {}
    place = record.virtual.ranks.index(plan.rank) if plan.rank is not None and record.virtual.ranks else None
    state = max(plan.state or [], key=lambda of_stage: sum(astuple(of_stage)), default=None)
    room, needed, largest = plan.room_bytes, plan.needed_bytes, plan.largest_micro_batch
    return {
        "mb": record.layout.micro_batch,
        "rank": None if place is None else plan.rank,
        **{
            {"communication": "gathered"}.get(kind, kind): kinds[kind][place]
            if place is not None and kind in kinds
            else getattr(state, kind, None)
            for kind in KINDS
        },
        "allocated": plan.allocated_bytes,
        "reserved": plan.reserved_bytes,
        "outside": sum(plan.outside.values()) if plan.outside else None,
        "of GPU": plan.capacity_bytes,
        "left": None if room is None or needed is None else room - needed,
        "fits": {True: "yes", False: "no", None: "?"}[plan.fits] if plan != Plan() else "failed",
        "max mb": largest if largest is None else str(largest or "none"),
    }


def answer(named: Sequence[tuple[str, RunRecord]]) -> Iterator[str]:
    """Yield which plans fit in memory, and which virtual run needs the least."""
    sizes = {name: size for name, run in named if run.kind == "virtual" and (size := run.metrics.peak_memory_bytes)}
    if least := min(sizes, key=sizes.__getitem__, default=None):
        yield f"Least memory: {least}, {memory_text(sizes[least])} on its largest rank; virtual runs have no times"
    called = {id(run): name for name, run in named if run.predicted.rate}
    first = [place for place in rank_predicted([run for _, run in named if id(run) in called]) if not place.faster]
    if len(called) > 1:
        leaders = spoken([called[id(place.alternative.runs[0])] for place in first])
        yield f"Predicted, not measured: {leaders} may be the fastest of {len(called)}"
    plans = [(name, run.plan) for name, run in named if run.kind == "planned"]
    for fits, words in ((True, "Fits in memory"), (False, "Does not fit")):
        if some := [(name, plan.largest_micro_batch) for name, plan in plans if plan.fits is fits]:
            yield f"{words}: {spoken([f'{name} (micro-batch up to {most})' if most else name for name, most in some])}"


def remarks(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield what to know about the virtual runs and the plans of a table."""
    plans = [record for record in records if record.kind == "planned"]
    if plans:
        yield "planned: predicted, not run; memory of the largest rank"
    if devices := ", ".join(dict.fromkeys(name for record in records if (name := record.virtual.device))):
        yield f"{devices}: memory and messages are exact, nothing is computed or timed"
    yield from dict.fromkeys([*of_plans(plans), *_of_models(records)])


def of_plans(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield what the columns of plans mean, and what is not in them; lines may repeat."""
    simulated = [record for record in records if record.plan.stands_for]
    for plan in (record.plan for record in simulated):
        samples = ", the samples that wait for their pass" if "samples" in (plan.outside or {}) else ""
        usable, whole = memory_text(plan.room_bytes or 0), memory_text(plan.capacity_bytes or 0)
        yield (
            f"left: of {usable} usable ({whole} of {plan.capacity_of} less memory_reserve), after torch's reserved "
            f"memory{samples} and the estimated CUDA context and NCCL buffers"
        )
    if simulated:
        yield (
            "mb: micro-batch; max mb: the largest that fits; gathered: weights gathered by FSDP, and communication "
            "buffers; outside: CUDA context and NCCL buffers; simulated: "
            + "; ".join(dict.fromkeys(map(_stands_for, simulated)))
        )
    timed = [record.predicted for record in records if record.predicted.step_seconds]
    levels = grouped((step.anchor, (step.high or 0.0) / (step.step_seconds or 1.0) - 1) for step in timed)
    for anchor, shares in levels.items():
        sets = f"{anchor} sets their level" if anchor else "no measured run sets their level"
        yield (
            f"predicted: step ms and tokens/s may all be {max(shares):.0%} off together: {sets}, "
            "which the ratio vs best does not depend on; #: ranks, simultaneous 95% confidence"
        )
    if levels:
        yield "host work is counted at the speed of a fast server; data loading and checkpoints are left out"
    if any(record.option("eval.every", int) for record in simulated):
        yield "evaluation (eval.every) is left out: a batch of it, of eval.micro_batch samples, may need more"
    offloaded = (record.plan.state for record in records if record.option("offload", str) not in (None, "none"))
    for size in dict.fromkeys(max(sum(astuple(of_stage)) for of_stage in state) for state in offloaded if state):
        yield f"offload: {memory_text(size)} of a rank are in host memory, which is compared with nothing"
    yield from _of_models(records)
    for plan in (record.plan for record in records):
        if plan.capacity_bytes and plan.reason:
            yield f"memory: {plan.capacity_of}"


def measuring(records: Sequence[RunRecord]) -> str:
    """Return the command that finds the fastest plan, wrapped for a shell; empty if none is known to fit.

    It measures the plans that fit; of those with a predicted time only the ones that may be the fastest.
    """
    behind = [place.alternative.runs[0] for place in rank_predicted(records) if place.faster]
    fitting = [record for record in records if record.plan.fits and record not in behind]
    typed = dict.fromkeys(word.partition("=")[::2] for record in fitting for word in record.overrides or [])
    values = {name: ",".join(of_option) for name, of_option in grouped(typed).items()}
    options = {name: value for name, value in values.items() if not name.lstrip("+~").startswith(("virtual", "repeat"))}
    if options.get("train.micro_batch") == "max":
        options["train.micro_batch"] = "best"
        options.setdefault("train.global_batch", str(math.lcm(*(record.global_batch or 1 for record in fitting))))
    if any(name == "cluster.nodes" and value != "1" for name, value in options.items()):
        options = {"cluster": "slurm", **options}
    words = [command(), "-m", *(in_shell(name, value) for name, value in options.items()), "repeat=5"]
    return " \\\n".join(wrap(" ".join(words), 78).splitlines()) if fitting else ""


def _stands_for(record: RunRecord) -> str:
    """``rank 0 (stands for 511 ranks) and rank 511``."""
    pairs = zip(record.virtual.ranks or [], record.plan.stands_for or [], strict=True)
    *others, last = [f"rank {rank}" + (f" (stands for {count} ranks)" if count > 1 else "") for rank, count in pairs]
    return f"{', '.join(others)} and {last}" if others else last


def _of_models(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield how the models of virtual runs behave differently on virtual GPUs."""
    for record in records:
        if record.virtual.ranks and record.option("model.router", dict):
            yield (
                "experts take turns by position, as with model.router.balance=forced, since no scores are computed; "
                "real tokens are routed less evenly"
            )
        if any((record.virtual.kernels or {}).get("convolution", ())):
            yield (
                "convolutions have no workspaces here; on a GPU cuDNN allocates them, which takes more memory; their "
                "predicted times are a guess"
            )


def explained(record: RunRecord, called: str, width: int) -> str:
    """Render memory, kernels and messages of one run."""
    virtual, ranks, size = record.virtual, record.virtual.ranks or [], record.world_size
    present_passes, passes = record.plan.accumulation, record.layout.accumulation
    of_some = present_passes and passes and present_passes < passes
    step = "the last step" if virtual.first_step else "a step"
    step = f"{present_passes} of {passes} passes of a step" if of_some else step
    present = (
        ("all " * (size != 1) + plural(size or 0, "rank")) if len(ranks) == size else f"{rank_names(ranks)} of {size}"
    )
    lines = [wrap(f"{called} on {virtual.device}, {present}", width), *_memory(record, width)]
    if virtual.reason:
        lines.append(wrap(f"no kernels and no messages: {virtual.reason}", width))
    else:
        lines += _kernels(virtual, step, ranks, width)
        if first := virtual.first_step:
            lines += _kernels(first, "the first step", ranks, width)
        lines += _messages(virtual, step, width)
    lines += [*_predicted(record, width), *(wrap(line, width) for line in _of_models([record]))]
    if hosts := virtual.host_seconds:
        launched = f"the host launched {step} in {1e3 * max(hosts):.0f} ms, beside the other ranks on this machine"
        lines.append(wrap(launched, width))
    return "\n".join(lines)


def _predicted(record: RunRecord, width: int) -> Iterator[str]:
    """Yield what a predicted step is made of, and its phases; nothing without one."""
    step, parts, phases = record.predicted, record.predicted.parts or {}, record.predicted.phases or {}
    if step.reason:
        yield wrap(f"no predicted time: {step.reason}", width)
    if not step.step_seconds or not step.low or not step.high:
        return
    times = [f"{three_digits(1e3 * seconds)} ms" for seconds in (step.step_seconds, step.low, step.high)]
    rate = max(record.virtual.flops or [0]) / 1e12 / step.step_seconds
    rates = f"; {three_digits(rate)} TFLOP/s of matrix products a GPU" if rate else ""
    yield wrap(f"predicted: a step of {times[0]} ({times[1]} to {times[2]}), bound by {step.bound_by}{rates}", width)
    shown = {PHASES.get(name, name): spent for name, spent in phases.items() if spent > 1e-9}  # others: rounding
    for title, seconds in (("made of", parts), ("phases", shown)):
        total = sum(seconds.values())
        rows = [[name, three_digits(1e3 * spent), f"{spent / total:.1%}"] for name, spent in seconds.items()]
        yield drawn([title, "ms", "share"], rows, width, words=[title])
    if step.twice_as_fast:
        gains = {name: max(0.0, 1 - seconds / step.step_seconds) for name, seconds in step.twice_as_fast.items()}
        listed = ", ".join(f"{name} {gain:.1%}" for name, gain in gains.items())
        yield wrap(f"saved of the step if twice as fast: {listed}", width)
    if step.guessed_bytes:
        yield wrap(f"{size_text(step.guessed_bytes)} that kernels move in this step are a guess", width)


def as_predicted(record: RunRecord) -> str | None:
    """Return how right a prediction of a run was that has been measured since; ``None`` without one."""
    off, step = record.prediction_error, record.predicted
    if off is None or not step.step_seconds:
        return None
    anchor = f" (level set by {step.anchor})" if step.anchor else ""
    way = "longer" if off > 0 else "shorter"
    predicted = f"the predicted step, {three_digits(1e3 * step.step_seconds)} ms{anchor},"
    return f"{predicted} is {abs(off):.1%} {way} than measured"


def of_program(record: RunRecord, width: int) -> str:
    """Render what a program of one's own did, and how it ended; see :mod:`ptdbench.run.program`."""
    lines = [wrap(f"error: {record.error.message}", width)] if record.status != "ok" else []
    if not record.virtual.ranks:
        none = "no process used a GPU: a program that torch does not run on GPUs has nothing to show"
        return "\n".join([*lines, *([] if lines and record.world_size else [wrap(none, width)])])
    command = shlex.join(record.option("program.command", list[str]) or [])
    steps = record.steps or 0
    taken = f"{steps} steps" if steps else "no step was found: kernels and messages are of the whole program"
    zeros = "nothing is computed: losses are zeros"
    return "\n".join([*lines, explained(record, command, width), wrap(f"{taken}; {zeros}; {record.directory}", width)])


#: Maximum number of places of a program to show, and of frames of their stacks.
_MOST_PLACES, _MOST_FRAMES = 8, 4


class Allocated(NamedTuple):
    """What was allocated from one place of the program, and alive at the peak."""

    bytes: int
    tensors: int
    stack: Sequence[str]  #: ``file:line function``, the innermost first, without torch's own where there are others.


def largest(directory: Path) -> Iterator[str]:
    """Yield what took most memory at the peak of the process that needed most, if this process has kept snapshots."""
    kept = [(largest_places(path), path) for path in directory.glob("memory/*.pickle")]
    if not kept:
        return
    places, path = max(kept, key=lambda of_process: sum(place.bytes for place in of_process[0]))
    yield f"largest at the peak, by place; the whole snapshot, for https://pytorch.org/memory_viz, is {path}:"
    for place in places:
        frames = place.stack or ["(no Python: the backward pass)"]
        title = f"  {size_text(place.bytes)} in {plural(place.tensors, 'tensor')}"
        yield plain("\n".join([title, *(f"    {frame}" for frame in frames)]))


def largest_places(path: Path) -> list[Allocated]:
    """Return what took most memory at the peak in a snapshot of torch's, by place, the largest first; raises OSError.

    The snapshot is unpickled: it must be of a program that this process has started.
    """
    peaks = map(_at_peak, pickle.loads(path.read_bytes())["device_traces"])
    alive = max(peaks, key=lambda entries: sum(entry["size"] for entry in entries), default=[])
    places = grouped((tuple(_stack(entry.get("frames") or [])), entry["size"]) for entry in alive)
    allocated = [Allocated(sum(sizes), len(sizes), stack) for stack, sizes in places.items()]
    return sorted(allocated, key=lambda place: -place.bytes)[:_MOST_PLACES]


def _at_peak(trace: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the allocations that were alive when a device's allocated memory was largest."""
    entries = [entry for entry in trace if entry["action"] in ("alloc", "free_completed")]
    total = most = end = 0
    for place, entry in enumerate(entries, start=1):
        total += entry["size"] if entry["action"] == "alloc" else -entry["size"]
        if total > most:
            most, end = total, place
    alive: dict[int, Mapping[str, Any]] = {}
    for entry in entries[:end]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry
        else:
            alive.pop(entry["addr"], None)
    return [*alive.values()]


def _stack(frames: Sequence[Mapping[str, Any]]) -> list[str]:
    outside = [frame for frame in frames if "/torch/" not in frame["filename"]]
    return [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in (outside or frames)[:_MOST_FRAMES]]


def _memory(record: RunRecord, width: int) -> Iterator[str]:
    """Yield a table with a row for each rank: its peaks, and its memory by purpose."""
    virtual, kinds = record.virtual, record.memory.ranks or {}
    columns: dict[str, Iterable[str]] = {
        "rank": map(str, virtual.ranks or []),
        "allocated": map(size_text, virtual.allocated_bytes or []),
        **({"in step": map(str, virtual.peak_steps)} if virtual.peak_steps else {}),
        **({"first step": map(size_text, virtual.first_step.allocated_bytes or [])} if virtual.first_step else {}),
        "reserved": map(size_text, virtual.reserved_bytes or []),
        **({"outside": map(size_text, virtual.outside_bytes)} if virtual.outside_bytes else {}),
        **({"TFLOP": (f"{flops / 1e12:,.3f}" for flops in virtual.flops)} if virtual.flops else {}),
        **{kind: map(size_text, sizes) for kind, sizes in kinds.items()},
    }
    yield drawn([*columns], [*zip(*columns.values(), strict=False)], width, spared=["other", "communication"])
    context = f"the CUDA context (about {size_text(virtual.context_bytes or 0)})"
    outside = f"outside: {context}, and what else is not torch's; NCCL's buffers come on top"
    on_top = outside if virtual.outside_bytes else f"{context} and NCCL's buffers come on top"
    reserved = "reserved: what torch's allocator takes from the GPU, which decides whether a run fits"
    yield wrap(f"allocated: the tensors at their peak; {reserved}; {on_top}", width)


def _kernels(virtual: Virtual | FirstStep, step: str, ranks: Sequence[int], width: int) -> Iterator[str]:
    kernels = virtual.kernels or {}
    totals = [sum(counts) for counts in zip(*kernels.values(), strict=True)]
    of_first = ", ".join(f"{counts[0]:,} {kind}" for kind, counts in kernels.items() if counts[0])
    if totals and ranks:
        yield wrap(f"{totals[0]:,} kernels in {step} on rank {ranks[0]}: {of_first}", width)


def _messages(virtual: Virtual, step: str, width: int) -> Iterator[str]:
    sent, title = virtual.messages or {}, f"messages of {step}"
    rows, headings = {name: [*astuple(messages)] for name, messages in sent.items()}, ["calls", "bytes"]
    if first := virtual.first_step:
        first_sent, none = first.messages or {}, Messages(0, 0)
        steps = (sent, first_sent)
        rows = {name: [*chain(*(astuple(step.get(name, none)) for step in steps))] for name in (*sent, *first_sent)}
        headings = ["calls", "bytes", "of the first: calls", "bytes"]
    if rows:
        texts = [[name, *(figure_text(figure, "{:,.0f}".format) for figure in row)] for name, row in rows.items()]
        yield drawn([title, *headings], texts, width, words=[title])
        yield wrap("means over ranks; bytes: sent, or received if more", width)
