"""The schema of a record, and the validation of records read from files.

A field may be missing: a record is written before its run begins, and by other versions of this package. A field that
is present has the type declared here. :mod:`ptdbench.records.describe` generates ``docs/record.md`` from this module
and :mod:`ptdbench.records.findings`: the string below a field is its description.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from types import NoneType, UnionType
from typing import Any, NewType, NoReturn, TypedDict, Union, get_args, get_origin, get_type_hints

#: The schema version that this version writes.
SCHEMA = 2

#: Numbers that are refused outside of :data:`RANGES`: figures made of them would be errors or infinities.
Count = NewType("Count", int)
Degree = NewType("Degree", int)
Amount = NewType("Amount", float)
Quantity = NewType("Quantity", float)


class _Cause(TypedDict):
    """The fields of every error."""

    rank: int
    """The rank that failed first; -1 for the process that starts the ranks."""
    type: str
    """The class of the exception, or the name of the signal."""
    message: str
    """The error message."""
    traceback: str
    """The traceback as text, of a crash in native code the stack; empty if the process could not write one."""


class Error(_Cause, total=False):
    """Why a run did not end well."""

    where: str
    """The last frame in the user's code, as in ``mymodels.py:13 in forward``, of a crash else in ptdbench; or empty."""


class Layout(TypedDict, total=False):
    """How the global batch is divided among the ranks."""

    data: Degree
    """Shares that the global batch is divided into: ``replicate * shard``."""
    replicate: Degree
    """Copies of the model."""
    shard: Degree
    """Ranks that share the weights of one copy, and its share of the batch."""
    context: Degree
    """Ranks that share a sequence."""
    tensor: Degree
    """Ranks that share each matrix product."""
    pipeline: Degree
    """Ranks that share the layers of a copy."""
    global_batch: Degree
    """Samples of one optimizer step over all ranks."""
    micro_batch: Degree
    """Samples of one forward pass."""
    microbatches: Degree
    """Micro-batches of one pass of the pipeline schedule."""
    accumulation: Degree
    """Passes whose gradients add up to one optimizer step."""


class StepSeconds(TypedDict, total=False):
    """Location and spread of the timed steps, in seconds; a step takes as long as its slowest rank."""

    median: Quantity | None
    """The median."""
    mean: Quantity | None
    """The mean."""
    p5: Quantity | None
    """The 5 % quantile."""
    p95: Quantity | None
    """The 95 % quantile."""
    ci95: list[Quantity] | None
    """``[low, high]``, the 95 % interval of the median; null below six steps."""


class Metrics(TypedDict, total=False):
    """Figures of the timed steps, those after the warm-up; null if unknown."""

    step_seconds: StepSeconds | None
    """Statistics of the step times."""
    tokens_per_second: Quantity | None
    """Tokens of all ranks in all timed steps over the seconds of these; null if samples are not token sequences."""
    samples_per_second: Quantity | None
    """Samples of all ranks in all timed steps over the seconds of these."""
    tokens_per_second_per_device: Quantity | None
    """The same for one device."""
    samples_per_second_per_device: Quantity | None
    """The same for one device."""
    model_flops_per_second: Quantity | None
    """FLOP/s of all devices by the model's formula; recomputation does not count."""
    mfu: Quantity | None
    """Model FLOP/s of a device over its dense peak by the data sheet."""
    mfu_reason: str | None
    """Why there is no ``mfu``."""
    mfu_of_bf16: Quantity | None
    """Under ``precision=fp8``, model FLOP/s of a device over its bf16 peak, to compare with runs in bf16."""
    ceiling_flops_per_second: Quantity | None
    """FLOP/s that ``workload=matmul`` measured on this device in this arithmetic."""
    ceiling_beside_load: bool | None
    """Whether other processes used the device while that was measured, so that it may be too low; null if unknown."""
    share_of_ceiling: Quantity | None
    """Model FLOP/s of a device over that ceiling; ``remarks.ceiling`` says why where it is above 1."""
    ceiling_reason: str | None
    """Why there is no ceiling."""
    data_wait_share: Quantity | None
    """Share of the timed steps' seconds spent waiting for batches."""
    peak_memory_bytes: Quantity | None
    """Peak memory, the maximum over ranks: of the device, or of the process on a CPU."""
    first_step_seconds: Amount | None
    """Seconds from "ready to start" to the end of the first step on all ranks."""
    startup_seconds: dict[str, Amount] | None
    """These by phase: ``import``, ``config``, ``rendezvous``, ``check``, ``build``, ``first_step``."""


