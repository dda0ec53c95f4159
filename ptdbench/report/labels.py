"""Labels of runs and environments: how a run is parallelized, and what distinguishes it from others."""

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ptdbench.comparison.ranking import sweep_of
from ptdbench.grouping import grouped
from ptdbench.parallel.dims import Dims
from ptdbench.records.effects import EARLIER, OF_CHOICE, affects, leaves, short_names
from ptdbench.records.run_record import RunRecord
from ptdbench.report.text import range_text
from ptdbench.terminal import plural

#: Options that only repeat what the name of a choice says.
_REPEATING = frozenset(OF_CHOICE) - {"name"}

#: Maximum characters of a value to show.
_LIMIT = 40


def differences(records: Sequence[RunRecord]) -> list[str]:
    """Return for each record the options whose values differ from the others': ``activations=recompute seed=2``.

    An option of :func:`varying` is called by the last part of its name if that is unique among them. For a group whose
    choice differs, only the choice is named: ``optimizer=sgd``.
    """
    differing = varying(by_option(records))
    differing = {
        name: values for name, values in differing.items() if name.partition(".")[0] not in differing or "." not in name
    }
    called = short_names(differing)
    return [
        " ".join(f"{called[name]}={_cut(text)}" for name, texts in differing.items() if (text := texts[place]))
        for place in range(len(records))
    ]


def by_option(records: Sequence[RunRecord]) -> dict[str, list[str | None]]:
    """Return each option of any run, with its value in each run as typed; ``None`` for runs without it."""
    configs = [options(record) for record in records]
    names = dict.fromkeys(name for config in configs for name in config)
    return {name: [as_text(config[name]) if name in config else None for config in configs] for name in names}


def varying(values: Mapping[str, list[str | None]]) -> dict[str, list[str | None]]:
    """Return the options whose values differ between runs.

    Of options that always differ together and have the same last part, such as ``seed`` and ``data.seed``, only the
    first is returned.
    """
    differing = {name: texts for name, texts in values.items() if len(set(texts)) > 1}
    unique = {(_last(name), *texts): name for name, texts in reversed(differing.items())}
    kept = set(unique.values())
    return {name: texts for name, texts in differing.items() if name in kept}


def options(record: RunRecord) -> dict[str, object]:
    """Return the options of a run by dotted name, shallow ones first; ``optimizer.name`` becomes ``optimizer``."""
    kept = [
        (name.removesuffix(".name"), value)
        for name, value in sorted(leaves(record.config), key=lambda leaf: leaf[0].count("."))
        if not affects(name, "start", "sweep") and _last(name) not in _REPEATING
    ]
    return {**(EARLIER if "precision" in record.config else {}), **dict(kept)}


