"""Checks of a run against its devices: supported precisions, and whether the training state fits into memory."""

import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from ptdbench.measure.memory import host_memory
from ptdbench.models.materialize import parameter_count
from ptdbench.models.protocol import module_of
from ptdbench.parallel.footprint import footprints
from ptdbench.parallel.precision import FP8_RECIPES, has_torchao
from ptdbench.problems import Problem, require, try_these
from ptdbench.setup.config import Slurm
from ptdbench.setup.training_spec import TrainingSpec
from ptdbench.units import memory_text

#: In NVIDIA's libraries this variable overrides torch's settings; 0 disables TF32.
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"

#: The lowest compute capability with hardware support for a format, and what to try below it.
_SINCE = {"tf32": (8, 0), "bf16": (8, 0)} | dict.fromkeys(FP8_RECIPES, (8, 9))
_OTHERS = {"tf32": ("fp32", "fp16"), "bf16": ("fp16",)} | dict.fromkeys(FP8_RECIPES, ("fp16", "bf16"))


def check_precision(precision: object, device_type: str) -> None:
    """Raise ConfigError for a precision that this kind of device lacks, or that the environment overrides."""
    if device_type == "cpu":
        if precision == "tf32" or precision in FP8_RECIPES:
            units = "TF32" if precision == "tf32" else "FP8"
            require(Problem("precision", precision, f"{units} is a format of GPUs", "try fp32, bf16"))
        return
    if precision in FP8_RECIPES and not has_torchao():
        rule = "needs the package torchao, which is not installed"
        require(Problem("precision", precision, rule, "try pip install 'ptdbench[fp8]', or bf16"))
    override = os.environ.get(TF32_OVERRIDE)
    if override is not None and precision in ("fp32", "tf32") and (override == "0") != (precision == "fp32"):
        other = "fp32" if override == "0" else "tf32"
        rule = f"is overridden in NVIDIA's libraries by {TF32_OVERRIDE}={override} in the environment"
        require(Problem("precision", precision, rule, f"unset it, or try {other}"))


def check_gpu_precision(precision: str, device: torch.device) -> None:
    """Raise ConfigError for a precision that this GPU lacks; initializes CUDA."""
    if device.type == "cpu":
        return
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:  # ROCm numbers capabilities differently
        properties: Any = torch.cuda.get_device_properties(device) if precision in FP8_RECIPES else None
        if properties and not properties.gcnArchName.startswith(("gfx94", "gfx95")):
            require(Problem("precision", precision, f"{name} has no FP8 units", "try bf16"))
        return
    check_capability(precision, name, torch.cuda.get_device_capability(device))