class _Counted(TypedDict):
    """What ranks are seen to send with an operation."""

    calls: Amount
    """How often a rank calls it."""
    bytes: Amount
    """Size of what a rank hands over, or receives where that is larger."""
    seconds: Amount
    """Seconds in which it was under way, counted from when the last rank called it; overlapping calls count once. A
    message of gloo whose end was not noted in time counts as the others; 0 if that is unknown of all."""
    exposed_seconds: Amount
    """The part of them in which the rank computed nothing: a share of the phase ``communication``."""


class Communication(_Counted, total=False):
    """What ranks send with one operation, such as ``all_reduce``, in one step: the mean over ranks."""

    formula_bytes: Amount | None
    """What ``bytes`` should be for this layout, without messages of a single number; null if no exact formula is
    known."""
    fit_seconds: Amount | None
    """What ``calls`` with ``bytes`` take by the line that ``workload=collectives`` last fitted on these ranks, with
    this backend and torch; null if it did not, or the operation is not one of all ranks."""


class Phases(TypedDict, total=False):
    """Where the time of a step went, from a few profiled steps after the timed ones (``profile.steps``).

    The profiler slows steps down: seconds are those of the profiled steps, scaled to the mean timed step.
    """

    steps: Count
    """Number of profiled steps; 0 if there are no phases."""
    reason: str | None
    """Why there are no phases."""
    pass_seconds: Amount
    """What profiling took, from the first profiled step to the last figure."""
    profiled_step_seconds: Amount
    """Mean duration of a profiled step, of the slowest rank."""
    step_seconds: Quantity
    """Mean duration of a timed step, to which all seconds are scaled; of a profiled one if no step was timed."""
    ranks: dict[str, list[Amount]]
    """Seconds of a step by phase, one number for each rank; the phases of a rank add up to its step. ``data``: waiting
    for the batch. ``forward``, ``backward``: these passes without the waiting below; recomputation is part of
    ``backward``. ``communication``: exposed, the rank computed nothing meanwhile. ``stragglers``: waiting until the
    last rank of a collective operation had called it. ``bubble``: waiting until another stage of the pipeline had
    called its side of a message. ``optimizer``: clipping, the optimizer, loss scaling. ``other``: all else."""
    communication: dict[str, Communication]
    """The operations of communication."""
    waited_for: list[Amount]
    """For each rank the seconds of a step in which others waited for it: the mean over the others."""
    waited_for_most: list[Count | None]
    """For each profiled step the rank that the others waited for longest; null if they waited for none."""
    stages: list[list[Count]] | None
    """The pipeline's stages on each rank; null without a pipeline."""
    stage_parts: list[list[str]] | None
    """For each stage the names of the parts that it holds besides repeated layers, such as ``embedding`` and ``head``;
    null without a pipeline."""
    bubble_formula: Amount | None
    """The bubble's share of a step by the formula of the schedule, for stages that take equally long; null without
    a pipeline."""


class Memory(TypedDict, total=False):
    """What the memory is for when a step takes the most, on each rank; from a step after the timed ones.

    It counts what torch allocates on the rank's device: on a CPU without Python and libraries, on a GPU without the
    context and the buffers of NCCL.
    """

    reason: str | None
    """Why there are no figures."""
    ranks: dict[str, list[int]]
    """Bytes by kind, one number for each rank; those of a rank add up to its peak. ``weights``: parameters and
    buffers, of which a rank may have shards. ``gradients``: also those of whole weights that FSDP has not reduced yet.
    ``optimizer``: its state, moving averages of weights included. ``activations``: what else the forward and the
    backward pass allocate. ``communication``: what is sent and received, and the weights that FSDP has gathered.
    ``other``: the batch, what an update needs for a moment, and on a GPU what was there before for another reason,
    such as workspaces of libraries, and what the allocator rounds sizes up by."""
    moments: list[str]
    """In which part of the step each rank had its peak: ``data``, ``forward``, ``backward``, ``optimizer`` or
    ``other``."""
    pass_seconds: Amount
    """What finding this out took."""


