"""What the fields of a record hold, and whether what was read from a file does.

A field may be missing: a record is written before its run begins, and by other versions of this package. What is there
has the type that is stated here, so that readers need not ask.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, TypedDict, Union, get_args, get_origin, get_type_hints


class Error(TypedDict):
    """Why a run did not end well; the rank is -1 for the process that starts the ranks."""

    rank: int
    type: str
    message: str
    traceback: str


class Layout(TypedDict, total=False):
    """How a global batch falls onto the ranks."""

    data: int
    replicate: int
    shard: int
    context: int
    tensor: int
    pipeline: int
    global_batch: int
    micro_batch: int
    microbatches: int
    accumulation: int


class StepSeconds(TypedDict, total=False):
    """Location and spread of the timed steps."""

    median: float | None
    p5: float | None
    p95: float | None
    ci95: list[float] | None


class Metrics(TypedDict, total=False):
    """Figures of the timed steps; ``None`` is what cannot be known."""

    step_seconds: StepSeconds | None
    tokens_per_second: float | None
    samples_per_second: float | None
    model_flops_per_second: float | None
    mfu: float | None
    mfu_reason: str | None
    share_of_ceiling: float | None
    peak_memory_bytes: float | None
    first_step_seconds: float | None
    startup_seconds: dict[str, float] | None


class Evaluation(TypedDict):
    """One look at the held-out part."""

    step: int
    loss: float | None
    top1: float | None
    top5: float | None
    bits_per_byte: float | None


class Remarks(TypedDict, total=False):
    """What the reader of a record should know."""

    check: str | None


class Cluster(TypedDict, total=False):
    """The options of ``cluster`` that readers use."""

    nodes: int | str | None
    time_minutes: float


class Train(TypedDict, total=False):
    """The options of ``train`` that readers use."""

    steps: int


class Parallel(TypedDict, total=False):
    """The options of ``parallel`` that readers use."""

    schedule: str | None


class Config(TypedDict, total=False):
    """The resolved configuration, as far as readers use it."""

    cluster: Cluster
    train: Train
    parallel: Parallel


class Owner(TypedDict):
    """The process that opened a record; see :class:`ptdbench.records.owner.Owner`."""

    launch: str
    host: str
    pid: int
    started: float
    job: str | None


class Identity(TypedDict):
    """What every record has."""

    status: str
    workload: str
    fingerprint: str
    directory: str


class Record(Identity, total=False):
    """A record; what a workload that does not train has found stands in a field of its name besides."""

    model: str | None
    parallel: str | None
    world_size: int | None
    global_batch: int | None
    tokens_per_sample: int | None
    precision: str | None
    parameters: int | None
    overrides: list[str] | None
    started: str
    owner: Owner | None
    launcher: str | None
    nodes: list[str] | None
    layout: Layout | None
    warmup_steps: int | None
    metrics: Metrics | None
    error: Error | None
    remarks: Remarks | None
    environment: dict[str, Any] | None
    config: Config
    losses: list[float | None] | None
    evaluations: list[Evaluation] | None
    learning_rates: list[float | None] | None
    gradient_norms: list[float | None] | None
    wait_seconds: list[float | None] | None
    step_memory_bytes: list[float | None] | None
    rank_step_seconds: list[list[float | None]] | None
    segments: list[dict[str, Any]] | None


class Progress(TypedDict):
    """How far a run is that goes on: ``step`` of ``steps``, and ``unit`` ``per_second``."""

    step: int
    steps: int
    unit: str
    per_second: float | None


#: Larger ones cannot be shown as a figure: no quantity of a run comes near.
_LARGEST = 2**63


def parse(text: bytes, kind: Any) -> dict[str, Any]:
    """The strict JSON in a text.

    Args:
        text: What stands in a file.
        kind: What the value must be; see :func:`fault`.

    Raises:
        ValueError: It is not JSON, or not of that type.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("not JSON of this program (nested too deeply)") from None
    if wrong := fault(value, kind):
        raise ValueError(wrong)
    return value


def fault(value: object, kind: Any, name: str = "") -> str | None:
    """What is wrong with a value that should be of a type, in a few words; ``None`` if nothing is.

    Args:
        value: Parsed JSON.
        kind: A TypedDict, ``list[...]``, ``dict[str, ...]``, a union, a plain type, or ``Any``.
        name: Where the value stands, as in ``metrics.mfu``; empty for the outermost.
    """
    if kind is Any or _is_plainly(value, kind):
        return None
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not NoneType]
        faults = [fault(value, one, name) for one in kinds]
        return None if None in faults else faults[0]
    if get_origin(kind) is list and isinstance(value, list):
        return _first(fault(item, get_args(kind)[0], f"{name}[{place}]") for place, item in enumerate(value))
    if get_origin(kind) is dict and isinstance(value, dict):
        return _first(fault(item, get_args(kind)[1], f"{name}.{key}") for key, item in value.items())
    if hasattr(kind, "__required_keys__") and isinstance(value, dict):
        return _fault_of_fields(value, kind, name)
    return f"{name or 'it'} is {_SHOWN.get(type(value), 'a number')} where it should be {_expected(kind)}"


def _fault_of_fields(value: dict[str, Any], kind: Any, name: str) -> str | None:
    missing = sorted(kind.__required_keys__ - value.keys())
    if missing:
        return f"{name or 'it'} has no {missing[0]}"
    prefix = f"{name}." if name else ""
    fields = _fields(kind)
    return _first(fault(value[field], fields[field], prefix + field) for field in fields if field in value)


def _is_plainly(value: object, kind: Any) -> bool:
    """Whether a value is of a type without parts; a whole number will do for a ``float``, a boolean for no number."""
    if kind in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        return -_LARGEST < value < _LARGEST
    if get_origin(kind) is list and isinstance(value, list):  # the long series
        return kind == list[float | None] and {type(item) for item in value} <= {float, NoneType}
    return type(value) is kind or (value is None and NoneType in get_args(kind))


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _first(faults: Iterable[str | None]) -> str | None:
    return next((found for found in faults if found), None)


_SHOWN = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false", NoneType: "null"}


def _expected(kind: Any) -> str:
    shown = {int: "a whole number", float: "a number", **_SHOWN}
    return shown.get(get_origin(kind) or kind, "a mapping")
