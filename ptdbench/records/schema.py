"""The schema of a record, and the validation of records read from files.

A field may be missing: a record is written before its run begins, and a missing field is ``None`` here. A field that is
present has the type declared here. The tables of ``docs/record.md`` are built from this module
and :mod:`ptdbench.records.workload_results`: the comment beside or above a field is its description.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from ptdbench.parallel.dims import Dims

T = TypeVar("T")
S = TypeVar("S", bound=Struct)

#: A record as it is written, in JSON's types; :func:`part` reads a group of it by its type.
Written = Mapping[str, Any]

#: The schema version that this version writes.
SCHEMA = 2

#: Numbers within limits: figures made of others would be errors or infinities.
Whole = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Degree = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Amount = Annotated[float, Meta(ge=-1e30, le=1e30)]
Quantity = Annotated[float, Meta(ge=0, le=1e30)]
Positive = Annotated[float, Meta(ge=1e-30, le=1e30)]


class Error(Struct):
    """Why a run did not end well."""

    rank: Whole  #: The rank that failed first; -1 for the process that starts the ranks.
    type: str  #: The class of the exception, or the name of the signal.
    message: str  #: The error message.
    #: The traceback as text, of a crash in native code the stack; empty if the process could not write one.
    traceback: str
    #: The last frame in the user's code, as in ``mymodels.py:13 in forward``, of a crash else in ptdbench; or empty.
    where: str | None = None


#: A field for each degree of parallelism, which is described in their table.
OfDegrees = msgspec.defstruct("OfDegrees", [(name, Degree | None, None) for name in Dims.rows()], module=__name__)


class Layout(OfDegrees):  # type: ignore[valid-type, misc]
    """How the global batch is divided among the ranks."""

    data: Degree | None = None  #: Shares that the global batch is divided into: ``replicate * shard``.
    global_batch: Degree | None = None  #: Samples of one optimizer step over all ranks.
    micro_batch: Degree | None = None  #: Samples of one forward pass.
    microbatches: Degree | None = None  #: Micro-batches of one pass of the pipeline schedule.
    accumulation: Degree | None = None  #: Passes whose gradients add up to one optimizer step.


class StepSeconds(Struct):
    """Location and spread of the timed steps, in seconds; a step takes as long as its slowest rank."""

    median: Positive | None = None  #: The median.
    mean: Positive | None = None  #: The mean.
    p5: Positive | None = None  #: The 5 % quantile.
    p95: Positive | None = None  #: The 95 % quantile.
    ci95: list[Positive] | None = None  #: ``[low, high]``, the 95 % interval of the median; null below six steps.


class Metrics(Struct):
    """Figures of the timed steps, those after the warm-up; null if unknown."""

    step_seconds: StepSeconds | None = None  #: Statistics of the step times.
    #: Tokens of all ranks in all timed steps over the seconds of these; null if samples are not token sequences.
    tokens_per_second: Positive | None = None
    samples_per_second: Positive | None = None  #: Samples of all ranks in all timed steps over the seconds of these.
    tokens_per_second_per_device: Positive | None = None  #: The same for one device.
    samples_per_second_per_device: Positive | None = None  #: The same for one device.
    #: FLOP/s of all devices by the model's formula, attention in full; recomputation does not count.
    model_flops_per_second: Quantity | None = None
    mfu: Quantity | None = None  #: Model FLOP/s of a device over its dense peak by the data sheet.
    mfu_reason: str | None = None  #: Why there is no ``mfu``.
    #: In fp8, model FLOP/s of a device over its bf16 peak, to compare with runs in bf16.
    mfu_of_bf16: Quantity | None = None
    #: FLOP/s that ``workload=matmul`` measured on this device in this arithmetic.
    ceiling_flops_per_second: Positive | None = None
    #: Whether other processes used the device while that was measured, so that it may be too low; null if unknown.
    ceiling_beside_load: bool | None = None
    #: Model FLOP/s of a device over that ceiling; ``remarks.ceiling`` says why where it is above 1.
    share_of_ceiling: Quantity | None = None
    ceiling_reason: str | None = None  #: Why there is no ceiling.
    #: Share of the timed steps' seconds spent waiting for batches; on a GPU by waits at whose end it had nothing to do.
    data_wait_share: Quantity | None = None
    #: Peak memory, the maximum over ranks: what torch allocated on the device, or of the process on a CPU.
    peak_memory_bytes: Count | None = None
    #: Peak of what torch's allocator took from the device, the maximum over ranks: with what it keeps for later, which
    #: decides whether a run fits; null on a CPU.
    peak_reserved_bytes: Count | None = None
    #: What was taken of a GPU beside torch's allocator after the last step, the maximum over ranks: the context, the
    #: buffers of NCCL, and other processes; null on a CPU.
    outside_memory_bytes: Count | None = None
    device_memory_bytes: Count | None = None  #: Memory of a GPU, the minimum over ranks; null on a CPU.
    #: Seconds from "ready to start" to the end of the first step on all ranks.
    first_step_seconds: Amount | None = None
    #: These by phase: ``import``, ``config``, ``rendezvous``, ``check``, ``build``, ``first_step``.
    startup_seconds: dict[str, Amount] | None = None
    #: ``model_flops_per_second`` with causal attention by half, as far as it is not masked; null if unknown.
    causal_flops_per_second: Quantity | None = None
    mfu_causal: Quantity | None = None  #: The MFU by these FLOP/s.


class Communication(Struct):
    """What ranks send with one operation, such as ``all_reduce``, in one step: the mean over ranks.

    ``dispatch`` is what goes to the ranks with the experts of tokens, and ``combine`` what comes back, in both passes.
    """

    calls: Amount  #: How often a rank calls it.
    bytes: Amount  #: Size of what a rank hands over, or receives where that is larger.
    #: Seconds in which it was under way, counted from when the last rank called it; overlapping calls count once. A
    #: message of gloo whose end was not noted in time counts as the others; 0 if that is unknown of all.
    seconds: Amount
    #: The part of them in which the rank computed nothing: a share of the phase ``communication``.
    exposed_seconds: Amount
    #: What ``bytes`` should be for this layout, without messages of a single number; null if no exact formula is known.
    formula_bytes: Amount | None = None
    #: The least and the most that ``bytes`` can be, where what is sent is in the data; null otherwise.
    formula_range: list[Amount] | None = None
    #: What ``calls`` with ``bytes`` take by the line that ``workload=collectives`` last fitted on these ranks, with
    #: this backend and torch; null if it did not, or the operation is not one of all ranks.
    fit_seconds: Amount | None = None


class Phases(Struct):
    """Where the time of a step went, from a few profiled steps after the timed ones (``profile.steps``).

    The profiler slows steps down: seconds are those of the profiled steps, scaled to the mean timed step.
    """

    steps: Count | None = None  #: Number of profiled steps; 0 if there are no phases.
    reason: str | None = None  #: Why there are no phases.
    profiled_step_seconds: Amount | None = None  #: Mean duration of a profiled step, of the slowest rank.
    #: Mean duration of a timed step, to which all seconds are scaled; of a profiled one if no step was timed.
    step_seconds: Positive | None = None
    #: Seconds of a step by phase, one number for each rank; the phases of a rank add up to its step. ``data``: waiting
    #: for the batch. ``forward``, ``backward``: these passes without the waiting below; recomputation is part of
    #: ``backward``. ``communication``: exposed, the rank computed nothing meanwhile. ``stragglers``: waiting until the
    #: last rank of a collective operation had called it. ``experts``: waiting until the last rank had computed its
    #: experts of a layer. ``bubble``: waiting until another stage of the pipeline had called its side of a message.
    #: ``host``: a GPU waited for its host to launch the next kernel. ``optimizer``: clipping, the optimizer, loss
    #: scaling. ``other``: all else.
    ranks: dict[str, list[Amount]] | None = None
    communication: dict[str, Communication] | None = None  #: The operations of communication.
    #: For each rank the seconds of a step in which others waited for it: the mean over the others.
    waited_for: list[Amount] | None = None
    #: For each profiled step the rank that the others waited for longest; null if they waited for none.
    waited_for_most: list[Count | None] | None = None
    stages: list[list[Count]] | None = None  #: The pipeline's stages on each rank; null without a pipeline.
    #: The bubble's share of a step by the formula of the schedule, for stages that take equally long; null without a
    #: pipeline.
    bubble_formula: Amount | None = None
    #: For each stage the names of the parts that it holds besides repeated layers, such as ``embedding`` and ``head``;
    #: null without a pipeline.
    stage_parts: list[list[str]] | None = None
    pass_seconds: Amount | None = None  #: What profiling took, from the first profiled step to the last figure.
    #: How messages between stages go: ``directions``: through one NCCL communicator for activations and one for
    #: gradients. ``one``: through one, in the order of its calls, as torch before 2.14 has no other. ``messages``: each
    #: by itself, over gloo. Null without a pipeline.
    stage_links: str | None = None


class Memory(Struct):
    """What the memory is for when a step takes the most, on each rank; from a step after the timed ones.

    It counts what torch allocates on the rank's device: on a CPU without Python and libraries, on a GPU without the
    context and the buffers of NCCL.
    """

    reason: str | None = None  #: Why there are no figures.
    #: Bytes by kind, one number for each rank; those of a rank add up to its peak. ``weights``: parameters and buffers,
    #: of which a rank may have shards. ``gradients``: also those of whole weights that FSDP has not reduced yet.
    #: ``optimizer``: its state, moving averages of weights included. ``activations``: what else the forward and the
    #: backward pass allocate. ``communication``: what is sent and received, and the weights that FSDP has gathered.
    #: ``other``: the batch, what an update needs for a moment, and on a GPU what was there before for another reason,
    #: such as workspaces of libraries, and what the allocator rounds sizes up by.
    ranks: dict[str, list[Whole]] | None = None
    #: In which part of the step each rank had its peak: ``data``, ``forward``, ``backward``, ``optimizer`` or
    #: ``other``.
    moments: list[str] | None = None
    pass_seconds: Amount | None = None  #: What finding this out took.


class Messages(Struct):
    """What a rank hands over with one operation in a step: the mean over the ranks that were carried out.

    In a plan each of these counts for all the ranks that it stands for.
    """

    calls: Amount  #: How often it calls the operation.
    #: Size of what it hands over, or receives where that is larger; null where the trace does not tell.
    bytes: Amount | None = None
    formula_bytes: Amount | None = None  #: What ``bytes`` should be for this layout; null if no exact formula is known.


class Virtual(Struct):
    """What a run on virtual GPUs tells. These compute nothing: no times, no rates and no loss are known.

    Each list has one number for each of ``ranks``.
    """

    device: str | None = None  #: The name of the GPUs, which begins with ``virtual``.
    real_time: bool | None = None  #: Whether they took their time, by a crude model.
    ranks: list[Count] | None = None  #: The ranks that were carried out.
    allocated_bytes: list[Count] | None = None  #: Peak memory allocated by PyTorch.
    #: Peak of what torch's allocator took from the device: with what it keeps for later.
    reserved_bytes: list[Count] | None = None
    #: What the CUDA context takes beside it, by the figure in ``conf/virtual``, an estimate. Workspaces of cuBLAS are
    #: torch's own, and in the peaks; those of cuDNN would be, and are empty here. NCCL's buffers are not counted.
    context_bytes: Count | None = None
    communicators: list[Count] | None = None  #: Process groups, each of which has an NCCL communicator with buffers.
    #: Seconds in which the host had launched a step: of this machine, beside the other ranks on it; null with
    #: ``profile.steps=0``.
    host_seconds: list[Amount] | None = None
    #: Kernels of a step by kind: ``product``, ``attention``, ``convolution``, ``compiled`` (by Triton), ``copy`` (casts
    #: included), ``elementwise``, ``reduction``, ``norm``, ``optimizer``, ``communication`` and ``other``.
    kernels: dict[str, list[Count]] | None = None
    messages: dict[str, Messages] | None = None  #: The messages of a step by operation.
    reason: str | None = None  #: Why kernels and messages are not known.


class Try(Struct):
    """A short run of one micro-batch, to find the one that was asked for."""

    micro_batch: Degree  #: Samples of one forward and backward pass of a rank.
    status: str  #: How it ended: ``ok``, ``oom``, ...
    #: What it needed of the memory that it must fit into; null if it ended before that was known.
    needed_bytes: Count | None = None
    fits: bool | None = None  #: Whether it ended well and fitted.
    seconds: Amount | None = None  #: What it took.
    #: Under ``train.micro_batch=best``, samples a second of its steps, one number for each repeat.
    rates: list[Quantity] | None = None


class MicroBatch(Struct):
    """How a micro-batch that was not given was found."""

    asked: str | None = None  #: ``max``: the largest that fits; ``best``: the fastest of those that fit.
    found: Degree | None = None  #: The micro-batch of the run; null if none fits.
    #: The memory that it must fit into, without ``memory_reserve``: of a GPU, or of a machine for all its ranks.
    room_bytes: Count | None = None
    tries: list[Try] | None = None  #: What was tried, in that order.


class Footprint(Struct):
    """Bytes of training state on one rank, by formula, exact to the byte."""

    weights: Count  #: Parameters and buffers.
    gradients: Count  #: Gradients.
    optimizer: Count  #: State of the optimizer.


class Plan(Struct):
    """What a run will need of memory, by ``ptdbench plan``; nothing of it was measured on its devices."""

    capacity_bytes: Count | None = None  #: Memory of a GPU, or of this machine for all ranks on it.
    capacity_of: str | None = None  #: Whose memory that is.
    room_bytes: Count | None = None  #: What of it may be used: without ``memory_reserve``.
    #: The training state of a rank of each stage of the pipeline; of one without a pipeline that of a rank.
    state: list[Footprint] | None = None
    stands_for: list[Count] | None = None  #: For each of ``virtual.ranks`` how many ranks do the same, itself included.
    rank: Count | None = None  #: The rank that needs most.
    allocated_bytes: Count | None = None  #: Peak of what torch's allocator hands out there.
    reserved_bytes: Count | None = None  #: Peak of what it takes from the device there; null on a CPU.
    #: Bytes that lie beside torch's allocator by what takes them, as far as they are known.
    outside: dict[str, Count] | None = None
    sources: dict[str, str] | None = None  #: Where each of these figures comes from.
    #: What the rank that needs most takes of its device, on CPUs all ranks of this machine; null if unknown.
    needed_bytes: Count | None = None
    #: Whether that is at most ``room_bytes``; null if only the training state is known, and it fits.
    fits: bool | None = None
    #: The largest micro-batch that fits with this global batch; 0 if none does, null if unknown.
    largest_micro_batch: Count | None = None
    tries: list[Try] | None = None  #: The micro-batches that were carried out for that.
    #: Passes of a step whose gradients were accumulated for these figures; more only have more ``outside.samples``.
    accumulation: Degree | None = None
    reason: str | None = None  #: Why there are no more figures than those of the training state.


class Experts(Struct):
    """How routers spread the tokens of a run over their experts, evaluation and profiling left out."""

    tokens: dict[str, list[Count]] | None = None  #: How often each expert was chosen, by the name of its router.
    dropped: Count | None = None  #: How many of these choices were dropped, because an expert was full.
    #: Tokens that the fullest rank computed over those of the mean rank: 1 if all have equally many; the mean over
    #: steps and layers. Null where no ranks share experts.
    fullest_rank: Amount | None = None


class Energy(Struct):
    """Energy that devices took while the run did steps after the first ``train.warmup_steps`` ones.

    Evaluations, checkpoints and all else that interrupts steps is left out. Null with a ``reason`` if it is not known
    of all devices.
    """

    source: str | None = None  #: Whose counters were read: ``NVML`` or ``RAPL``.
    steps: Count | None = None  #: Number of steps during which it was metered; the fewest of a device.
    seconds: Amount | None = None  #: Their duration; the shortest of a device.
    watts: Amount | None = None  #: Mean power of all devices together.
    joules_per_step: Amount | None = None  #: Energy of all devices in one step.
    joules_per_sample: Amount | None = None  #: The same over the samples of the global batch.
    joules_per_token: Amount | None = None  #: The same over its tokens; null if samples are not token sequences.
    reason: str | None = None  #: Why there are no figures.


class Clocks(Struct):
    """The clocks of one rank's GPU while the run did steps; null if NVML does not tell."""

    rank: Count  #: The rank.
    sm_clock_mhz: Count | None  #: Clock of its multiprocessors in the last steps.
    #: The lowest that was seen; it is looked at whenever steps are interrupted, about every 10 seconds.
    sm_clock_least_mhz: Count | None
    sm_clock_most_mhz: Count | None  #: The highest that the GPU has.
    #: Why it did not run at its highest clock when it was looked at: ``power cap``, ``too hot (hardware)``, ...
    clock_reasons: list[str] | None
    #: Share of the time in which clocks were held below the application clocks, by cause: ``power limit``,
    #: ``temperature limit``, ``sync boost``, ``board limit``, ``reliability limit``, as far as the driver counts them.
    #: Causes may coincide.
    held_back: dict[str, Amount] | None