class Energy(TypedDict, total=False):
    """Energy that devices took while the run did steps after the first ``train.warmup_steps`` ones.

    Evaluations, checkpoints and all else that interrupts steps is left out. Null with a ``reason`` if it is not known
    of all devices.
    """

    source: str | None
    """Whose counters were read: ``NVML`` or ``RAPL``."""
    steps: Count | None
    """Number of steps during which it was metered; the fewest of a device."""
    seconds: Amount | None
    """Their duration; the shortest of a device."""
    watts: Amount | None
    """Mean power of all devices together."""
    joules_per_step: Amount | None
    """Energy of all devices in one step."""
    joules_per_sample: Amount | None
    """The same over the samples of the global batch."""
    joules_per_token: Amount | None
    """The same over its tokens; null if samples are not token sequences."""
    reason: str | None
    """Why there are no figures."""


class Clocks(TypedDict):
    """The clocks of one rank's GPU while the run did steps; null if NVML does not tell."""

    rank: Count
    """The rank."""
    sm_clock_mhz: Count | None
    """Clock of its multiprocessors in the last steps."""
    sm_clock_least_mhz: Count | None
    """The lowest that was seen; it is looked at whenever steps are interrupted, about every 10 seconds."""
    sm_clock_most_mhz: Count | None
    """The highest that the GPU has."""
    clock_reasons: list[str] | None
    """Why it did not run at its highest clock when it was looked at: ``power cap``, ``too hot (hardware)``, ..."""
    held_back: dict[str, Amount] | None
    """Share of the time in which clocks were held below the application clocks, by cause: ``power limit``,
    ``temperature limit``, ``sync boost``, ``board limit``, ``reliability limit``, as far as the driver counts them.
    Causes may coincide."""


class Hardware(TypedDict, total=False):
    """The hardware while the last start of the run did steps: energy, clocks, and what held these back."""

    cpu: Energy
    """All CPU packages of the machines that the ranks ran on, without memory modules. A package does not tell whose
    work it does: the energy is that of everything that ran there."""
    gpu: Energy
    """The ranks' GPUs with their memory, all that ran on them included."""
    clocks: list[Clocks]
    """One for each rank that has a GPU."""


class Evaluation(TypedDict):
    """One evaluation on the held-out part."""

    step: Count
    """Number of optimizer steps done before it."""
    loss: float | None
    """Mean loss per target, without label smoothing; null if it was not finite."""
    top1: Amount | None
    """Top-1 accuracy, 0 to 1; null if samples have no classes."""
    top5: Amount | None
    """Top-5 accuracy, 0 to 1."""
    bits_per_byte: Amount | None
    """Loss in bits per byte of text; null if samples are not text."""
    samples: Count
    """Samples of the held-out part, each counted once."""
    seconds: Amount
    """Duration."""


class SegmentLayout(Layout, total=False):
    """What must be equal for the times of steps to be comparable: the layout, the launcher and the nodes."""

    parallel: dict[str, Any]
    """The options of ``parallel``."""
    launcher: str
    """The launcher."""
    nodes: list[str]
    """The nodes, sorted."""


class Segment(TypedDict):
    """One start of the run, whose times are not mixed with those of other starts."""

    first_step: Count
    """The number of its first step."""
    steps: Count
    """Number of steps that it has done."""
    layout: SegmentLayout
    """What its times depend on. ``metrics`` includes the timed steps of all starts with the same layout."""
    warmup_steps: Count
    """Number of untimed steps at its beginning."""
    startup_seconds: dict[str, Amount]
    """Seconds until the end of its first step, by phase."""


class Remarks(TypedDict, total=False):
    """Remarks on a run."""

    check: str | None
    """What the check before the run (``check=true``) found unsound."""
    ceiling: str | None
    """That the run passed the ceiling, which was measured again, and what came of it."""
    cut_short: str | None
    """Why there were fewer steps than asked for."""
    resumed: str | None
    """The step and the checkpoint that the run resumed from, and how its ranks or its layout have changed since."""
    checkpoints: list[str] | None
    """Checkpoints that were skipped or could not be written, and steps whose numbers are lost."""
    leaving: list[str] | None
    """Ranks that had to be ended after their work was done."""


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
    """Its SLURM job in the form of squeue; null outside a job."""


