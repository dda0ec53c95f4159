"""In which options the configurations of runs differ, in as few words as tell them apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

#: Where a run began is not what it is, and these say again what other options say.
_IGNORED = frozenset({"resume", "sweep.resume"})
_OF_ORDER = "repeat."
_REPEATING = frozenset({"_target_", "_partial_", "label"})

#: Characters of a value that are shown.
_LIMIT = 40


def differences(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each record the options that the others have other values of: ``activations=recompute seed=2``.

    An option is called by the last part of its name if no other that differs ends so. Of a group whose choice differs
    the choice alone is named: ``optimizer=sgd``. Of options that always differ together and end alike, as ``seed`` and
    ``data.seed``, the first is named.
    """
    configs = [options(record.get("config") or {}) for record in records]
    names = dict.fromkeys(name for config in configs for name in config)
    shown = {name: [_shown(config, name) for config in configs] for name in names}
    differing = {name: values for name, values in shown.items() if len(set(values)) > 1}
    differing = {
        name: values for name, values in differing.items() if name.partition(".")[0] not in differing or "." not in name
    }
    unique = {(_last(name), *values): name for name, values in reversed(differing.items())}
    kept = [name for name in differing if name in unique.values()]
    lasts = [_last(name) for name in kept]
    called = {name: _last(name) if lasts.count(_last(name)) == 1 else name for name in kept}
    return [
        " ".join(f"{called[name]}={differing[name][place]}" for name in kept if differing[name][place] is not None)
        for place in range(len(records))
    ]


def options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a configuration by their dotted names, shallow ones first; ``optimizer.name`` is ``optimizer``."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", config)]
    for name, value in waiting:  # grows on the way
        last = _last(name)
        if isinstance(value, Mapping) and (value or not name):
            waiting += [(f"{name}.{key}" if name else str(key), part) for key, part in value.items()]
        elif name not in _IGNORED and not name.startswith(_OF_ORDER) and last not in _REPEATING:
            found[name.removesuffix(".name")] = value
    return found


def _shown(config: Mapping[str, Any], name: str) -> str | None:
    """A value as it is typed; ``None`` where there is no such option."""
    if name not in config:
        return None
    value = config[name]
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LIMIT else f"{text[:_LIMIT]}…"


def _last(name: str) -> str:
    return name.rpartition(".")[2]
