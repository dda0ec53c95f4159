"""Rows and columns of runs, for terminals, Markdown and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from ptdbench.comparison import ranking
from ptdbench.comparison.ranking import Alternative, Standing, interval_text, margin_text, sweep_of
from ptdbench.records.run_record import RunRecord
from ptdbench.report import remarks, steps, text, virtual
from ptdbench.report.labels import names, title
from ptdbench.report.text import MISSING, figure_text
from ptdbench.units import memory_text, three_digits


@dataclass(frozen=True)
class Row:
    """A row of a table: a run, or an alternative with its repeats."""

    place: Standing
    name: str  #: Its name, in tables, lines and figures.

    @property
    def runs(self) -> Sequence[RunRecord]:
        """All runs of the row."""
        return self.place.alternative.runs

    @property
    def run(self) -> RunRecord:
        """The typical run."""
        return self.place.alternative.median_run


@dataclass(frozen=True, kw_only=True)
class Column(text.Column[Row]):
    """A column of runs; ``{unit}`` in its heading is tokens or samples, ``{device}`` GPU or rank."""

    name: str  #: Its name in the filter of the page.
    value: Callable[[Row], Any]  #: The value that the page sorts and compares, in units of records; a range's start.
    scale: float = 1.0  #: Factor from those units to the units of the filter of the page.
    field: str = ""  #: Its name in the rows of the page, if different.
    higher_is_better: bool = False  #: Whether the largest figure is the best one.
    always_shown: bool = False  #: Whether every table has it, even without figures.
    #: Whether it is of interest for these rows, some of which have a figure in it.
    applies: Callable[[Sequence[Row]], bool] = lambda rows: True
    tables: tuple[str, ...] = ("terminal", "file", "page", "paper")  #: Where tables have it.
    #: What the title of a table without room for it says of its text, if all rows have the same.
    in_title: Callable[[str], str] | None = None
    #: ``drop_order`` with repeats, if different: certainty of the order then matters more than steps of one run.
    drop_order_with_repeats: int | None = None

    def in_table(self, repeats: bool, is_alike: bool) -> Column:
        """Return the column with its order of omission; a column that is equal in all rows is omitted first."""
        order = self.drop_order_with_repeats if repeats else None
        return replace(self, drop_order=-1 if is_alike else self.drop_order if order is None else order)

    def on_page(self) -> dict[str, object]:
        """Return the column's description for the page."""
        return {
            "name": self.name,
            "head": "configuration" if self.name == "configuration" else self.heading,
            "field": self.field or self.name,
            "scale": self.scale,
            "higher_is_better": self.higher_is_better,
            "is_text": self.is_text,
        }


def _rate(row: Row) -> str:
    """``10,250 ±1.8%``; for a run that was stopped, its throughput until then."""
    return f"{figure_text(row.place.rate or row.run.metrics.rate, three_digits)}{margin_text(row.place.margin)}"


def _rate_per_device(row: Row) -> float | None:
    ranks = row.run.world_size or 1
    return row.place.rate / ranks if row.place.rate and ranks > 1 else None


def _step_time(row: Row) -> str:
    """``{"mean": 0.1986, "p5": 0.19, "p95": 0.2052}`` becomes ``199 (190-205)``, in milliseconds.

    The mean is shown because throughput is a mean, and the phases of a step add up to it.
    """
    times = row.run.step_seconds
    if times.mean is None:
        return MISSING
    ends = "" if times.p5 is None or times.p95 is None else f" ({_milliseconds(times.p5)}-{_milliseconds(times.p95)})"
    return f"{_milliseconds(times.mean)}{ends}"


def _milliseconds(seconds: float) -> str:
    return three_digits(1e3 * seconds)