class Hardware(Struct):
    """The hardware while the last start of the run did steps: energy, clocks, and what held these back."""

    #: All CPU packages of the machines that the ranks ran on, without memory modules. A package does not tell whose
    #: work it does: the energy is that of everything that ran there.
    cpu: Energy | None = None
    gpu: Energy | None = None  #: The ranks' GPUs with their memory, all that ran on them included.
    clocks: list[Clocks] | None = None  #: One for each rank that has a GPU.


class Evaluation(Struct):
    """One evaluation on the held-out part."""

    step: Count  #: Number of optimizer steps done before it.
    samples: Count  #: Samples of the held-out part, each counted once.
    loss: float | None  #: The model's mean loss per target, in evaluation mode; null if it was not finite.
    top1: Amount | None  #: Top-1 accuracy, 0 to 1; null if samples have no classes, or outputs are not one for each.
    top5: Amount | None  #: Top-5 accuracy, 0 to 1.
    bits_per_byte: Amount | None  #: Loss in bits per byte of text; null if samples are not text.
    seconds: Amount  #: Duration.

    def better_than(self, other: Evaluation) -> bool:
        """Return whether this is the better evaluation: by top-1 accuracy if there is one, else by loss."""
        if self.loss is None or other.loss is None:  # diverged
            return self.loss is not None
        if self.top1 is not None and other.top1 is not None:
            return self.top1 > other.top1
        return self.loss < other.loss

    def __str__(self) -> str:
        """The main figure, as in ``held-out 97.2 %``."""
        if self.top1 is not None:
            return f"held-out {100 * self.top1:.1f} %"
        if self.bits_per_byte is not None:
            return f"held-out {self.bits_per_byte:.3f} bits/byte"
        return f"held-out loss {math.nan if self.loss is None else self.loss:.4f}"