def check_capability(precision: object, name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a precision that an NVIDIA GPU of this name and compute capability lacks."""
    if not isinstance(precision, str) or precision not in _SINCE or capability >= _SINCE[precision]:
        return
    units = precision.partition("_")[0].upper()
    rule = f"{name} (compute capability {capability[0]}.{capability[1]}) has no {units} units"
    rule += ", and torch emulates it slowly" if precision == "bf16" else ""
    require(Problem("precision", precision, rule, try_these(_OTHERS[precision])))


def check_kernels(choice: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a virtual GPU of a compute capability that torch's build for CUDA has no kernels for."""
    architectures = torch.cuda.get_arch_list() if torch.version.cuda else []
    if not architectures or any(_runs(architecture, capability) for architecture in architectures):
        return
    rule = f"torch {torch.__version__} has no kernels for compute capability {capability[0]}.{capability[1]}, only for "
    rule += ", ".join(architectures)
    other = "its build for CUDA 12.6" if capability < (7, 5) else "another build"  # CUDA 13 compiles for 7.5 and later
    require(Problem("virtual", choice, rule, f"try a100, or install {other}"))


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture runs on a device: ``sm_90``, ``sm_90a``, ``sm_100f``, ``compute_90``."""
    kind, _, number = architecture.partition("_")
    major, minor = divmod(int(number.rstrip("af")), 10)
    if number.endswith("a"):
        return capability == (major, minor)
    if kind == "compute" and not number.endswith("f"):  # PTX, which the driver compiles for any later device
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor


#: Upper bound of the fp32 numbers per weight over all optimizers, the weight and its gradient included.
_MOST_COPIES = 8


@dataclass(frozen=True)
class Room:
    """Memory available for training state."""

    size: int  #: Bytes.
    ranks: int  #: Ranks that share it.
    owner: str  #: Its owner, for messages: ``this machine``.
    more: str  #: Plural of the owner, for messages: ``such machines``.
    origin: str  #: How the size was determined, for messages.


def on_host(ranks: int, reserve: float, running: bool) -> Room:
    """Return the memory of this host for its ranks, less the fraction ``reserve``.

    If the ranks are already ``running``, they use part of what was available, so the host's total counts.
    """
    memory = host_memory()
    size = memory.total if running else memory.available
    kept = int(reserve * memory.total)
    which = "in all" if running else "available"
    origin = f"{memory_text(size)} {which}, and memory_reserve={reserve:g} keeps {memory_text(kept)}"
    return Room(max(size - kept, 0), ranks, "this machine", "such machines", origin)


def on_gpu(device: torch.device, reserve: float, buffers: int) -> Room:
    """Return the memory of a rank's GPU, less the fraction ``reserve`` and NCCL's ``buffers`` in bytes.

    This initializes CUDA, whose context then counts as used.
    """
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)  # by the previous run, which frees it for this one
    return of_gpu(free, total, reserve, buffers, torch.cuda.get_device_properties(device).name)


def of_gpu(free: int, total: int, reserve: float, buffers: int, name: str) -> Room:
    """Return the ``free`` bytes of a GPU, less the fraction ``reserve`` of its total and NCCL's ``buffers``."""
    kept = int(reserve * total)
    taken = [f"of {memory_text(total)} {memory_text(free)} are free"]
    taken += [f"NCCL takes about {memory_text(buffers)}"] if buffers else []
    origin = f"{name}: {', '.join([*taken, f'memory_reserve={reserve:g} keeps {memory_text(kept)}'])}"
    return Room(max(0, free - kept - buffers), 1, "its GPU", "such GPUs", origin)


def in_job(cluster: Slurm, ranks: int) -> Room | None:
    """Return the memory requested for each node of a job; ``None`` if none was."""
    if cluster.mem_gb is None:
        return None
    size = int(cluster.mem_gb * 2**30)
    return Room(size, ranks, "a node of the job", "such nodes", f"cluster.mem_gb={cluster.mem_gb:g}")


def check_memory(training: TrainingSpec, room: Room) -> None:
    """Raise ConfigError if the training state of a run does not fit; with figures, and what to try."""
    dims, model = training.layout.dims, training.config.call("model").name
    weights = 4 * parameter_count(module_of(training.model))
    if room.ranks * _MOST_COPIES * weights < room.size:  # exact figures take tens of milliseconds
        return
    by_stage = [footprint.total for footprint in training.footprints()]
    starts = range(0, dims.world_size, room.ranks)
    need = max(sum(by_stage[dims.stage(rank)] for rank in range(start, start + room.ranks)) for start in starts)
    if need > room.size:
        rule = f"{_state(by_stage, room, need)}, and {room.owner} has {memory_text(room.size)} for it ({room.origin})"
        require(Problem("model", model, rule, remedy(training, room)))


def _state(by_stage: list[int], room: Room, need: int) -> str:
    up_to = "up to " if len(set(by_stage)) > 1 else ""
    each = f"weights, gradients and optimizer state take {up_to}{memory_text(max(by_stage))} a rank"
    return each if room.ranks == 1 else f"{each}, {memory_text(need)} on {room.ranks} ranks"


def remedy(training: TrainingSpec, room: Room) -> str:
    """Name the minimum number of such machines or GPUs over which the sharded training state fits."""
    if not room.size:
        return "close other programs"
    (whole,) = footprints(training.model, training.optimizer)
    places = math.ceil(whole.total / room.size)
    return "try parallel=fsdp" if places == 1 else f"try parallel=fsdp on at least {places:,} {room.more}"
