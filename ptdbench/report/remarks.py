"""Remarks below a table: why runs failed, and what else to know about them besides their figures."""

import json
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path

from ptdbench.comparison import ranking
from ptdbench.comparison.ranking import Standing, spoken
from ptdbench.grouping import grouped
from ptdbench.measure.results import OtherLoad
from ptdbench.records.effects import affects
from ptdbench.records.failure import TRACEBACK
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import MicroBatch
from ptdbench.records.store import RECORD
from ptdbench.report import virtual
from ptdbench.report.labels import options
from ptdbench.report.text import range_text
from ptdbench.terminal import from_here, plural
from ptdbench.units import flops_text

#: The text in a message before the path of the processes' output.
OUTPUT = "; its output is in "

#: Types of ptdbench's own errors, to which their name adds nothing.
_SAID_BY_MESSAGE = {"ConfigError", "ExitStatus", "Gone", "Stopped"}

#: A possible cause of a failure on virtual GPUs.
_ON_VIRTUAL = "virtual GPUs compute nothing: code that depends on the values of tensors fails there"

#: Maximum characters of a message to show; the record has all of it.
_LIMIT = 1000


def reason(record: RunRecord) -> str:
    """Return status, rank and error in one line: ``failed on rank 1: RuntimeError: ... at mymodels.py:13 in forward``.

    A long message is truncated, except a ConfigError, which ends with its remedy. What follows the message is always
    complete: the path after :data:`OUTPUT`, the location in the user's code, and what to try.
    """
    error = record.error
    if virtual.does_not_fit(record):
        return f"does not fit: {error.message}"
    where = f" on rank {error.rank}" if error.rank >= 0 else ""  # negative: the process that starts the ranks
    message, *output = error.message.split(OUTPUT)
    separator = "; " if error.type == "ConfigError" else " "  # one problem a line
    line = separator.join(filter(None, (" ".join(part.split()) for part in message.splitlines())))
    line = line if error.type == "ConfigError" or len(line) <= _LIMIT else f"{line[:_LIMIT].rstrip()} ..."
    kind = "" if error.type in _SAID_BY_MESSAGE or error.type in line.split() else error.type
    cause = ": ".join(filter(None, (kind, line)))
    text = OUTPUT.join([f"{record.status}{where}: {cause or 'no reason on record'}", *output])
    if error.where:
        path = Path(record.directory) / (RECORD if record.kind == "planned" else TRACEBACK)
        text += f" at {error.where}; the whole traceback is in {from_here(path)}"
    if record.precision in ("bf16", "fp16") and "must have the same dtype" in error.message:
        text += f"; with precision={record.precision} a buffer stays as it is: cast it where it meets activations"
    if record.kind == "virtual" and record.status == "failed" and error.rank != -1:
        text += f"; {_ON_VIRTUAL}"
    remedies = ", ".join(_against_lack_of_memory(record)) if record.status == "oom" else ""
    return f"{text}; try {remedies}" if remedies else text


def _against_lack_of_memory(record: RunRecord) -> Iterator[str]:
    if not record.model:
        return
    layout, search = record.layout, record.micro_batch
    if (layout.micro_batch or 1) > 1 and search == MicroBatch():
        if record.launcher in (None, "local") or record.option("cluster.submit", str):
            yield "train.micro_batch=max, which finds what fits"
        else:  # an external launcher starts ranks only once, so no search
            yield "the train.micro_batch that ptdbench plan finds"
    if search.found and record.option("eval.every", int):
        yield "a smaller eval.micro_batch, as a search leaves evaluation out"
    if record.parallel in ("single", "ddp"):
        yield "parallel=fsdp"
    reduces = record.option("parallel.reduce_scatter_each_microbatch", bool)
    if reduces is False and (layout.accumulation or 1) > 1 and (layout.shard or 1) > 1 and layout.pipeline == 1:
        yield "parallel.reduce_scatter_each_microbatch=true"
    if record.option("activations.name", str) == "keep":
        yield "activations=recompute"
    if record.precision == "fp32":
        yield "precision=bf16"


#: The relative change of a loss within ten steps that rounding may cause, by precision: kernels sum in other orders.
_ROUNDING = {"fp32": 1e-4, "tf32": 1e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 5e-2}

#: It grows with steps like independent errors, up to this bound, above which a wrong training would go unnoticed.
_MOST = 5e-2