class SegmentLayout(Layout):
    """What must be equal for the times of steps to be comparable: the layout, the work, the launcher and the nodes."""

    parallel: dict[str, Any] | None = None  #: The options of ``parallel``.
    launcher: str | None = None  #: The launcher.
    nodes: list[str] | None = None  #: The nodes, sorted.
    work: str | None = None  #: A digest of all options that a step may take longer by, such as ``compile``.


class Segment(Struct):
    """One start of the run, whose times are not mixed with those of other starts."""

    first_step: Count  #: The number of its first step.
    steps: Count  #: Number of steps that it has done.
    #: What its times depend on. ``metrics`` includes the timed steps of all starts with the same layout.
    layout: SegmentLayout
    startup_seconds: dict[str, Amount]  #: Seconds until the end of its first step, by phase.
    warmup_steps: Count  #: Number of untimed steps at its beginning.


class Remarks(Struct):
    """Remarks on a run."""

    check: str | None = None  #: What the check before the run (``check=true``) found unsound.
    ceiling: str | None = None  #: That the run passed the ceiling, which was measured again, and what came of it.
    cut_short: str | None = None  #: Why there were fewer steps than asked for.
    #: The step and the checkpoint that the run resumed from, and how its ranks or its layout have changed since.
    resumed: str | None = None
    #: Checkpoints that were skipped or could not be written, and steps whose numbers are lost.
    checkpoints: list[str] | None = None
    leaving: list[str] | None = None  #: Ranks that had to be ended after their work was done.