def as_text(value: object) -> str:
    """Return a string unchanged, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LIMIT else f"{text[:_LIMIT]}…"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


#: A function that returns more words on a run, empty if unknown; ``None`` stands for the options that differ.
_Detail = Callable[[RunRecord], str] | None


def names(records: Sequence[RunRecord]) -> list[str]:
    """Label runs by how each is parallelized, the same in tables, lines and figures; with models if there are several.

    ``pdp 2x4 1f1b`` is 2 replicas of 4 stages, ``hsdp 2x8`` 2 replicas in 8 shards each.
    """
    several = len({record.model for record in records}) > 1
    first = [f"{record.model} {_parallel(record)}" if several else _parallel(record) for record in records]
    return _distinguished(records, first, [*_DETAILS, *_PLACES])


def titles(records: Sequence[RunRecord]) -> list[str]:
    """Name each run for the display of its sweep, where it is shown alone: ``gpt_tiny pdp gpipe b16``.

    A name has model and preset, or the workload of a run without a model, then what differs between runs of the same
    name. Records of runs that have not started suffice.
    """
    return _distinguished(records, [name(record) for record in records], _DETAILS)


def _distinguished(records: Sequence[RunRecord], names: list[str], details: Sequence[_Detail]) -> list[str]:
    """Add details to the names, one after another, for runs that look the same without them."""
    for detail in details:
        for places in grouped((name, place) for place, name in enumerate(names)).values():
            same = [records[place] for place in places]
            words = [detail(record) for record in same] if detail else differences(same)
            if len(set(filter(None, words))) > 1:
                for place, text in zip(places, words, strict=True):
                    names[place] = f"{names[place]} {text}".rstrip()
    return names


def title(runs: Sequence[RunRecord], more: Iterable[str] = ()) -> str:
    """Return what runs of one model have in common: ``gpt_tiny · 842,496 parameters · fp32``, then ``more``.

    In bf16 and fp16 it names the kernels, by which the arithmetic differs: ``bf16 · kernels=fused``.
    """
    sizes = [run.parameters for run in runs if run.parameters]
    parameters = f"{range_text(sizes, '{:,}'.format)} parameters" if sizes else ""
    precisions = dict.fromkeys(run.precision for run in runs if run.precision)
    kernels = sorted({run.kernels for run in runs if run.kernels})
    is_narrow = not {"bf16", "fp16"}.isdisjoint(precisions)
    whose = f"kernels={','.join(kernels)}" if is_narrow or "torch" in kernels else ""
    parts = [runs[0].model, parameters, ", ".join(precisions), whose, *more]
    return " · ".join(filter(None, parts))


def name(record: RunRecord) -> str:
    """Name a run in a word or two: model and preset, or the workload if there is no model."""
    return " ".join(filter(None, (record.model, record.parallel))) or record.workload


def _parallel(record: RunRecord) -> str:
    return " ".join(filter(None, (str(record.parallel or record.workload), _degrees(record), _schedule(record))))


def _degrees(record: RunRecord) -> str:
    above = {name: degree for name in Dims.rows() if (degree := getattr(record.layout, name) or 1) > 1}
    if {*above} - {"replicate", "shard", "pipeline"}:  # too many degrees to remember their order
        return " ".join(f"{Dims.rows()[name].letter}{degree}" for name, degree in above.items())
    if "pipeline" not in above and len(above) < 2:
        # Show a degree that was set explicitly: with parallel=ddp, shard=2 shards.
        typed = [name for name in above if record.option(f"parallel.{name}", int) is not None]
        return "".join(f"{Dims.rows()[name].letter}{above[name]}" for name in typed)
    return "x".join(map(str, ({"replicate": 1} | above).values()))


def _schedule(record: RunRecord) -> str:
    if (record.layout.pipeline or 1) == 1:
        return ""
    return Path(record.option("parallel.schedule", str) or "").name


def _nodes(record: RunRecord) -> str:
    """Return the number of nodes used, or else requested; empty if neither is known."""
    nodes = len(record.nodes) or record.option("cluster.nodes", int)
    return plural(nodes, "node") if nodes else ""


#: Details that distinguish runs, in order of preference; a detail that a name already has distinguishes none.
_DETAILS: tuple[_Detail, ...] = (
    _schedule,
    lambda record: plural(record.world_size, "rank") if record.world_size else "",
    _degrees,
    lambda record: f"b{size}" if (size := record.requested_batch) else "",
    _nodes,
    lambda record: str(record.precision),
    lambda record: f"kernels={record.kernels}",
    lambda record: f"m{count}" if (count := record.layout.microbatches) else "",
    lambda record: f"acc{count}" if (count := record.layout.accumulation) else "",
    None,
)

#: Further details, for runs of several sweeps.
_PLACES: tuple[_Detail, ...] = (
    lambda record: f"[{sweep_of(record).resolve().name}]",  # a link such as outputs/latest resolved
    lambda record: f"[{sweep_of(record)}]",
    lambda record: f"[{Path(record.directory).name}]",
    lambda record: f"[{record.directory}]",
)


def short_paths(paths: Iterable[Path]) -> dict[Path, str]:
    """Name folders by the last part of their paths, or if these are alike, by all that follows their common folder."""
    whole = {path: path.absolute() for path in paths}
    if len({path.name for path in whole.values()}) == len(whole):
        return {path: where.name or str(where) for path, where in whole.items()}
    common = os.path.commonpath([where.parent for where in whole.values()])
    return {path: str(where.relative_to(common)) for path, where in whole.items()}


#: Fields of an environment that are always shown, with a prefix if the value alone is unclear.
_HEAD = {"host": "", "cpu": "", "torch": "torch ", "ptdbench": "ptdbench "}


#: Maximum number of further fields in a title.
_APART = 4

#: Values of fields that are not known.
_UNKNOWN: tuple[object, ...] = (None, {}, [])


class Environments:
    """The distinct environments of runs, in the order of the runs."""

    def __init__(self, runs: Iterable[RunRecord]) -> None:
        recorded = {_key(run): run.written["environment"] for run in runs if run.written.get("environment")}
        self.distinct = [*recorded.values()]  #: The environments, as recorded.
        self._numbers = {text: number for number, text in enumerate(recorded)}

    def number(self, run: RunRecord) -> int | None:
        """Return the index of a run's environment; ``None`` if it is not recorded."""
        return self._numbers.get(_key(run))

    def described(self) -> dict[str, dict[str, str]]:
        """Return the known fields of each environment by its title; of several, those that all share come first."""
        environments = [
            {name: _field(value) for name, value in leaves(environment) if value not in _UNKNOWN}
            for environment in self.distinct
        ]
        if len(environments) < 2:
            return {f"environment: {_title(fields, ())}": fields for fields in environments}
        shared = dict(set.intersection(*(set(fields.items()) for fields in environments)))
        common = {name: text for name, text in environments[0].items() if name in shared}
        described = {"common to all environments": common} if common else {}
        for number, fields in enumerate(environments, start=1):
            apart = {name: text for name, text in fields.items() if name not in shared}
            described[f"environment {number}: {_title(fields, apart)}"] = apart
        return described


def _title(fields: Mapping[str, str], apart: Collection[str]) -> str:
    """Return machine and versions, and the fields that tell an environment apart."""
    head = [f"{word}{fields[name]}" for name, word in _HEAD.items() if name in fields]
    others = [name for name in apart if name not in _HEAD][:_APART]
    return ", ".join([*head, *(f"{name.removeprefix('settings.')} {fields[name]}" for name in others)])


def _field(value: object) -> str:
    """Return a value as text, and what a list repeats once: ``8 x NVIDIA H100 80GB HBM3``."""
    if not isinstance(value, list):
        return as_text(value)
    counts = Counter(map(as_text, value))
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items())


def _key(run: RunRecord) -> str:
    return json.dumps(run.written.get("environment"), sort_keys=True)