class Environment(TypedDict, total=False):
    """The machine and the installation, as seen by rank 0."""

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
    rocm: str | None
    """Version of ROCm that torch was built for; null in other builds."""
    tf32: bool | None
    """Whether matrix products or convolutions of fp32 tensors may run in TF32; null on a CPU."""
    cudnn: Count | None
    """Version of cuDNN; null on a CPU."""
    nccl: str | None
    """Version of NCCL; null on a CPU."""
    driver: str | None
    """Version of the GPU driver; null on a CPU."""
    devices: list[Any]
    """The GPUs that rank 0 sees."""
    git_commit: str | None
    """The commit of this package, if it runs from a repository."""
    git_dirty: bool | None
    """Whether files differ from that commit."""
    cpu: str | None
    """Name of the CPU."""
    cores: Count | None
    """CPU cores that rank 0 may use."""
    host: str
    """Name of the machine."""
    os: str
    """Name and version of the operating system."""
    settings: dict[str, str]
    """Environment variables that change results or speed, by name."""


class Identity(TypedDict):
    """The fields of every record."""

    status: str
    """``ok``, or how it failed: ``failed``, ``oom``, ``diverged``, ``timeout`` or ``preempted`` (can be resumed)."""
    workload: str
    """The workload: ``train``, ``hello``, ``matmul``, ``p2p``, ``collectives``, ``check`` or one of your own."""
    fingerprint: str
    """Sixteen hex digits, equal for two runs if and only if their resolved configurations are equal."""
    directory: str
    """The run's directory when it ran."""


class Record(Identity, total=False):
    """``record.json`` of a run, and its line in the ``results.jsonl`` of its sweep."""

    schema: int
    """The version of this schema: 2."""
    model: str | None
    """The choice of ``model``; null for a workload that does not train, as are all fields of training."""
    parallel: str | None
    """The choice of ``parallel``."""
    world_size: Degree | None
    """Ranks, one device each."""
    global_batch: Degree | None
    """Samples of one optimizer step over all ranks."""
    tokens_per_sample: Count | None
    """Length of a sequence; null if samples are not token sequences."""
    precision: str | None
    """``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``."""
    parameters: Count | None
    """Parameters of the whole model; tied ones count once."""
    overrides: list[str] | None
    """The overrides typed for the run; null if unknown."""
    started: str
    """When the run started, in UTC: ISO 8601."""
    owner: Owner | None
    """The process that opened the record; null if the run waited to be started."""
    launcher: str | None
    """The launcher: ``local``, ``torchrun``, ``srun``, ..."""
    nodes: list[str] | None
    """The nodes, in the order of the ranks."""
    layout: Layout | None
    """How the global batch was divided among the ranks."""
    warmup_steps: Count | None
    """Number of untimed steps of the last start of the run."""
    metrics: Metrics | None
    """Figures of the timed steps; those until it ended for a run that did not finish."""
    phases: Phases | None
    """Where the time of a step went; null for a run that was not profiled."""
    memory: Memory | None
    """What the memory of a step is for; null for a run that was not profiled."""
    hardware: Hardware | None
    """Energy and clocks of the hardware; null for a run that did not train to its end."""
    error: Error | None
    """Why the run did not end well; null if it did."""
    remarks: Remarks | None
    """Remarks."""
    environment: Environment | None
    """Versions and hardware."""
    config: dict[str, Any]
    """The resolved configuration: every option, as ``conf/`` describes them; that of a refused run as it was typed.

    Numbers that JSON has not are text, such as ``"inf"``.
    """
    steps: Count | None
    """Number of optimizer steps done, including those before a checkpoint: the number of rows of ``series.npy``."""
    final_loss: float | None
    """Loss of the last step; null if it was not finite."""
    evaluations: list[Evaluation] | None
    """The evaluations on the held-out part, in the order of steps."""
    segments: list[Segment] | None
    """One for each start of the run."""


class _Versioned(Identity, total=False):
    """What is read of a record first: other versions may have other fields."""

    schema: int


class Progress(TypedDict):
    """The progress of a running run: ``step`` of ``steps``, and ``unit`` ``per_second``."""

    step: int
    steps: int
    unit: str
    per_second: float | None


