"""What a person reads at the end: the ranked table of the runs that trained, and what other workloads found."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from ptdbench.measure import perfetto
from ptdbench.records import noise
from ptdbench.records.alternatives import throughput
from ptdbench.records.store import RECORD, RESULTS
from ptdbench.report import phases, ranking, why
from ptdbench.report.certainty import interval_text, margin_text
from ptdbench.report.labels import labels, names
from ptdbench.report.ranking import Place, Ranking
from ptdbench.report.reason import reason, wrap
from ptdbench.report.text import as_text, empty_table, flops_text, size_text, three_digits
from ptdbench.terminal import command, plural

_MISSING = "-"

#: Columns that every table has.
_KEPT = ("#", "parallel", "status")

#: Columns that move into the title where there is no room and all runs have the same, and how they stand there.
_MOVED = {"ranks": "{} ranks", "batch": "batch {}"}

#: Columns that are left out where there still is no room, the first one first.
_SPARED = ("of ceiling", "vs best", "memory", "held out")

#: The same where there are repeats: how sure the order is says more than the steps of one run.
_SPARED_OF_REPEATS = ("of ceiling", "step ms (p5-p95)", "memory", "held out", "vs best")

#: From this share of a run's time on, waiting for data is mentioned.
_WAITED = 0.05

#: Runs that are explained below a table.
_EXPLAINED = 5

#: From this share of a run's time on, it is mentioned that a GPU's clocks were held back.
_HELD_BACK = 0.01


def render(records: Sequence[Mapping[str, Any]], width: int = 100) -> str:
    """The runs of each model, fastest first and those that did not finish last, as plain text.

    Columns without a figure are left out. Where there is no room for the others in ``width`` columns, the
    number of ranks and the batch stand in the title if all runs have the same, what matters least is left out and named
    below, and words fold; a figure is never cut.
    """
    trained = [record for record in records if record.get("model")]
    models = dict.fromkeys(record["model"] for record in trained)
    blocks = [_model_block([r for r in trained if r["model"] == model], width) for model in models]
    blocks += [_other_block(record, width) for record in records if not record.get("model")]
    return "\n\n".join(blocks)


#: Where Hydra's Optuna writes what it found.
SEARCHED = "optimization_results.yaml"


def closing_lines(directory: Path, records: Iterable[Mapping[str, Any]] = ()) -> str:
    """Where the records of a run or a sweep are, and how to look at phases and curves."""
    shown = shlex.quote(os.path.relpath(directory))
    is_sweep = (directory / RESULTS).exists()
    lines = [f"records      {shown}/{RESULTS if is_sweep else RECORD}"]
    if any(phases.missing(record) is None for record in records):
        lines.append(f"phases       {command('explain')} {shown}")
    for name in (perfetto.NAME, perfetto.MEMORY):
        if traces := [path for where in (name, f"*/{name}") for path in directory.glob(where)]:
            folder = f"{shown}/*" if is_sweep else shown
            size = size_text(sum(path.stat().st_size for path in traces))
            title = "trace" if name == perfetto.NAME else "memory"
            lines.append(f"{title:12} {folder}/{name} ({size}), for https://ui.perfetto.dev")
    if any(directory.glob("events.*")) or any(directory.glob("*/events.*")):
        lines.append(f"TensorBoard  tensorboard --logdir {shown}")
        if is_sweep:
            lines.append("             (its HPARAMS tab ranks the runs)")
    if (directory / SEARCHED).exists():
        lines.append(f"search       {shown}/{SEARCHED}")
    return "\n".join(lines)


def _other_block(record: Mapping[str, Any], width: int) -> str:
    """What a workload that does not train found, even if that is no success, and why it is none."""
    workload = str(record.get("workload"))
    try:
        lines = list(_shown_by_workload(record, width))
    except Exception as error:  # its types are not in the schema, and its code may be a stranger's or gone
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        lines = [f"{workload}: the results in {record['directory']} cannot be shown: {cause}"]
    if record["status"] != "ok" or not lines:
        lines.append(wrap(f"{workload}: {reason(record)}", width))
    return "\n".join(lines)


def _shown_by_workload(record: Mapping[str, Any], width: int) -> Iterator[str]:
    """What the workload's class makes of what it left in the record's field of its name."""
    if found := record.get(str(record.get("workload"))):
        yield get_object(record["config"]["workload"]["_target_"]).show(found, width)


def _model_block(records: Sequence[Mapping[str, Any]], width: int) -> str:
    """Title, table and remarks for the runs of one model."""
    unit = "tokens" if any(_figure(record, "tokens_per_second") for record in records) else "samples"
    found = ranking.rank(records, noise.look_up(records))
    called = labels([place.alternative.typical for place in found.places])
    rows = [
        _row(place, label, f"{unit}/s", len(found.places)) for place, label in zip(found.places, called, strict=True)
    ]
    table, moved, left_out = _fitted(rows, width)
    typical = {label: place.alternative.typical for label, place in zip(called, found.places, strict=True)}
    certainty = ranking.remark(found)
    remarks = [
        *([f"left out in {width} columns: {', '.join(left_out)}"] if left_out else []),
        *([wrap(certainty, width)] if certainty else []),
        *_reasons(dict(zip(called, found.places, strict=True)), width),
        *_mfu_remarks([place.alternative.typical for place in found.places if place.rank], width),
        *_ceiling_remarks(typical, width),
        *_data_remarks(typical, width),
        *_clock_remarks(typical, width),
        *_check_remarks(records, width),
        *_why(found, width),
    ]
    return "\n".join([_title(records, moved), table, *remarks])


def _row(place: Place, label: str, heading: str, places: int) -> dict[str, str]:
    """The cells of an alternative, by their headings."""
    runs = place.alternative.runs
    return {
        "#": _span(place.rank),
        "runs": _text(len(runs) if len(runs) > 1 else None),
        **_cells(place, label, heading, places),
        "status": _statuses(runs),
    }


def _statuses(runs: Sequence[Mapping[str, Any]]) -> str:
    """``ok``, or ``4 ok, 1 oom``."""
    counts = Counter(str(run["status"]) for run in runs)
    return ", ".join(f"{count} {status}" if len(counts) > 1 else status for status, count in counts.items())


def _span(rank: tuple[int, int] | None) -> str:
    """``2``, or ``2-4`` for a rank that is not known better."""
    return "-".join(map(str, dict.fromkeys(rank))) if rank else _MISSING


def _reasons(places: Mapping[str, Place], width: int) -> list[str]:
    """Why runs are not ok, by their labels, each reason once."""
    alike: dict[str, list[str]] = {}
    for label, place in places.items():
        failed = [run for run in place.alternative.runs if not throughput(run)]
        for said in dict.fromkeys(map(reason, failed)):
            alike.setdefault(said, []).append(label)
    named = {said: [first, *([plural(len(more), "other")] if more else [])] for said, (first, *more) in alike.items()}
    return [wrap(f"{' and '.join(names)}: {said}", width) for said, names in named.items()]


def _fitted(rows: Sequence[Mapping[str, str]], width: int) -> tuple[str, list[str], list[str]]:
    """The table in ``width`` columns, what moved from it into the title, and the headings that were left out."""
    filled = [name for name in rows[0] if name in _KEPT or any(row[name] != _MISSING for row in rows)]
    moved: list[str] = []
    left_out: list[str] = []
    text = _drawn(rows, filled, width)
    for name, title in _MOVED.items():
        values = {row[name] for row in rows}
        if _width(text) > width and name in filled and len(values) == 1:
            filled.remove(name)
            moved.append(title.format(*values))
            text = _drawn(rows, filled, width)
    for name in _SPARED_OF_REPEATS if "runs" in filled else _SPARED:
        if _width(text) > width and name in filled:
            filled.remove(name)
            left_out.append(name)
            text = _drawn(rows, filled, width)
    return text, moved, left_out


def _drawn(rows: Sequence[Mapping[str, str]], names: Sequence[str], width: int) -> str:
    table = empty_table(*names, words=["status"], folding="parallel")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return as_text(table, width)


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def _cells(place: Place, label: str, heading: str, places: int) -> dict[str, str]:
    """The cells between its runs and its status: throughput of all runs, the rest of a typical one."""
    record = place.alternative.typical
    mfu, share, memory = (_figure(record, name) for name in ("mfu", "share_of_ceiling", "peak_memory_bytes"))
    return {
        "parallel": label,
        "ranks": _text(record.get("world_size")),
        "batch": _text(record.get("global_batch")),
        heading: _rate(place),
        "vs best": _ratio(place) if places > 1 else _MISSING,
        "step ms (p5-p95)": _step_time(_figure(record, "step_seconds")),
        "memory": _bytes(memory),
        "MFU": _text(mfu and 100 * mfu, ".1f", "%"),
        "of ceiling": _text(share and 100 * share, ".1f", "%"),
        "loss": _text(record.get("final_loss"), ".3f"),
        "held out": _evaluation(record),
    }


def _rate(place: Place) -> str:
    """``10,250 ±1.8%``, of a run that was stopped its throughput until then."""
    metrics = place.alternative.typical.get("metrics") or {}
    rate = place.rate or metrics.get("tokens_per_second") or metrics.get("samples_per_second")
    shown = _text(rate, ",.0f" if (rate or 0) >= 100 else ",.1f")
    return f"{shown}{margin_text(place.margin)}"


def _ratio(place: Place) -> str:
    """``0.65x (0.63-0.67)``."""
    return f"{_text(place.ratio, '.2f', 'x')}{interval_text(place.against_best, 2)}"


def _evaluation(record: Mapping[str, Any]) -> str:
    """What the last evaluation said of the model: its accuracy, its bits per byte of text, or its loss."""
    last: Mapping[str, Any] = next(reversed(record.get("evaluations") or [{}]))
    if last.get("top1") is not None:
        return f"{100 * last['top1']:.1f}%"
    if last.get("bits_per_byte") is not None:
        return f"{last['bits_per_byte']:.3f} b/B"
    return _text(last.get("loss"), ".3f")


def _title(records: Sequence[Mapping[str, Any]], moved: Sequence[str]) -> str:
    parameters = next((r["parameters"] for r in records if r.get("parameters")), None)
    precisions = dict.fromkeys(str(r["precision"]) for r in records if r.get("precision"))
    parts = [records[0]["model"], _text(parameters, ",", " parameters"), ", ".join(precisions), *moved]
    return " · ".join(part for part in parts if part and part != _MISSING)


def _mfu_remarks(records: Iterable[Mapping[str, Any]], width: int) -> list[str]:
    reasons = dict.fromkeys(_figure(record, "mfu_reason") for record in records)
    return [wrap(f"no MFU: {reason}", width) for reason in reasons if reason]


def _ceiling_remarks(records: Mapping[str, Mapping[str, Any]], width: int) -> Iterator[str]:
    """Runs, by their labels, that passed their ceiling, and ceilings that may be too low."""
    loaded: dict[str, None] = {}
    for label, record in records.items():
        rate, share = _figure(record, "ceiling_flops_per_second"), _figure(record, "share_of_ceiling")
        if remark := (record.get("remarks") or {}).get("ceiling"):
            yield wrap(f"{label}: {remark}", width)
        elif share and share > 1:
            why = "it is re-measured after a run that finishes"
            yield wrap(f"{label}: ceiling passed: was {flops_text(rate)}; {why}", width)
        elif share and _figure(record, "ceiling_beside_load"):
            loaded[flops_text(rate)] = None
    for text in loaded:
        yield wrap(f"ceiling of {text}: taken beside other load, and perhaps too low", width)


def _data_remarks(records: Mapping[str, Mapping[str, Any]], width: int) -> Iterator[str]:
    """Runs, by their labels, whose steps waited for their data."""
    for label, record in records.items():
        if (share := _figure(record, "data_wait_share")) and share >= _WAITED:
            yield wrap(f"{label}: {share:.0%} of the steps' time was spent waiting for data", width)


def _clock_remarks(records: Mapping[str, Mapping[str, Any]], width: int) -> Iterator[str]:
    """Runs, by their labels, whose GPUs were held back, and the GPU that was the most."""
    for label, record in records.items():
        clocks = (record.get("hardware") or {}).get("clocks") or []
        held = [(share, cause, of["rank"]) for of in clocks for cause, share in (of["held_back"] or {}).items()]
        held = [one for one in held if one[0] > _HELD_BACK]
        if held:
            share, cause, rank = max(held)
            more = len({one[2] for one in held}) - 1
            others = f", and {plural(more, 'other')} by less" if more else ""
            yield wrap(f"{label}: rank {rank}'s GPU was held back for {share:.0%} of the time: {cause}{others}", width)


def _check_remarks(records: Iterable[Mapping[str, Any]], width: int) -> list[str]:
    """What the checks before the runs found unsound."""
    found = dict.fromkeys((record.get("remarks") or {}).get("check") for record in records)
    return [wrap(remark, width) for remark in found if remark]


def _why(found: Ranking, width: int) -> list[str]:
    """Why the runs that come next are slower than the fastest one; ``ptdbench explain`` tells of all of them.

    What is tied with the fastest one is not explained, but where nothing is known of the order.
    """
    ranked = [place for place in found.places if place.rank]
    is_known = found.spread or any(place.against_best for place in ranked)
    kept = [place for place in ranked if not is_known or place is ranked[0] or (place.rank and place.rank[0] > 1)]
    explained = [place.alternative.typical for place in kept if not phases.missing(place.alternative.typical)]
    called = dict(zip(names(explained), explained, strict=True))
    doubts = [doubt for name, record in called.items() for doubt in why.doubt(record, name)]
    return [wrap(line, width) for line in [*why.against_fastest(called)[:_EXPLAINED], *doubts[:_EXPLAINED]]]


def _figure(record: Mapping[str, Any], name: str) -> Any:
    return (record.get("metrics") or {}).get(name)


def _text(value: float | None, form: str = "", unit: str = "") -> str:
    return _MISSING if value is None else f"{value:{form}}{unit}"


def _step_time(step_seconds: Mapping[str, float | None] | None) -> str:
    """``{"median": 0.1986, "p5": 0.19, "p95": 0.2052}`` becomes ``199 (190-205)``, in milliseconds."""
    median, p5, p95 = ((step_seconds or {}).get(name) for name in ("median", "p5", "p95"))
    if median is None or p5 is None or p95 is None:
        return _MISSING
    return f"{three_digits(1e3 * median)} ({three_digits(1e3 * p5)}-{three_digits(1e3 * p95)})"


def _bytes(value: int | None) -> str:
    """``1288490188`` becomes ``1.2 GiB``."""
    if value is None:
        return _MISSING
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