def _statuses(row: Row) -> str:
    """``ok``, or ``4 ok, 1 oom``; ``virtual ok`` for runs that are not measured; ``does not fit`` for a plan."""
    named = (f"{run.kind or ''} {run.status}".strip() for run in row.runs)
    counts = Counter("does not fit" if name == "planned oom" else name for name in named)
    return ", ".join(f"{count} {status}" if len(counts) > 1 else status for status, count in counts.items())


def _joules(row: Row) -> float | None:
    energy = row.run.hardware.gpu
    return energy.joules_per_sample if energy else None


def _held_out(row: Row) -> tuple[float | None, str]:
    """Return the last evaluation's accuracy, bits per byte of text, or loss, and its format."""
    if not row.run.evaluations:
        return None, ""
    last = row.run.evaluations[-1]
    if last.top1 is not None:
        return last.top1, "{:.1%}"
    return (last.loss, "{:.3f}") if last.bits_per_byte is None else (last.bits_per_byte, "{:.3f} b/B")


def _evaluation(row: Row) -> str:
    figure, form = _held_out(row)
    return figure_text(figure, form.format)


def _figure(
    heading: str, name: str, value: Callable[[Row], Any], write: Callable[[Any], str] = str, **more: Any
) -> Column:
    """Return a column whose text is its value."""
    return Column(heading, cell=lambda row: figure_text(value(row), write), name=name, value=value, **more)


#: Tables of columns that papers have no room for.
_NOT_IN_PAPERS = ("terminal", "file", "page")


def planned(heading: str, size: Callable[[int], str] = memory_text) -> Column:
    """Return a column that only plans have, of :data:`ptdbench.report.virtual.PLANNED`; ``size`` formats bytes."""
    is_size, field = heading not in virtual.NO_SIZES, f"plan_{heading.replace(' ', '_')}"
    return _figure(heading, name=f"{field}_mib" if is_size else field, scale=2**-20 if is_size else 1.0, field=field,
                   value=lambda row: virtual.plan_figures(row.run).get(heading), write=size if is_size else str,
                   tables=Column.tables if heading in ("mb", "left", "fits", "max mb") else _NOT_IN_PAPERS,
                   is_text=heading == "fits", drop_order=virtual.PLANNED[heading])  # fmt: skip


_THREE_DECIMALS, _PERCENT = "{:.3f}".format, "{:.1%}".format