class Owner(Struct):
    """The process that opened a record."""

    launch: str  #: The name of its start of the run.
    host: str  #: Its machine.
    pid: Whole  #: Its process id there.
    started: float  #: When it was created, in seconds since the epoch: process ids are reused.
    job: str | None  #: Its SLURM job in the form of squeue; null outside a job.


class Environment(Struct):
    """The machine and the installation, as seen by rank 0."""

    ptdbench: str | None = None  #: Version of this package.
    python: str | None = None  #: Version of Python.
    torch: str | None = None  #: Version of PyTorch.
    torchvision: str | None = None  #: Version of torchvision.
    numpy: str | None = None  #: Version of NumPy.
    cuda: str | None = None  #: Version of CUDA that torch was built for.
    rocm: str | None = None  #: Version of ROCm that torch was built for; null in other builds.
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

    #: ``ok``, or how it failed: ``failed``, ``oom``, ``diverged``, ``timeout`` or ``preempted`` (can be resumed).
    status: str
    #: The workload: ``train``, ``hello``, ``matmul``, ``p2p``, ``collectives``, ``check`` or one of your own.
    workload: str
    fingerprint: str  #: Sixteen hex digits, equal for two runs if and only if their resolved configurations are equal.
    directory: str  #: The run's directory when it ran.
    schema: Whole = 1  #: The version of this schema: 2.


