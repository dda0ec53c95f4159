"""Recordings: what a try on virtual GPUs has left, cached for plans of other devices, tables of costs and anchors.

A recording depends on the program, and on what kernels and allocations it chooses for a GPU; not on how fast that is.
"""

import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from msgspec import convert, structs

from ptdbench.files import from_cache, strict, to_cache
from ptdbench.kernels.linear_cross_entropy import most_rows
from ptdbench.models.decoder import Head
from ptdbench.models.protocol import module_of
from ptdbench.parallel.precision import DTYPES
from ptdbench.prediction.log import VERSION, Log
from ptdbench.records.schema import Record
from ptdbench.setup.training_spec import TrainingSpec
from ptdbench.terminal import echo
from ptdbench.virtual.device import Device
from ptdbench.virtual.machine import Machine

#: The folder of recordings in the cache.
_KIND = "recordings"

#: The figures of a GPU by which torch, its libraries and its compiler choose kernels.
_OF_KERNELS = ("capability", "multiprocessors", "clock", "l2", "shared_memory")


@dataclass(frozen=True)
class Recording:
    """What a try has left."""

    record: Record  #: Of a rank of each class; without an account of virtual GPUs if they were out of memory.
    logs: Sequence[Log]  #: The last step of each of them, if it was logged.

    def on(self, machine: Machine) -> Record:
        """Return the record as a machine's own GPUs would leave it."""
        record = structs.replace(self.record)
        if record.environment and record.environment.devices:
            names = [machine.gpu_name] * len(record.environment.devices)
            record.environment = structs.replace(record.environment, devices=names)
        if record.metrics and record.metrics.device_memory_bytes:
            record.metrics = structs.replace(record.metrics, device_memory_bytes=machine.gpu.memory)
        if record.virtual:
            context, name = machine.gpu.context, machine.gpu_name
            record.virtual = structs.replace(record.virtual, device=name, context_bytes=context)
        return record


def key(
    of_plan: Mapping[str, Any], options: Mapping[str, Any], gpu: Device, memory: int, **more: Any
) -> dict[str, Any]:
    """Return the key of a recording.

    Args:
        of_plan: Code and environment, from the plan's key.
        options: The options of the try, those of its GPU included.
        gpu: That GPU.
        memory: :func:`visible_memory` of the GPU.
        more: What else the recording depends on.
    """
    virtual = {name: value for name, value in options["virtual"].items() if name not in ("gpu", "name")}
    figures = {name: str(getattr(gpu, name)) for name in _OF_KERNELS} | {"NVLink": gpu.link > 0, "memory": memory}
    config = strict({**options, "virtual": {**virtual, "allocatable": gpu.allocatable}}, str)
    return {**of_plan, "config": config, "gpu": figures, "log": VERSION, **more}


def visible_memory(training: TrainingSpec, micro_batch: int, gpu: Device) -> int:
    """Return the GiB of a GPU if the program of a run depends on them, or 0.

    The loss of our models is computed in chunks by the GPU's memory, unless one chunk is enough. Other models may do
    with it what they like.
    """
    module, general = module_of(training.model), training.config.general
    is_ours = type(module).__module__.startswith("ptdbench.")
    heads = [part for part in module.modules() if type(part) is Head] if general.kernels == "fused" else []
    rows, dtype = micro_batch * (training.data.tokens_per_sample or 1), DTYPES[general.precision]
    chunks = [most_rows(len(head.projection.weight), dtype, gpu.memory) < rows for head in heads]
    return 0 if is_ours and not any(chunks) else gpu.memory >> 30


def look_up(of: Mapping[str, Any]) -> Recording | None:
    """Return the recording that is cached under a key, if there is one."""
    if not (content := from_cache(_KIND, of)):
        return None
    logs = [Log.load(BytesIO(b64decode(text))) for text in content["logs"]]
    return Recording(convert(content["record"], Record, strict=False), logs)


def keep(of: Mapping[str, Any], recording: Recording) -> None:
    """Cache a recording."""
    texts = []
    for log in recording.logs:
        log.save(file := BytesIO())
        texts.append(b64encode(file.getvalue()).decode())
    try:
        to_cache(_KIND, of, {"record": strict(structs.asdict(recording.record)), "logs": texts})
    except OSError as error:
        echo(f"cannot cache the recording: {error.strerror}", sys.stderr)