#: All columns, in display order.
COLUMNS = (
    _figure("#", "rank", lambda row: row.place.rank, lambda ends: "-".join(map(str, dict.fromkeys(ends))),
            always_shown=True),
    Column("runs", name="runs", cell=lambda row: str(len(row.runs)) if len(row.runs) > 1 else MISSING,
           value=lambda row: len(row.runs), field="count"),
    _figure("parallel", "configuration", attrgetter("name"), field="name", is_text=True, always_shown=True,
            min_width=0),
    _figure("ranks", "ranks", attrgetter("run.world_size"),
            in_title=lambda text: "1 rank" if text == "1" else f"{text} ranks"),
    _figure("nodes", "nodes", lambda row: len(row.run.nodes) or None, tables=("page",),
            applies=lambda rows: any(len(row.run.nodes) > 1 for row in rows)),
    _figure("batch", "batch", attrgetter("run.global_batch"), in_title="batch {}".format),
    *(planned(heading) for heading in virtual.PLANNED if heading not in ("allocated", "reserved")),  # those below
    _figure("predicted ms", "predicted_ms", attrgetter("run.predicted.step_seconds"), _milliseconds, scale=1e3,
            field="predicted", tables=("file", "page"), drop_order=4),
    _figure("prediction off", "prediction_off", attrgetter("run.prediction_error"), "{:+.1%}".format, scale=100,
            tables=("file", "page"), drop_order=3),
    _figure("bound by", "bound_by", attrgetter("run.predicted.bound_by"), is_text=True, tables=("file", "page"),
            drop_order=3),
    Column("{unit}/s", name="throughput", cell=_rate, value=lambda row: row.place.rate, field="rate",
           higher_is_better=True),
    _figure("{unit}/s/{device}", "throughput_per_device", _rate_per_device, three_digits, higher_is_better=True,
            drop_order=-2),  # it follows from others
    Column("vs best", name="ratio", value=lambda row: row.place.ratio, higher_is_better=True,  # 0.65x (0.63-0.67)
           cell=lambda row: figure_text(row.place.ratio, "{:.2f}x".format) + interval_text(row.place.against_best, 2),
           applies=lambda rows: len(rows) > 1, drop_order=2, drop_order_with_repeats=5),
    Column("step ms (p5-p95)", name="step_ms", cell=_step_time, value=attrgetter("run.step_seconds.mean"), scale=1e3,
           field="step", drop_order_with_repeats=2, tables=_NOT_IN_PAPERS),
    _figure("memory", "memory_mib", attrgetter("run.metrics.peak_memory_bytes"), memory_text, scale=2**-20,
            field="memory", drop_order=3),
    _figure("reserved", "reserved_mib", attrgetter("run.metrics.peak_reserved_bytes"), memory_text, scale=2**-20,
            field="reserved", drop_order=1, tables=_NOT_IN_PAPERS),
    _figure("MFU", "mfu", attrgetter("run.metrics.mfu"), _PERCENT, scale=100, higher_is_better=True),
    _figure("MFU causal", "mfu_causal", attrgetter("run.metrics.mfu_causal"), _PERCENT, scale=100,
            higher_is_better=True, tables=("page",)),
    _figure("% of GEMM", "of_ceiling", attrgetter("run.metrics.share_of_ceiling"), _PERCENT, scale=100,
            higher_is_better=True, drop_order=0, tables=_NOT_IN_PAPERS),
    _figure("J/sample", "joules", _joules, three_digits, tables=("page",)),
    _figure("loss", "loss", attrgetter("run.final_loss"), _THREE_DECIMALS),
    Column("val", name="held_out", cell=_evaluation, value=lambda row: _held_out(row)[0], drop_order=4),
    _figure("status", "status", _statuses, is_text=True, always_shown=True, tables=_NOT_IN_PAPERS),
    _figure("sweep", "sweep", lambda row: str(sweep_of(row.run)), is_text=True, tables=("page",),
            applies=lambda rows: len({sweep_of(row.run) for row in rows}) > 1),
)  # fmt: skip


_NAMED = {column.name: column for column in COLUMNS}

#: The columns of predicted steps in tables of plans, which are omitted last.
PREDICTED = (
    _NAMED["rank"],
    replace(_NAMED["ratio"], heading="vs best (95%)", drop_order=None),
    _figure("tokens/s", "predicted_rate", attrgetter("run.predicted.tokens_per_second"), three_digits, drop_order=12),
    replace(_NAMED["predicted_ms"], heading="step ms", drop_order=None),
    _figure("MFU", "predicted_mfu", attrgetter("run.predicted.mfu"), _PERCENT),
    replace(_NAMED["bound_by"], drop_order=None),
)


#: Maximum number of runs to explain below a table; ``ptdbench explain`` covers all.
_EXPLAINED = 5


