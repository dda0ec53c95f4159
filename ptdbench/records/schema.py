"""What the fields of a record hold, and whether what was read from a file does.

A field may be missing: a record is written before its run begins, and by other versions of this package. What is there
has the type that is stated here, so that readers need not ask. ``docs/record.md`` is made of this module and
:mod:`ptdbench.records.findings` by :mod:`ptdbench.records.describe`: what stands below a field is its description.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, TypedDict, Union, get_args, get_origin, get_type_hints

#: The form of record that this version writes.
SCHEMA = 2


class Error(TypedDict):
    """Why a run did not end well."""

    rank: int
    """The rank that failed first; -1 for the process that starts the ranks."""
    type: str
    """The class of the exception, or the name of the signal."""
    message: str
    """What went wrong, for people."""
    traceback: str
    """The traceback as text; empty if the process could leave none."""


class Layout(TypedDict, total=False):
    """How a global batch falls onto the ranks."""

    data: int
    """Shares that the global batch is divided into: ``replicate * shard``."""
    replicate: int
    """Copies of the model."""
    shard: int
    """Ranks that share the weights of one copy, and its share of the batch."""
    context: int
    """Ranks that share a sequence."""
    tensor: int
    """Ranks that share each matrix product."""
    pipeline: int
    """Stages that a copy is cut into."""
    global_batch: int
    """Samples of one optimizer step over all ranks."""
    micro_batch: int
    """Samples of one forward pass."""
    microbatches: int
    """Micro-batches that are in the pipeline together."""
    accumulation: int
    """Passes whose gradients add up to one optimizer step."""


class StepSeconds(TypedDict, total=False):
    """Location and spread of the timed steps, in seconds; a step takes as long as its slowest rank."""

    median: float | None
    """The median."""
    mean: float | None
    """The mean."""
    p5: float | None
    """The 5 % quantile."""
    p95: float | None
    """The 95 % quantile."""
    ci95: list[float] | None
    """``[low, high]``, the 95 % interval of the median; null below six steps."""


class Metrics(TypedDict, total=False):
    """Figures of the timed steps, which are those after the warm-up; null is what cannot be known."""

    step_seconds: StepSeconds | None
    """How long steps take."""
    tokens_per_second: float | None
    """Tokens of all ranks in all timed steps over the seconds of these; null where samples are no token sequences."""
    samples_per_second: float | None
    """Samples of all ranks in all timed steps over the seconds of these."""
    tokens_per_second_per_device: float | None
    """The same for one device."""
    samples_per_second_per_device: float | None
    """The same for one device."""
    model_flops_per_second: float | None
    """FLOP/s of all devices by the model's formula; what is computed a second time does not count."""
    mfu: float | None
    """Model FLOP/s of a device over its dense peak by the data sheet."""
    mfu_reason: str | None
    """Why there is no ``mfu``."""
    ceiling_flops_per_second: float | None
    """FLOP/s that ``workload=matmul`` has reached on this device in this arithmetic."""
    share_of_ceiling: float | None
    """Model FLOP/s of a device over that ceiling."""
    ceiling_reason: str | None
    """Why there is no ceiling."""
    data_wait_share: float | None
    """Share of the timed steps' seconds that ranks have waited for their batches."""
    peak_memory_bytes: float | None
    """Peak memory, the maximum over ranks: of the device, or of the process on a CPU."""
    first_step_seconds: float | None
    """Seconds from "ready to start" to the end of the first step on all ranks."""
    startup_seconds: dict[str, float] | None
    """These by what took them: ``import``, ``config``, ``rendezvous``, ``check``, ``build``, ``first_step``."""


class Evaluation(TypedDict):
    """One look at the held-out part."""

    step: int
    """Optimizer steps that were done before it."""
    loss: float | None
    """Mean loss of a target, label smoothing left out; null if it was not finite."""
    top1: float | None
    """Share of the samples whose class had the largest output; null where samples have no classes."""
    top5: float | None
    """Share of those whose class was among the five largest."""
    bits_per_byte: float | None
    """Loss in bits by byte of text; null where samples are no text."""
    samples: int
    """Samples of the held-out part, each counted once."""
    seconds: float
    """How long it took."""


class SegmentLayout(Layout, total=False):
    """What steps must have in common for their times to be comparable: the layout, and what ran it."""

    parallel: dict[str, Any]
    """The options of ``parallel``."""
    launcher: str
    """What started the ranks."""
    nodes: list[str]
    """The nodes, sorted."""


class Segment(TypedDict):
    """One start of the run, whose times are not mixed with those of other starts."""

    first_step: int
    """The number of its first step."""
    steps: int
    """Steps that it has done."""
    layout: SegmentLayout
    """What its times depend on. Starts with the same one share the timed steps of ``metrics``."""
    warmup_steps: int
    """Its first steps, which are not timed."""
    startup_seconds: dict[str, float]
    """Seconds until the end of its first step, by what they were spent on."""


class Remarks(TypedDict, total=False):
    """What the reader of a record should know."""

    check: str | None
    """What the check before the run (``check=true``) found unsound."""
    cut_short: str | None
    """That there were fewer steps than asked for, and why."""
    resumed: str | None
    """The step and the checkpoint that the run began with."""
    checkpoints: list[str] | None
    """Checkpoints that were passed over or could not be written, and steps whose numbers are lost."""
    leaving: list[str] | None
    """Ranks that had to be ended after their work was done."""


class Cluster(TypedDict, total=False):
    """The options of ``cluster`` that readers use."""

    nodes: int | str | None
    """Nodes, or ``auto``."""
    time_minutes: float
    """The time limit of its job."""


class Train(TypedDict, total=False):
    """The options of ``train`` that readers use."""

    steps: int
    """Steps that were asked for."""