def training(run: RunRecord) -> Hashable:
    """Return a key that is equal for two runs if and only if the losses of their common steps should be."""
    kept = {name: value for name, value in options(run).items() if not affects(name, "layout")}
    return _python_that_is_read(run), json.dumps(kept, sort_keys=True, default=str)


def rounding(run: RunRecord) -> float:
    """Return the relative change of a run's last loss that rounding may cause."""
    of_ten = _ROUNDING.get(run.precision or "", _MOST)
    return min(of_ten * math.sqrt(max(1.0, (run.steps or 0) / 10)), _MOST)


def losses_apart(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> str | None:
    """Return how far apart the last losses of a configuration are on two sides; ``None`` if rounding explains it.

    Runs on the same side may differ too, if the order of additions is not fixed: what counts is the gap between all
    losses of one side and all of the other.
    """
    sides = [[run for run in side if run.status == "ok" and run.final_loss is not None] for side in (before, after)]
    if not all(sides) or len({(run.steps, _python_that_is_read(run)) for side in sides for run in side}) > 1:
        return None
    earlier, later = ([run.final_loss or 0.0 for run in side] for side in sides)
    gap = max(min(earlier) - max(later), min(later) - max(earlier))
    size, most = max(map(abs, [*earlier, *later])), rounding(sides[0][0])
    if gap <= most * size:
        return None
    was, now = (range_text(losses, "{:.6g}".format) for losses in (earlier, later))
    apart = f"{gap / size:.2g} of it apart, where rounding makes {most:.2g} at most"
    return f"the last loss is {was} before and {now} after: {apart}"


def _of_losses(named: Sequence[tuple[str, RunRecord]]) -> Iterator[str]:
    """Yield the names of configurations whose last loss differs from the first one of the same training."""
    most = {name: rounding(run) for name, run in named}
    losses = (((run.steps, training(run)), (name, run.final_loss)) for name, run in named)
    for group in grouped(losses).values():
        finite = [(name, loss) for name, loss in group if loss is not None]
        for first, reference in finite[:1]:
            scale = max(abs(reference), sys.float_info.min)
            apart = {name: abs(loss - reference) / scale for name, loss in finite[1:]}
            if far := [f"{name} {share:.2g}" for name, share in apart.items() if share > most[name]]:
                yield f"last loss differs from {first}, relative: {spoken(far)}"


def _python_that_is_read(run: RunRecord) -> str | None:
    """Return the version of Python whose standard library was the training data, if it was."""
    data = run.option("data", dict) or {}
    return run.environment.python if data.get("path", "") is None else None


#: Waiting for data is mentioned if it takes at least this fraction of a run's time.
_WAITED = 0.05

#: A GPU's held-back clocks are mentioned if they affect more than this fraction of a run's time.
_HELD_BACK = 0.01


def _passed_ceiling(run: RunRecord) -> str | None:
    rate, share = run.metrics.ceiling_flops_per_second, run.metrics.share_of_ceiling
    is_passed = share and rate and share > 1
    return f"ceiling of {flops_text(rate)} passed; workload=matmul measures it again" if rate and is_passed else None


def _data_wait(run: RunRecord) -> str | None:
    share = run.metrics.data_wait_share or 0.0
    return f"{share:.0%} of the steps' time was spent waiting for data" if share >= _WAITED else None


def _held_back(run: RunRecord) -> str | None:
    """Return which GPU of a run was held back most."""
    clocks = run.hardware.clocks or []
    causes = [(share, cause, gpu.rank) for gpu in clocks for cause, share in (gpu.held_back or {}).items()]
    if not (held := [cause for cause in causes if cause[0] > _HELD_BACK]):
        return None
    share, cause, rank = max(held)
    more = len({rank for *_, rank in held}) - 1
    others = f", and {plural(more, 'other')} by less" if more else ""
    return f"rank {rank}'s GPU was held back for {share:.0%} of the time: {cause}{others}"


#: What may stand out in a run, each without the name of the run; ``None`` if it does not.
_OF_RUN: tuple[Callable[[RunRecord], str | None], ...] = (
    _passed_ceiling,
    _data_wait,
    _held_back,
    virtual.as_predicted,
    attrgetter("remarks.pipeline"),
    attrgetter("remarks.kernels"),
    lambda run: run.remarks.cut_short and f"took {run.remarks.cut_short}",
)


def of_rows(standings: Sequence[Standing], named: Sequence[str]) -> list[str]:
    """Return sentences on the order, failures and measurements of the rows of a table, which are called ``named``."""
    places = list(zip(named, standings, strict=True))
    by_name = [(name, place.alternative.median_run) for name, place in places]
    records = [run for place in standings for run in place.alternative.runs]
    ranked = [place.alternative.median_run for place in standings if place.rank]
    certainty = ranking.remark(standings)
    return [
        *([certainty] if certainty else []),
        *_devices(places),
        *_out_of_turn(places),
        *_reasons(places),
        *(f"no MFU: {reason}" for reason in dict.fromkeys(run.metrics.mfu_reason for run in ranked) if reason),
        *_of_losses([(name, run) for name, run in by_name if run.status == "ok"]),
        *(f"{name}: {text}" for remark in _OF_RUN for name, run in by_name if (text := remark(run))),
        *load_remarks([(name, place.alternative.runs) for name, place in places]),
        *(
            f"{name}: checkpoints: {lines[0]}" + (f"; {len(lines) - 1} more on record" if lines[1:] else "")
            for name, place in places
            if (lines := [line for run in place.alternative.runs for line in run.remarks.checkpoints or []])
        ),
        *virtual.remarks(records),
    ]


def _devices(places: Sequence[tuple[str, Standing]]) -> Iterator[str]:
    """Yield which rows were measured on which devices, if these differ: the order then depends on more than layouts."""

    def devices(place: Standing) -> str:
        environments = [run.environment for run in place.alternative.runs if run.throughput]
        first = ((environment.devices or [environment.cpu])[0] for environment in environments)
        return ", ".join(sorted({str(name) for name in first if name}))

    by_device = grouped((used, label) for label, place in places if (used := devices(place)))
    if len(by_device) > 1:
        named = "; ".join(f"{spoken(names)} on {device}" for device, names in by_device.items())
        yield f"ranked across devices: {named}"


def _out_of_turn(places: Sequence[tuple[str, Standing]]) -> Iterator[str]:
    """Yield the names of rows that were measured after all others of the same blocks, as after a resume.

    Blocks cancel a drift of the machine only if configurations take turns.
    """
    begun = []
    for label, place in places:
        runs = [run for run in place.alternative.runs if run.throughput]
        if starts := [run.started for run in runs if run.started]:  # UTC in one format: sortable as text
            begun.append((min(starts), max(starts), label, place.alternative.sample.keys()))
    begun.sort(key=itemgetter(0))
    for number in range(1, len(begun)):
        earlier, later = begun[:number], begun[number:]
        together = len(later[0][3] & set().union(*(blocks for *_, blocks in earlier))) > 1
        if together and later[0][0] > max(last for _, last, *_ in earlier):
            names, others = ([label for _, _, label, _ in rows] for rows in (later, earlier))
            since = "not in turns: a machine that has changed since counts"
            yield f"{spoken(names)}: measured after {spoken(others)}, {since}"


def _reasons(places: Sequence[tuple[str, Standing]]) -> list[str]:
    runs = [(label, run) for label, place in places for run in place.alternative.runs]
    failed = [(reason(run), label) for label, run in runs if not run.throughput and not virtual.is_ok(run)]
    return [f"{spoken(labels)}: {text}" for text, labels in grouped(dict.fromkeys(failed)).items()]


def load_remarks(named: Sequence[tuple[str, Sequence[RunRecord]]]) -> Iterator[str]:
    """Yield the heaviest load by other processes, and which rows were measured beside some, each with its name."""
    by_row = [(label, len(runs), [load for run in runs if (load := _heaviest(run))]) for label, runs in named]
    rows = [f"{name} ({len(loads)} of {count} runs)" if count > 1 else name for name, count, loads in by_row if loads]
    if rows:
        most = max((load for *_, loads in by_row for load in loads), key=attrgetter("weight"))
        yield f"{most}{', at most,' if len(rows) > 1 else ''} during {spoken(rows)}"


def _heaviest(run: RunRecord) -> OtherLoad | None:
    """Return the heaviest load on a run's nodes that may have slowed it down."""
    return max((load for load in run.hardware.other_load or [] if load.is_busy), key=attrgetter("weight"), default=None)