@dataclass(frozen=True)
class Section:
    """Comparable alternatives: of one model and global batch."""

    rows: list[Row]  #: In the order of their ranking; at least one.
    unit: str  #: The unit of their throughput, see :func:`unit`.
    answer: str  #: The sentence that says which row is fastest, as far as that is known.
    remarks: list[str]  #: Sentences on the order, failures and measurements.
    why: list[str]  #: Sentences on why the next runs are slower than the fastest one.
    is_only: bool = True  #: Whether no other section has the same model.

    @property
    def model(self) -> str | None:
        """Their model."""
        return self.rows[0].run.model

    @property
    def name(self) -> str:
        """The model; if several sections have it, the whole title."""
        return str(self.model) if self.is_only else self.title()

    def title(self, moved: Iterable[str] = ()) -> str:
        """Return the title: what all runs have in common, and columns ``moved`` there."""
        run = self.rows[0].run
        sizes = {"batch {}": run.requested_batch, "{} tokens a sample": run.tokens_per_sample}
        apart = [] if self.is_only else [form.format(size) for form, size in sizes.items() if size]
        return title([run for row in self.rows for run in row.runs], dict.fromkeys([*apart, *moved]))

    def columns(self, where: str = "terminal") -> list[Column]:
        """Return the columns of a table in a terminal, a file, the page or a paper: those that say anything."""
        columns = [column for column in COLUMNS if where in column.tables and self._shows(column)]
        words = {"unit": self.unit, "device": self.device}
        return [replace(column, heading=column.heading.format(**words)) for column in columns]

    def _shows(self, column: Column) -> bool:
        has_figures = any(column.cell(row) != MISSING for row in self.rows)
        return column.always_shown or (has_figures and column.applies(self.rows))

    @property
    def device(self) -> str:
        """What a rank is: ``GPU``, or ``rank`` on a CPU."""
        return "GPU" if any(row.run.environment.devices for row in self.rows) else "rank"


def sections(alternatives: Iterable[Alternative]) -> list[Section]:
    """Return a section for each group of comparable alternatives, in the order of their first runs; all must train."""
    made = [*map(_section, ranking.of_models(alternatives))]
    counts = Counter(section.model for section in made)
    return [replace(section, is_only=counts[section.model] == 1) for section in made]


def answers(sections: Sequence[Section]) -> list[str]:
    """Return the sentence that answers which row is fastest, of each section; of several, with their names."""
    return [section.answer if len(sections) == 1 else f"{section.name}: {section.answer}" for section in sections]


def unit(records: Iterable[RunRecord]) -> str:
    """Return the unit of throughput: ``tokens``, or ``samples`` if these are not token sequences."""
    rates = ((record.metrics.tokens_per_second, record.predicted.tokens_per_second) for record in records)
    return "tokens" if any(map(any, rates)) else "samples"


def _section(places: Sequence[Standing]) -> Section:
    named = names([place.alternative.median_run for place in places])
    rows = list(map(Row, places, named))
    if not any(place.rate for place in places):
        rows = _predicted_order(rows)
    counted = unit(run for row in rows for run in row.runs)
    return Section(rows, counted, _answer(rows, counted), remarks.of_rows(places, named), _why(rows))


def _predicted_order(rows: Sequence[Row]) -> list[Row]:
    """Order rows without any measurement by their predicted steps; their rates stay unknown."""
    of_run = {id(row.run): row for row in rows}
    places = [
        (place, of_run[id(place.alternative.runs[0])]) for place in ranking.rank_predicted([row.run for row in rows])
    ]
    return [Row(replace(place, rate=None, alternative=row.place.alternative), row.name) for place, row in places]


def _answer(rows: Sequence[Row], unit: str) -> str:
    others = [(row.name, row.run) for row in rows if not row.place.rate]
    lost = [f"{name} ({run.status})" for name, run in others if not (virtual.is_ok(run) or virtual.does_not_fit(run))]
    if len(others) < len(rows):
        parts = [ranking.answer([(row.name, row.place) for row in rows], unit)]
    else:
        parts = [*virtual.answer(others)]
    if lost:
        parts.append(f"{'No throughput' if parts else 'No run finished'}: {ranking.spoken(lost)}")
    return f"{'. '.join(parts)}."


def _why(rows: Sequence[Row]) -> list[str]:
    groups = steps.behind_first({row.name: row.place for row in rows if row.place.rate})
    doubts = [doubt for group in groups for name, run in group.items() for doubt in steps.doubt_about_phases(run, name)]
    return [*steps.against_first(groups)[:_EXPLAINED], *doubts[:_EXPLAINED]]