class Record(Identity):
    """``record.json`` of a run, and its line in the ``results.jsonl`` of its sweep."""

    #: The choice of ``model``; null for a workload that does not train, as are all fields of training.
    model: str | None = None
    parallel: str | None = None  #: The choice of ``parallel``.
    world_size: Degree | None = None  #: Ranks, one device each.
    global_batch: Degree | None = None  #: Samples of one optimizer step over all ranks.
    tokens_per_sample: Count | None = None  #: Length of a sequence; null if samples are not token sequences.
    precision: str | None = None  #: ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8`` or ``fp8_tensorwise``.
    parameters: Count | None = None  #: Parameters of the whole model; tied ones count once.
    overrides: list[str] | None = None  #: The overrides typed for the run; null if unknown.
    started: str | None = None  #: When the run started, in UTC: ISO 8601.
    owner: Owner | None = None  #: The process that opened the record; null if the run waited to be started.
    launcher: str | None = None  #: The launcher: ``local``, ``torchrun``, ``srun``, ...
    nodes: list[str] | None = None  #: The nodes, in the order of the ranks.
    layout: Layout | None = None  #: How the global batch was divided among the ranks.
    warmup_steps: Count | None = None  #: Number of untimed steps of the last start of the run.
    metrics: Metrics | None = None  #: Figures of the timed steps; those until it ended for a run that did not finish.
    phases: Phases | None = None  #: Where the time of a step went; null for a run that was not profiled.
    memory: Memory | None = None  #: What the memory of a step is for; null for a run that was not profiled.
    #: Energy and clocks of the hardware; null for a run that did not train to its end.
    hardware: Hardware | None = None
    error: Error | None = None  #: Why the run did not end well; null if it did.
    remarks: Remarks | None = None  #: Remarks.
    environment: Environment | None = None  #: Versions and hardware.
    #: The resolved configuration: every option, as ``conf/`` describes them; that of a refused run as it was typed.
    #: Numbers that JSON has not are text, such as ``"inf"``.
    config: dict[str, Any] | None = None
    #: Number of optimizer steps done, including those before a checkpoint: the number of rows of ``series.npy``.
    steps: Count | None = None
    final_loss: float | None = None  #: Loss of the last step; null if it was not finite.
    evaluations: list[Evaluation] | None = None  #: The evaluations on the held-out part, in the order of steps.
    segments: list[Segment] | None = None  #: One for each start of the run.
    #: ``virtual``: on GPUs that are not there; ``planned``: by ``ptdbench plan``; null: measured.
    kind: str | None = None
    virtual: Virtual | None = None  #: What a run on virtual GPUs tells; null for any other run.
    micro_batch: MicroBatch | None = None  #: How the micro-batch was found; null where it was given.
    plan: Plan | None = None  #: What the run will need; null for a run that was carried out.
    experts: Experts | None = None  #: Who got how many tokens; null for a model without experts, and on virtual GPUs.


