"""The schema of a record, and the validation of records read from files.

A field may be missing, because a record is written before its run begins: it is ``None`` here. A field that is present
has the type declared here. The tables of ``docs/record.md`` are built from this module and
``ptdbench/measure/results.py``: the comment beside or above a field is its description.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Struct

from ptdbench.measure.results import Amount, Count, Degree, OtherLoad, Positive, Quantity, StepSeconds, Whole
from ptdbench.parallel.dims import Dims

T = TypeVar("T")
S = TypeVar("S", bound=Struct)

#: A record as it is written, in JSON types; :class:`ptdbench.records.run_record.RunRecord` is for its readers.
Written = Mapping[str, Any]

#: The same, to be changed and written.
Draft = dict[str, Any]

#: A resolved configuration: options, and groups of them by name.
Configuration = Mapping[str, Any]

#: The schema version that this version writes.
SCHEMA = 2


class Error(Struct):
    """Why a run did not succeed."""

    rank: Whole  #: The rank that failed first; -1 for the process that starts the ranks.
    type: str  #: The class of the exception, or the name of the signal.
    message: str  #: The error message.
    #: The traceback as text; empty if the process could not write one.
    traceback: str
    #: The last frame in the user's code, such as ``mymodels.py:13 in forward``; else empty.
    where: str | None = None


#: A field for each degree of parallelism, described in the table of degrees.
OfDegrees = msgspec.defstruct(
    "OfDegrees",
    [(name, Degree | None, None) for name in Dims.rows()],  # type: ignore[misc]  # msgspec 0.21.0 declares classes only
    module=__name__,
)


class Layout(OfDegrees):  # type: ignore[valid-type, misc]
    """How the global batch is divided among the ranks."""

    data: Degree | None = None  #: Number of parts that the global batch is divided into: ``replicate * shard``.
    global_batch: Degree | None = None  #: Samples of one optimizer step over all ranks.
    micro_batch: Degree | None = None  #: Samples of one forward pass.
    microbatches: Degree | None = None  #: Micro-batches of one pass of the pipeline schedule.
    accumulation: Degree | None = None  #: Passes whose gradients add up to one optimizer step.


class Metrics(Struct):
    """Figures of the timed steps, which are those after the warm-up; null if unknown."""

    step_seconds: StepSeconds | None = None  #: Statistics of the step times.
    #: Tokens of all ranks in all timed steps, per second of these steps; null if samples are not token sequences.
    tokens_per_second: Positive | None = None
    samples_per_second: Positive | None = None  #: Samples of all ranks in all timed steps, per second of these steps.
    #: FLOP/s of all devices by the model's formula, with full (not causal) attention and without recomputation.
    model_flops_per_second: Quantity | None = None
    mfu: Quantity | None = None  #: Model FLOP/s of a device over its dense peak from the data sheet.
    mfu_reason: str | None = None  #: Why there is no ``mfu``.
    #: The highest FLOP/s that ``workload=matmul`` has measured on this device in this arithmetic.
    ceiling_flops_per_second: Positive | None = None
    #: Model FLOP/s of a device over that ceiling; above 1 it should be measured again, by ``workload=matmul``.
    share_of_ceiling: Quantity | None = None
    #: Share of the timed steps spent waiting for batches; on a GPU only waits that left the device idle count.
    data_wait_share: Quantity | None = None
    #: Peak memory, maximum over ranks: allocated by torch on the device; on a CPU, of the process.
    peak_memory_bytes: Count | None = None
    #: Peak memory that torch's allocator reserved on the device, its cache included, maximum over ranks. It decides
    #: whether a run fits; null on a CPU.
    peak_reserved_bytes: Count | None = None
    #: GPU memory in use outside torch's allocator after the last step, maximum over ranks: the CUDA context, NCCL
    #: buffers and other processes; null on a CPU.
    outside_memory_bytes: Count | None = None
    device_memory_bytes: Count | None = None  #: Memory of a GPU, minimum over ranks; null on a CPU.
    #: Seconds from "ready to start" to the end of the first step on all ranks.
    first_step_seconds: Amount | None = None
    #: These seconds by phase: ``import``, ``config``, ``rendezvous``, ``build``, ``first_step``.
    startup_seconds: dict[str, Amount] | None = None
    mfu_causal: Quantity | None = None  #: The MFU without the FLOPs that causal attention masks; null if unknown.

    @property
    def rate(self) -> float | None:
        """Tokens per second, or samples per second if samples are not token sequences."""
        return self.tokens_per_second or self.samples_per_second


class Communication(Struct):
    """One communication operation, such as ``all_reduce``, in one step: mean over ranks.

    ``dispatch`` sends tokens to the ranks of their experts and ``combine`` returns the results, in both passes.
    """

    calls: Amount  #: Number of calls per rank.
    bytes: Amount  #: Size of a rank's input, or of its output if that is larger.
    #: Seconds in flight, from when the last rank called it; overlapping calls count once. A gloo message whose end was
    #: not noted in time counts as the average of the others; 0 if no end was noted.
    seconds: Amount
    #: The exposed part of ``seconds``, in which the rank computed nothing: a share of the phase ``communication``.
    exposed_seconds: Amount


class Phases(Struct):
    """Breakdown of a step's time, from a few profiled steps after the timed ones (``profile.steps``).

    Since the profiler slows steps down, the seconds of the profiled steps are scaled to the mean timed step.
    """

    steps: Count | None = None  #: Number of profiled steps; 0 if there are no phases.
    reason: str | None = None  #: Why there are no phases.
    profiled_step_seconds: Amount | None = None  #: Mean duration of a profiled step on the slowest rank.
    #: Mean duration of a timed step, to which all seconds are scaled; of a profiled step if none was timed.
    step_seconds: Positive | None = None
    #: Seconds of a step by phase, one number per rank; the phases of a rank add up to its step. ``data``: waiting for
    #: the batch. ``forward``, ``backward``: these passes without the waiting below; recomputation is part of
    #: ``backward``. ``communication``: exposed communication, during which the rank computed nothing. ``stragglers``:
    #: waiting for the last rank to call a collective. ``experts``: waiting for the last rank to compute its experts of
    #: a layer. ``bubble``: waiting for another pipeline stage to call its side of a message. ``host``: a GPU waiting
    #: for its host to launch the next kernel. ``optimizer``: clipping, the optimizer, loss scaling. ``other``:
    #: everything else.
    ranks: dict[str, list[Amount]] | None = None
    communication: dict[str, Communication] | None = None  #: The communication operations.
    #: For each rank, the seconds of a step in which the others waited for it: mean over the others.
    waited_for: list[Amount] | None = None
    #: For each profiled step, the rank that the others waited for longest; null if they waited for none.
    waited_for_most: list[Count | None] | None = None
    stages: list[list[Count]] | None = None  #: The pipeline stages of each rank; null without a pipeline.
    #: The bubble's share of a step by the schedule's formula, assuming stages of equal duration; null without a
    #: pipeline, and if there is no formula for so few micro-batches.
    bubble_formula: Amount | None = None


class Memory(Struct):
    """Breakdown of each rank's memory at the peak of a step, from a step after the timed ones.

    It counts what torch allocates on the rank's device: on a CPU without Python and libraries, on a GPU without the
    CUDA context and NCCL buffers.
    """

    reason: str | None = None  #: Why there are no figures.
    #: Bytes by kind, one number per rank; the kinds of a rank add up to its peak. ``weights``: parameters and buffers,
    #: or the rank's shards. ``gradients``: unsharded ones that FSDP has not reduced yet included. ``optimizer``: its
    #: state. ``activations``: all other allocations of the forward and the
    #: backward pass. ``communication``: send and receive buffers, and weights that FSDP has all-gathered. ``other``:
    #: the batch, temporaries of the update, and on a GPU allocations from before the step, such as library workspaces,
    #: and the allocator's rounding.
    ranks: dict[str, list[Whole]] | None = None
    #: The part of the step in which each rank had its peak: ``data``, ``forward``, ``backward``, ``optimizer`` or
    #: ``other``.
    moments: list[str] | None = None


class Messages(Struct):
    """Messages of one operation in a step: mean over the ranks that were run.

    In a plan, each of these ranks is weighted by the number of ranks that it stands for.
    """

    calls: Amount  #: Number of calls per rank.
    #: Size of a rank's input, or of its output if that is larger; null if the trace does not contain it.
    bytes: Amount | None = None


class FirstStep(Struct):
    """What ranks did until the end of a program's first step; each list has one number for each rank."""

    allocated_bytes: list[Count] | None = None  #: Peak memory allocated by PyTorch until then.
    kernels: dict[str, list[Count]] | None = None  #: Kernels by kind.
    flops: list[Count] | None = None  #: FLOPs of matrix products.
    messages: dict[str, Messages] | None = None  #: Messages by operation.


