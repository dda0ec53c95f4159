"""The runs of one model as every form of a table shows them: rows of words and figures, and what is said below them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ptdbench.records import noise
from ptdbench.records.alternatives import Alternative, throughput
from ptdbench.records.schema import Hardware, Metrics, Remarks, Written, part
from ptdbench.report import losses, ranking, virtual, why
from ptdbench.report.columns import COLUMNS, MISSING, Column, Row, text
from ptdbench.report.labels import labels, names
from ptdbench.report.ranking import Place, Ranking
from ptdbench.report.reason import reason
from ptdbench.terminal import plural
from ptdbench.units import flops_text

#: From this share of a run's time on, waiting for data is mentioned.
_WAITED = 0.05

#: Runs that are explained below a table.
_EXPLAINED = 5

#: From this share of a run's time on, it is mentioned that a GPU's clocks were held back.
_HELD_BACK = 0.01


#: A run and its name.
_Named = tuple[str, Written]


@dataclass(frozen=True)
class Block:
    """The alternatives of one model.

    Attributes:
        ranking: All of them, in the order of the rows.
        labels: What each is called in a table, which has columns for the ranks and the global batch.
        names: What each is called in lines and figures.
        rows: The cells of each by their headings, :data:`MISSING` where there is no figure; at least one.
        remarks: Sentences on the order, on failures and on what was measured.
        why: Sentences on why the runs that come next are slower than the fastest one.
    """

    ranking: Ranking
    labels: list[str]
    names: list[str]
    rows: list[dict[str, str]]
    remarks: list[str]
    why: list[str]

    def title(self, moved: Sequence[str] = ()) -> str:
        """The model, what all its runs have in common, and what has no column."""
        records = [run for place in self.ranking.places for run in place.alternative.runs]
        parameters = next((r["parameters"] for r in records if r.get("parameters")), None)
        precisions = dict.fromkeys(str(r["precision"]) for r in records if r.get("precision"))
        parts = [records[0]["model"], text(parameters, ",", " parameters"), ", ".join(precisions), *moved]
        return " · ".join(part for part in parts if part and part != MISSING)

    def columns(self) -> dict[str, Column]:
        """Those with a figure, by their headings."""
        shown = zip(self.rows[0], (column for column in COLUMNS if column.cell), strict=True)
        return {name: one for name, one in shown if one.kept or any(row[name] != MISSING for row in self.rows)}


def blocks(found: Sequence[Alternative]) -> list[Block]:
    """A block for each model, in the order of their first runs; each alternative has runs of a model."""
    models: dict[str, list[Alternative]] = {}
    for one in found:
        models.setdefault(one.typical["model"], []).append(one)
    return [_block(of_model) for of_model in models.values()]


def unit(records: Iterable[Written]) -> str:
    """What throughput counts: ``tokens``, or ``samples`` where these are no sequences of them."""
    return "tokens" if any(part(record, Metrics).tokens_per_second for record in records) else "samples"


def _block(alternatives: Sequence[Alternative]) -> Block:
    records = [run for one in alternatives for run in one.runs]
    counted = unit(records)
    found = ranking.rank(alternatives, noise.look_up(records))
    typical = [place.alternative.typical for place in found.places]
    called, named = labels(typical), names(typical)
    by_name = list(zip(named, typical, strict=True))
    certainty = ranking.remark(found)
    remarks = [
        *([certainty] if certainty else []),
        *_reasons(list(zip(named, found.places, strict=True))),
        *_mfu_remarks([place.alternative.typical for place in found.places if place.rank]),
        *_ceiling_remarks(by_name),
        *losses.remarks([(name, run) for name, run in by_name if run["status"] == "ok"]),
        *_data_remarks(by_name),
        *_clock_remarks(by_name),
        *_check_remarks(records),
        *virtual.remarks(records),
    ]
    rows = [
        {column.heading.format(unit=counted): column.cell(row) for column in COLUMNS if column.cell}
        for place, label in zip(found.places, called, strict=True)
        for row in [Row(place, label, is_alone=len(called) == 1)]
    ]
    return Block(found, called, named, rows, remarks, _why(found, named))


def _reasons(places: Sequence[tuple[str, Place]]) -> list[str]:
    """Why runs are not ok, by their names, each reason once."""
    alike: dict[str, list[str]] = {}
    for label, place in places:
        failed = [run for run in place.alternative.runs if not throughput(run) and not _came_to_its_end(run)]
        for said in dict.fromkeys(map(reason, failed)):
            alike.setdefault(said, []).append(label)
    named = {said: [first, *([plural(len(more), "other")] if more else [])] for said, (first, *more) in alike.items()}
    return [f"{' and '.join(names)}: {said}" for said, names in named.items()]


def _came_to_its_end(run: Written) -> bool:
    """Of runs without a throughput."""
    return virtual.is_ok(run) or (run.get("kind") == "planned" and run["status"] == "ok")


def _mfu_remarks(records: Iterable[Written]) -> list[str]:
    reasons = dict.fromkeys(part(record, Metrics).mfu_reason for record in records)
    return [f"no MFU: {reason}" for reason in reasons if reason]


def _ceiling_remarks(records: Sequence[_Named]) -> Iterator[str]:
    """Runs, by their names, that passed their ceiling, and ceilings that may be too low."""
    loaded: dict[str, None] = {}
    for label, record in records:
        metrics = part(record, Metrics)
        rate, share = metrics.ceiling_flops_per_second, metrics.share_of_ceiling
        if remark := part(record, Remarks).ceiling:
            yield f"{label}: {remark}"
        elif share and rate and share > 1:
            yield f"{label}: ceiling passed: was {flops_text(rate)}; it is re-measured after a run that finishes"
        elif share and rate and metrics.ceiling_beside_load:
            loaded[flops_text(rate)] = None
    for too_low in loaded:
        yield f"ceiling of {too_low}: taken beside other load, and perhaps too low"


def _data_remarks(records: Sequence[_Named]) -> Iterator[str]:
    """Runs, by their names, whose steps waited for their data."""
    for label, record in records:
        if (share := part(record, Metrics).data_wait_share) and share >= _WAITED:
            yield f"{label}: {share:.0%} of the steps' time was spent waiting for data"


def _clock_remarks(records: Sequence[_Named]) -> Iterator[str]:
    """Runs, by their names, whose GPUs were held back, and the GPU that was the most."""
    for label, record in records:
        clocks = part(record, Hardware).clocks or []
        held = [(share, cause, of.rank) for of in clocks for cause, share in (of.held_back or {}).items()]
        held = [one for one in held if one[0] > _HELD_BACK]
        if held:
            share, cause, rank = max(held)
            more = len({one[2] for one in held}) - 1
            others = f", and {plural(more, 'other')} by less" if more else ""
            yield f"{label}: rank {rank}'s GPU was held back for {share:.0%} of the time: {cause}{others}"


def _check_remarks(records: Iterable[Written]) -> list[str]:
    """What the checks before the runs found unsound."""
    found = dict.fromkeys(part(record, Remarks).check for record in records)
    return [remark for remark in found if remark]


def _why(found: Ranking, named: Sequence[str]) -> list[str]:
    """Why the runs that come next are slower than the first one, where that order is known.

    ``ptdbench explain`` tells of all of them.
    """
    ranked = {name: place for name, place in zip(named, found.places, strict=True) if place.rank}
    groups = why.in_order(ranked)
    doubts = [doubt for group in groups for name, run in group.items() for doubt in why.doubt(run, name)]
    return [*why.against_first(groups)[:_EXPLAINED], *doubts[:_EXPLAINED]]