#: Larger whole numbers are refused: they cannot be shown, and no quantity of a run is so large.
_LARGEST = 2**63

#: The least and the largest number of a kind; a :data:`Quantity`, such as a rate, may be 0 too.
RANGES: dict[Any, tuple[float, float]] = {
    Count: (0, _LARGEST),
    Degree: (1, _LARGEST),
    Amount: (-1e30, 1e30),
    Quantity: (1e-30, 1e30),
}

#: Mappings and lists within each other: more would be too many for what reads a record.
_DEEPEST = 50
_TOO_DEEP = "not JSON of this program (nested too deeply)"


def record(text: bytes) -> dict[str, Any]:
    """Parse a record.

    Raises:
        ValueError: It is not JSON, not a record, or one of another version of the schema.
    """
    value = parse(text, _Versioned)
    version = value.get("schema", 1)  # the first had no such field
    if version != SCHEMA:
        age, remedy = ("an earlier", "run it again") if version < SCHEMA else ("a later", "update ptdbench")
        rule = f"its schema is {version}, of {age} version of ptdbench than this one, which reads {SCHEMA}"
        raise ValueError(f"{rule}; {remedy}")
    if wrong := fault(value, Record):
        raise ValueError(wrong)
    if not is_path(value["directory"]):
        raise ValueError("directory is no path")
    return value


def parse(text: bytes, kind: Any) -> dict[str, Any]:
    """Parse strict JSON.

    Args:
        text: The content of a file.
        kind: The required type; see :func:`fault`.

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
        raise ValueError(_TOO_DEEP) from None
    if _is_too_deep(value):
        raise ValueError(_TOO_DEEP)
    if wrong := fault(value, kind):
        raise ValueError(wrong)
    return value


def fault(value: object, kind: Any, name: str = "") -> str | None:
    """Describe in a few words why a value is not of a type; ``None`` if it is.

    Args:
        value: Parsed JSON.
        kind: A TypedDict, ``list[...]``, ``dict[str, ...]``, a union, a plain type, or ``Any``.
        name: The path of the value, as in ``metrics.mfu``; empty for the outermost.
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
    is_number = isinstance(kind, NewType) and _is_plainly(value, kind.__supertype__)
    shown = value if is_number else _SHOWN.get(type(value), "a number")
    return f"{name or 'it'} is {shown} where it should be {_expected(kind)}"


def _fault_of_fields(value: dict[str, Any], kind: Any, name: str) -> str | None:
    missing = sorted(kind.__required_keys__ - value.keys())
    if missing:
        return f"{name or 'it'} has no {missing[0]}"
    prefix = f"{name}." if name else ""
    fields = _fields(kind)
    return _first(fault(value[field], fields[field], prefix + field) for field in fields if field in value)


def _is_plainly(value: Any, kind: Any) -> bool:
    """Whether a value is of a plain type; an integer is accepted as a ``float``, a boolean not as a number."""
    if isinstance(kind, NewType):
        low, high = RANGES[kind]
        in_range = _is_plainly(value, kind.__supertype__) and low <= value <= high
        return in_range or (kind is Quantity and value == 0 and value is not False)
    if kind in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        return -_LARGEST < value < _LARGEST
    return type(value) is kind or (value is None and NoneType in get_args(kind))


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _first(faults: Iterable[str | None]) -> str | None:
    return next((found for found in faults if found), None)


_SHOWN = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false", NoneType: "null"}


def _expected(kind: Any) -> str:
    if isinstance(kind, NewType):
        low, high = RANGES[kind]
        if kind.__supertype__ is int:
            return f"a whole number of at least {low}"
        return f"a number from {low:g} to {high:g}{', or 0' * (kind is Quantity)}"
    shown = {int: "a whole number", float: "a number", **_SHOWN}
    return shown.get(get_origin(kind) or kind, "a mapping")


def is_path(text: str) -> bool:
    """Whether a file may have this name; asking a file system for another one is an error."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return b"\0" not in name and len(name) < 4096 and all(len(part) < 256 for part in name.split(b"/"))


def _is_too_deep(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(_DEEPEST):
        items = (item for node in level for item in (node.values() if isinstance(node, dict) else node))
        level = [item for item in items if isinstance(item, dict | list)]
    return bool(level)