#: Mappings and lists within each other: more would be too many for what reads a record.
_DEEPEST = 50
_TOO_DEEP = "not JSON of this program (nested too deeply)"


def record(text: bytes) -> dict[str, Any]:
    """Parse a record; raises ValueError if it is none, or one of another version of the schema."""
    value = parse(text)
    version = msgspec.convert(value, Identity).schema
    if version != SCHEMA:
        age, remedy = ("an earlier", "run it again") if version < SCHEMA else ("a later", "update ptdbench")
        rule = f"its schema is {version}, of {age} version of ptdbench than this one, which reads {SCHEMA}"
        raise ValueError(f"{rule}; {remedy}")
    if not is_path(msgspec.convert(value, Record).directory):
        raise ValueError("directory is no path")
    return value


#: An error without a type, of no rank.
NO_ERROR = {"rank": -1, "type": "", "message": "", "traceback": ""}


def part(record: Written, kind: type[S]) -> S:
    """Return a group of a record's fields, such as :class:`Metrics`; all are ``None`` where the record has none.

    Of a record as it is read: what a run has in hand may be numbers of NumPy, or none of JSON's.
    """
    return msgspec.convert(record.get(re.sub(r"(?<=.)(?=[A-Z])", "_", kind.__name__).lower()) or {}, kind)


def error(record: Written) -> Error:
    """Return why a run did not end well; of one that did an error without a type."""
    return msgspec.convert(NO_ERROR | (record.get("error") or {}), Error)


def parse(text: bytes) -> Any:
    """Parse strict JSON; ``msgspec`` refuses text that is not UTF-8, such as that of a path in an error message.

    Raises:
        ValueError: It is not JSON, or nested too deeply.
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
    return value


def read(text: bytes, kind: type[T]) -> T:
    """Parse strict JSON of a type; raises ValueError."""
    return msgspec.convert(parse(text), kind)


def is_path(text: str) -> bool:
    """Return whether a file may have this name; asking a file system for another one is an error."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return b"\0" not in name and len(name) < 4096 and all(len(part) < 256 for part in name.split(b"/"))


def _is_too_deep(value: Any) -> bool:
    level = [[value]]
    for _ in range(_DEEPEST):
        items = [item for node in level for item in (node.values() if type(node) is dict else node)]
        level = [item for item in items if type(item) in (dict, list)]
    return bool(level)


def json_schema() -> bytes:
    """Return the JSON Schema of a record, as docs and wheel have it."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Record)))