class Virtual(Struct):
    """Results of a run on virtual GPUs. These compute nothing, so times, rates and losses are unknown.

    Each list has one number for each of ``ranks``.
    """

    device: str | None = None  #: The name of the GPUs, which begins with ``virtual``.
    ranks: list[Count] | None = None  #: The ranks that were run.
    allocated_bytes: list[Count] | None = None  #: Peak memory allocated by PyTorch.
    #: The step of this peak, from 1; of a program of one's own.
    peak_steps: list[Count] | None = None
    #: Peak memory that torch's allocator reserved on the device, its cache included.
    reserved_bytes: list[Count] | None = None
    #: Peak memory of the device outside of torch's allocator, the CUDA context included; of a program of one's own.
    outside_bytes: list[Count] | None = None
    #: Memory of the CUDA context outside the allocator, as estimated in ``conf/virtual``. The peaks include cuBLAS
    #: workspaces, which torch allocates; cuDNN workspaces are empty here. NCCL buffers are not counted.
    context_bytes: Count | None = None
    communicators: list[Count] | None = None  #: Process groups, each with an NCCL communicator and its buffers.
    #: Seconds that the host took to launch a step, on this machine and sharing it with the other ranks; null with
    #: ``profile.steps=0``.
    host_seconds: list[Amount] | None = None
    #: Kernels of a step by kind: ``product``, ``attention``, ``convolution``, ``compiled`` (by Triton), ``copy`` (casts
    #: included), ``elementwise``, ``reduction``, ``norm``, ``optimizer``, ``communication`` and ``other``.
    kernels: dict[str, list[Count]] | None = None
    flops: list[Count] | None = None  #: FLOPs of a step's matrix products; of a program of one's own.
    messages: dict[str, Messages] | None = None  #: The messages of a step by operation.
    #: The first step, which also warms up; the fields above are of the last one. Of a program of one's own.
    first_step: FirstStep | None = None
    reason: str | None = None  #: Why kernels and messages are unknown.


