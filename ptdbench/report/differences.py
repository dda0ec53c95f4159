"""In which options the configurations of runs differ, in as few words as tell them apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ptdbench.records.bearing import OF_CHOICE, bears, leaves
from ptdbench.records.schema import Written

#: What says again what the name of a choice says.
_REPEATING = frozenset(OF_CHOICE) - {"name"}

#: Characters of a value that are shown.
_LIMIT = 40


def differences(records: Sequence[Written]) -> list[str]:
    """For each record the options that the others have other values of: ``activations=recompute seed=2``.

    An option is called by the last part of its name if no other that differs ends so. Of a group whose choice differs
    the choice alone is named: ``optimizer=sgd``. Of options that always differ together and end alike, as ``seed`` and
    ``data.seed``, the first is named.
    """
    differing = varying(by_option(records))
    differing = {
        name: values for name, values in differing.items() if name.partition(".")[0] not in differing or "." not in name
    }
    lasts = [_last(name) for name in differing]
    called = {name: _last(name) if lasts.count(_last(name)) == 1 else name for name in differing}
    return [
        " ".join(f"{called[name]}={_cut(text)}" for name, texts in differing.items() if (text := texts[place]))
        for place in range(len(records))
    ]


def by_option(records: Sequence[Written]) -> dict[str, list[str | None]]:
    """Each option of any of the runs, with its value in each as it is typed; ``None`` in those without it."""
    configs = [options(record) for record in records]
    names = dict.fromkeys(name for config in configs for name in config)
    return {name: [_typed(config[name]) if name in config else None for config in configs] for name in names}


def varying(values: Mapping[str, list[str | None]]) -> dict[str, list[str | None]]:
    """The options of which runs have different values.

    Of those that always differ together and end alike, as ``seed`` and ``data.seed``, the first one.
    """
    differing = {name: texts for name, texts in values.items() if len(set(texts)) > 1}
    unique = {(_last(name), *texts): name for name, texts in reversed(differing.items())}
    kept = set(unique.values())
    return {name: texts for name, texts in differing.items() if name in kept}


def options(record: Written) -> dict[str, Any]:
    """The options of a run by their dotted names, shallow ones first; ``optimizer.name`` is ``optimizer``."""
    kept = [
        (name.removesuffix(".name"), value)
        for name, value in sorted(leaves(record.get("config")), key=lambda leaf: leaf[0].count("."))
        if not bears(name, "start", "sweep") and _last(name) not in _REPEATING
    ]
    return dict(kept)


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LIMIT else f"{text[:_LIMIT]}…"


def _last(name: str) -> str:
    return name.rpartition(".")[2]