class Parallel(TypedDict, total=False):
    """The options of ``parallel`` that readers use."""

    schedule: str | None
    """The schedule of a pipeline."""


class Config(TypedDict, total=False):
    """The resolved configuration: every option, of which these are read here; ``conf/`` describes all of them."""

    cluster: Cluster
    """Where the ranks were asked to be."""
    train: Train
    """How much was to be trained."""
    parallel: Parallel
    """How the model was parallelized."""


class Owner(TypedDict):
    """The process that opened a record."""

    launch: str
    """The name of its start of the run."""
    host: str
    """Its machine."""
    pid: int
    """Its process id there."""
    started: float
    """When it was created, in seconds since the epoch."""
    job: str | None
    """Its SLURM job as squeue writes it; null outside of one."""


class Environment(TypedDict, total=False):
    """The machine and the installation that a number may depend on, as rank 0 sees them."""

    ptdbench: str | None
    """Version of this package."""
    python: str
    """Version of Python."""
    torch: str
    """Version of PyTorch."""
    torchvision: str | None
    """Version of torchvision."""
    numpy: str | None
    """Version of NumPy."""
    cuda: str | None
    """Version of CUDA that torch was built for."""
    cudnn: int | None
    """Version of cuDNN; null on a CPU."""
    nccl: str | None
    """Version of NCCL; null on a CPU."""
    driver: str | None
    """Version of the GPU driver; null on a CPU."""
    devices: list[Any]
    """The GPUs that rank 0 sees."""
    git_commit: str | None
    """The commit of this package, where it runs from a repository."""
    git_dirty: bool | None
    """Whether files differ from that commit."""
    cpu: str | None
    """Name of the CPU."""
    cores: int | None
    """CPU cores that rank 0 may use."""
    host: str
    """Name of the machine."""
    os: str
    """Name and version of the operating system."""


class Identity(TypedDict):
    """What every record has."""

    status: str
    """``ok``, or how it failed: ``failed``, ``oom``, ``diverged``, ``timeout`` or ``preempted`` (which can go on)."""
    workload: str
    """What was done: ``train``, ``hello``, ``matmul``, ``p2p``, ``collectives``, ``check`` or one of your own."""
    fingerprint: str
    """Sixteen hex digits that two runs share if and only if their resolved configurations are equal."""
    directory: str
    """The run's directory when it ran."""


class Record(Identity, total=False):
    """``record.json`` of a run, and its line in the ``results.jsonl`` of its sweep."""

    schema: int
    """The version of this description: 2. Records without one held their series in themselves."""
    model: str | None
    """The choice of ``model``; null for a workload that does not train, as all that belongs to training."""
    parallel: str | None
    """The choice of ``parallel``."""
    world_size: int | None
    """Ranks, one device each."""
    global_batch: int | None
    """Samples of one optimizer step over all ranks."""
    tokens_per_sample: int | None
    """Length of a sequence; null where samples are no token sequences."""
    precision: str | None
    """``fp32``, ``bf16`` or ``fp16``."""
    parameters: int | None
    """Parameters of the whole model; tied ones count once."""
    overrides: list[str] | None
    """What was typed for the run; null where it is not known."""
    started: str
    """When the run started, in UTC: ISO 8601."""
    owner: Owner | None
    """The process that opened the record; null where it only waited to be started."""
    launcher: str | None
    """What started the ranks: ``local``, ``torchrun``, ``srun``, ..."""
    nodes: list[str] | None
    """The nodes of the ranks, in the order of these."""
    layout: Layout | None
    """How the global batch fell onto the ranks."""
    warmup_steps: int | None
    """Steps of the last start of the run that were not timed."""
    metrics: Metrics | None
    """Figures of the timed steps; null for a run that did not come to its end."""
    error: Error | None
    """Why the run did not end well; null if it did."""
    remarks: Remarks | None
    """What the reader should know besides."""
    environment: Environment | None
    """Versions and hardware."""
    config: Config
    """The resolved configuration."""
    steps: int | None
    """Optimizer steps that are done, those before a checkpoint included: so many rows has ``series.npy``."""
    final_loss: float | None
    """Loss of the last step; null if it was not finite."""
    evaluations: list[Evaluation] | None
    """The looks at the held-out part, in the order of steps."""
    segments: list[Segment] | None
    """One for each start of the run."""


class _ListedSegment(TypedDict):
    """A start of the run in a record before schema 2."""

    first_step: int
    rank_step_seconds: list[list[float | None]]


class _Lists(TypedDict, total=False):
    """What records before schema 2 held in the place of ``series.npy``, a number for each step."""

    losses: list[float | None] | None
    learning_rates: list[float | None] | None
    gradient_norms: list[float | None] | None
    wait_seconds: list[float | None] | None
    step_memory_bytes: list[float | None] | None
    rank_step_seconds: list[list[float | None]] | None
    segments: list[_ListedSegment] | None


class Progress(TypedDict):
    """How far a run is that goes on: ``step`` of ``steps``, and ``unit`` ``per_second``."""

    step: int
    steps: int
    unit: str
    per_second: float | None


#: Larger ones cannot be shown as a figure: no quantity of a run comes near.
_LARGEST = 2**63


def record(text: bytes) -> dict[str, Any]:
    """The record in a text; one from before schema 2 also has the ``steps`` and ``final_loss`` that it has now.

    Raises:
        ValueError: It is not JSON, or no record.
    """
    value = parse(text, Record)
    if "schema" not in value:
        if wrong := fault(value, _Lists):
            raise ValueError(wrong)
        losses = value.get("losses") or []
        value |= {"steps": len(losses) or None, "final_loss": losses[-1] if losses else None}
    return value


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