class Try(Struct):
    """A short run with one micro-batch, in search of the requested one."""

    micro_batch: Degree  #: Samples of one forward and backward pass of a rank.
    status: str  #: How it ended: ``ok``, ``oom``, ...
    #: Memory that it needed, of the kind that it must fit into; null if it ended before that was known.
    needed_bytes: Count | None = None
    fits: bool | None = None  #: Whether it succeeded and fitted.
    seconds: Amount | None = None  #: Its duration.
    #: Under ``train.micro_batch=best``, samples per second of its steps, one number per repeat.
    rates: list[Quantity] | None = None


class MicroBatch(Struct):
    """The search for a micro-batch that was not given as a number."""

    asked: str | None = None  #: ``max``: the largest that fits; ``best``: the fastest of those that fit.
    found: Degree | None = None  #: The micro-batch of the run; null if none fits.
    #: The memory that it must fit into, less ``memory_reserve``: of a GPU, or of a machine for all its ranks.
    room_bytes: Count | None = None
    tries: list[Try] | None = None  #: The micro-batches tried, in order.


class Footprint(Struct):
    """Bytes of training state on one rank, by formula, exact to the byte."""

    weights: Count  #: Parameters and buffers.
    gradients: Count  #: Gradients.
    optimizer: Count  #: State of the optimizer.


class Plan(Struct):
    """The memory that a run will need, predicted by ``ptdbench plan``; nothing was measured on its devices."""

    capacity_bytes: Count | None = None  #: Memory of a GPU, or of this machine for all its ranks.
    capacity_of: str | None = None  #: The device or machine with that memory.
    room_bytes: Count | None = None  #: The part of it that may be used: all but ``memory_reserve``.
    #: The training state of a rank of each pipeline stage; without a pipeline, of one rank.
    state: list[Footprint] | None = None
    stands_for: list[Count] | None = None  #: For each of ``virtual.ranks``, how many ranks it stands for, itself too.
    rank: Count | None = None  #: The rank that needs most.
    allocated_bytes: Count | None = None  #: Peak memory allocated by torch on that rank.
    reserved_bytes: Count | None = None  #: Peak memory reserved by torch's allocator on that rank; null on a CPU.
    #: Bytes outside torch's allocator by purpose, as far as they are known.
    outside: dict[str, Count] | None = None
    sources: dict[str, str] | None = None  #: The source of each of these figures.
    #: Memory needed on the device of the rank that needs most, or by all ranks on this machine's CPUs; null if unknown.
    needed_bytes: Count | None = None
    #: Whether that is at most ``room_bytes``; null if only the training state is known, and it fits.
    fits: bool | None = None
    #: The largest micro-batch that fits with this global batch; 0 if none does, null if unknown.
    largest_micro_batch: Count | None = None
    tries: list[Try] | None = None  #: The micro-batches tried in that search.
    #: Passes of a step over which gradients were accumulated for these figures; more passes add only to
    #: ``outside.samples``.
    accumulation: Degree | None = None
    reason: str | None = None  #: Why only the training state is known.


class Predicted(Struct):
    """The time of a step, predicted by ``ptdbench plan`` and ``ptdbench virtual``, without measuring it."""

    step_seconds: Quantity | None = None  #: Duration of a step.
    low: Quantity | None = None  #: The shortest duration that is likely, without a measured run to compare with.
    high: Quantity | None = None  #: The longest one.
    tokens_per_second: Quantity | None = None  #: Throughput over all ranks; null if samples are not token sequences.
    samples_per_second: Quantity | None = None  #: Throughput over all ranks.
    mfu: Quantity | None = None  #: As in ``metrics.mfu``.
    #: What takes most of the step: ``products``, ``fp8 products``, ``attention``, ``convolutions``, ``memory``,
    #: ``messages``, ``bubble`` or ``host``.
    bound_by: str | None = None
    parts: dict[str, Amount] | None = None  #: Seconds of each of these on the busiest rank; they add up to the step.
    phases: dict[str, Amount] | None = None  #: Seconds of the phases of that rank's step, as of a measured one.
    errors: dict[str, Amount] | None = None  #: The error of the costs of each, one standard deviation as a share.
    #: Seconds of a step if ``host``, ``messages`` or ``memory`` were twice as fast.
    twice_as_fast: dict[str, Amount] | None = None
    guessed_bytes: Count | None = None  #: Bytes that kernels of that rank move by a guess.
    anchor: str | None = None  #: The measured run that sets the level of the device; null without one.
    reason: str | None = None  #: Why there is no prediction.

    @property
    def rate(self) -> float:
        """Tokens per second, or samples per second if samples are not token sequences; 0 without a prediction."""
        return self.tokens_per_second or self.samples_per_second or 0.0


class Experts(Struct):
    """Distribution of tokens over experts in the steps of the run's last start, without evaluation and profiling."""

    tokens: dict[str, list[Count]] | None = None  #: How often each expert was chosen, by the name of its router.
    dropped: Count | None = None  #: How many of these choices were dropped because an expert was full.
    #: Tokens computed by the fullest rank over the mean of all ranks, averaged over steps and layers; 1 if perfectly
    #: balanced, null if no ranks share experts.
    fullest_rank: Amount | None = None


class Energy(Struct):
    """Energy consumed by devices during steps, except the first ``train.warmup_steps``.

    Evaluations, checkpoints and other interruptions of steps are excluded. Null with a ``reason`` if unknown for some
    device.
    """

    source: str | None = None  #: The counters that were read: ``NVML``.
    steps: Count | None = None  #: Number of steps during which energy was metered; minimum over devices.
    seconds: Amount | None = None  #: Their duration; minimum over devices.
    watts: Amount | None = None  #: Mean power of all devices together.
    joules_per_sample: Amount | None = None  #: Energy of all devices in one step over the samples of its global batch.
    reason: str | None = None  #: Why there are no figures.


class Clocks(Struct):
    """What held back the clocks of one rank's GPU during steps."""

    rank: Count  #: The rank.
    #: Share of the time in which clocks were held below the application clocks, by cause: ``power limit``,
    #: ``temperature limit``, ``sync boost``, ``board limit``, ``reliability limit``, as far as the driver counts them.
    #: Causes may coincide; null if it counts none.
    held_back: dict[str, Amount] | None = None
    power_limit_watts: Amount | None = None  #: The power limit of the GPU; null if NVML does not report it.


class Hardware(Struct):
    """The hardware during the steps of the run's last start: energy, what limited clocks, and other load."""

    gpu: Energy | None = None  #: The ranks' GPUs with their memory, including everything else that ran on them.
    clocks: list[Clocks] | None = None  #: One for each rank that has a GPU.
    #: What other processes took meanwhile, by node; null if the steps on CPUs took less than a second.
    other_load: list[OtherLoad] | None = None


class Evaluation(Struct):
    """One evaluation on the held-out part."""

    step: Count  #: Number of optimizer steps done before it.
    samples: Count  #: Samples of the held-out part, each counted once.
    loss: float | None  #: The model's mean loss per target, in evaluation mode; null if it was not finite.
    top1: Amount | None  #: Top-1 accuracy, 0 to 1; null if samples have no classes, or outputs are not one per class.
    top5: Amount | None  #: Top-5 accuracy, 0 to 1.
    bits_per_byte: Amount | None  #: Loss in bits per byte of text; null if samples are not text.
    seconds: Amount  #: Duration.

    def __str__(self) -> str:
        """Return the main figure, such as ``held-out 97.2%``."""
        if self.top1 is not None:
            return f"held-out {100 * self.top1:.1f}%"
        if self.bits_per_byte is not None:
            return f"held-out {self.bits_per_byte:.3f} bits/byte"
        return f"held-out loss {math.nan if self.loss is None else self.loss:.4f}"


class SegmentLayout(Layout):
    """What must be equal for step times to be comparable: the layout, the work, the launcher and the nodes."""

    parallel: dict[str, Any] | None = None  #: The options of ``parallel``.
    launcher: str | None = None  #: The launcher.
    nodes: list[str] | None = None  #: The nodes, sorted.
    work: str | None = None  #: A digest of all options that may affect step times, such as ``compile``.


class Segment(Struct):
    """One start of the run, whose times are kept apart from those of other starts."""

    first_step: Count  #: The number of its first step.
    steps: Count  #: Number of steps done.
    #: What its step times depend on. ``metrics`` includes the timed steps of all starts with the same layout.
    layout: SegmentLayout
    startup_seconds: dict[str, Amount]  #: Seconds until the end of its first step, by phase.
    warmup_steps: Count = 0  #: Number of untimed steps at its beginning.


class Remarks(Struct, omit_defaults=True):
    """Remarks on a run."""

    #: How uneven the stages of a pipeline are, if the largest costs over 1.25 times the mean.
    pipeline: str | None = None
    kernels: str | None = None  #: What of ours was used with ``kernels=torch``.
    cut_short: str | None = None  #: Why there were fewer steps than requested.
    #: The step and the checkpoint from which the run resumed, and how its ranks or its layout changed since then.
    resumed: str | None = None
    #: Checkpoints that were skipped or could not be written, and steps whose numbers are lost.
    checkpoints: list[str] | None = None


class Owner(Struct):
    """The process that opened a record."""

    launch: str  #: The name of its start of the run.
    host: str  #: Its machine.
    pid: Whole  #: Its process id there.
    started: float  #: When the process was created, in seconds since the epoch, because process ids are reused.
    job: str | None  #: Its SLURM job, as squeue prints it; null outside a job.


class Environment(Struct):
    """The machine and the installation, as seen by rank 0."""

    ptdbench: str | None = None  #: Version of this package.
    python: str | None = None  #: Version of Python.
    torch: str | None = None  #: Version of PyTorch.
    torchvision: str | None = None  #: Version of torchvision.
    numpy: str | None = None  #: Version of NumPy.
    cuda: str | None = None  #: CUDA version that torch was built for.
    rocm: str | None = None  #: ROCm version that torch was built for; null in other builds.
    tf32: bool | None = None  #: Whether matrix products or convolutions of fp32 tensors may run in TF32; null on a CPU.
    cudnn: Count | None = None  #: Version of cuDNN; null on a CPU.
    nccl: str | None = None  #: Version of NCCL; null on a CPU.
    driver: str | None = None  #: Version of the GPU driver; null on a CPU.
    devices: list[Any] | None = None  #: The GPUs that rank 0 sees.
    git_commit: str | None = None  #: The commit of this package, if it runs from a repository.
    git_dirty: bool | None = None  #: Whether files differ from that commit.
    cpu: str | None = None  #: Name of the CPU.
    cores: Count | None = None  #: CPU cores that rank 0 may use.
    host: str | None = None  #: Name of the machine.
    os: str | None = None  #: Name and version of the operating system.
    settings: dict[str, str] | None = None  #: Environment variables that change results or speed, by name.


class Identity(Struct):
    """The fields of every record."""

    #: ``ok``, or how the run failed: ``failed``, ``oom``, ``diverged``, ``timeout`` or ``preempted`` (can be resumed).
    status: str
    #: The workload: ``train``, ``hello``, ``matmul``, ``p2p``, ``collectives``, ``check``, ``program`` (any
    #: program on virtual GPUs) or one of your own.
    workload: str
    fingerprint: str  #: Sixteen hex digits, equal for two runs if and only if their resolved configurations are equal.
    directory: str  #: The run's directory when it ran.
    schema: Whole = 1  #: The version of this schema: 2.


class Record(Identity):
    """``record.json`` of a run, and its line in the ``results.jsonl`` of its sweep."""

    #: The choice of ``model``; null, as are all training fields, for a workload that does not train.
    model: str | None = None
    parallel: str | None = None  #: The choice of ``parallel``.
    world_size: Degree | None = None  #: Ranks, one device each.
    global_batch: Degree | None = None  #: Samples of one optimizer step over all ranks.
    tokens_per_sample: Count | None = None  #: Length of a sequence; null if samples are not token sequences.
    precision: str | None = None  #: ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8`` or ``fp8_tensorwise``.
    parameters: Count | None = None  #: Parameters of the whole model; tied ones count once.
    overrides: list[str] | None = None  #: The overrides typed for the run; null if unknown.
    started: str | None = None  #: When the run started, in UTC, as ISO 8601.
    owner: Owner | None = None  #: The process that opened the record; null if the run has not been started.
    launcher: str | None = None  #: The launcher: ``local``, ``torchrun``, ``srun``, ...
    nodes: list[str] | None = None  #: The nodes, in the order of the ranks.
    layout: Layout | None = None  #: How the global batch was divided among the ranks.
    warmup_steps: Count | None = None  #: Number of untimed steps of the run's last start.
    metrics: Metrics | None = None  #: Figures of the timed steps, also if the run did not finish.
    phases: Phases | None = None  #: Breakdown of a step's time; null for a run that was not profiled.
    memory: Memory | None = None  #: Breakdown of a step's memory; null for a run that was not profiled.
    #: Energy and clocks of the hardware; null for a run that did not finish training.
    hardware: Hardware | None = None
    error: Error | None = None  #: Why the run did not succeed; null if it did.
    remarks: Remarks | None = None  #: Remarks.
    environment: Environment | None = None  #: Versions and hardware.
    #: The resolved configuration, with every option that ``conf/`` describes; for a refused run, as it was typed.
    #: Numbers that JSON cannot represent are text, such as ``"inf"``.
    config: dict[str, Any] | None = None
    #: Number of optimizer steps done, those before a resume included: the number of rows of ``series.npy``.
    steps: Count | None = None
    final_loss: float | None = None  #: Loss of the last step; null if it was not finite.
    evaluations: list[Evaluation] | None = None  #: The evaluations on the held-out part, in the order of steps.
    segments: list[Segment] | None = None  #: One for each start of the run.
    #: ``virtual``: run on virtual GPUs; ``planned``: by ``ptdbench plan``; null: measured.
    kind: str | None = None
    virtual: Virtual | None = None  #: Results of a run on virtual GPUs; null for any other run.
    micro_batch: MicroBatch | None = None  #: How the micro-batch was found; null if it was given.
    plan: Plan | None = None  #: What the run will need; null unless it was only planned.
    #: How long its steps will take; in a measured run, what the latest ``ptdbench plan`` of it on such GPUs said; null
    #: without one.
    predicted: Predicted | None = None
    experts: Experts | None = None  #: Tokens by expert; null for a model without experts, and on virtual GPUs.
    sources: list[str] | None = None  #: ``--config-dir`` and the like, as typed for the run; null if unknown.
    #: Environment variables that ``hydra.job.env_set`` gives the run; null if unknown.
    variables: dict[str, str] | None = None
    #: ``fused``: our kernels, or ``torch``: torch's own recipes; null in records of earlier versions, which were fused.
    kernels: str | None = None


#: An error without a type, of no rank.
NO_ERROR = {"rank": -1, "type": "", "message": "", "traceback": ""}


def error(record: Written) -> Error:
    """Return why a run did not succeed; if it did, an error without a type."""
    return msgspec.convert(NO_ERROR | (record.get("error") or {}), Error)


def parse(text: bytes) -> Any:
    """Parse strict JSON, but not with ``msgspec``, which rejects non-UTF-8 text such as a path in an error message.

    Raises:
        ValueError: It is not JSON, or nested too deeply.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("not JSON of this program (nested too deeply)") from None


def read(text: bytes, kind: type[T]) -> T:
    """Parse strict JSON as a type; raises ValueError."""
    return msgspec.convert(parse(text), kind)


def json_schema() -> bytes:
    """Return the JSON Schema of a record, as published in the docs and the wheel."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Record)))
