"""A run of any program on virtual GPUs: the program is started in them, and its processes become a record."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from ptdbench.planning import step_time
from ptdbench.prediction import log
from ptdbench.profiling.events import kernels_by_kind
from ptdbench.records import record, schema, store
from ptdbench.records.run_record import RunRecord, typed
from ptdbench.records.schema import Draft, FirstStep, Messages, Predicted, Virtual
from ptdbench.virtual import program, watch
from ptdbench.virtual.device import Device
from ptdbench.virtual.machine import Machine

#: The folder of snapshots of memory, in a run's directory.
SNAPSHOTS = "memory"

#: The folder of outputs, as of runs of ``train.py``.
_OUTPUTS = Path("outputs")


@dataclass(frozen=True)
class Request:
    """A program, and the GPUs that it will see."""

    command: Sequence[str]  #: The command that starts it.
    name: str  #: The GPU model's name, or the file that describes it.
    gpu: Device  #: The model.
    count: int  #: GPUs per node.
    memory: int | None = None  #: Bytes that can be allocated on each; ``None``: as many as the GPU has.
    nodes: int | None = None  #: Nodes, with a process for each rank; ``None``: one, with one process.
    ranks: Sequence[int] | None = None  #: The ranks to execute; ``None``: all.
    steps: int | None = None  #: Number of steps after which to end it; ``None``: never.
    stacks: bool = False  #: Whether to keep the Python stacks of what was allocated.

    @property
    def machine(self) -> Machine:
        """The machine that the program sees."""
        if self.memory is None:
            return Machine(self.gpu, self.ranks)
        if self.memory < self.gpu.memory:
            return Machine(replace(self.gpu, memory=self.memory), self.ranks)
        return Machine(replace(self.gpu, allocatable=self.memory), self.ranks)


def execute(request: Request, stdout: int | None = None) -> tuple[RunRecord, int]:
    """Run the program; return its record, which is written below ``outputs``, and its exit status.

    ``stdout``: the file descriptor of the program's standard output; ``None``: that of this process.

    Raises:
        ConfigError: There is no compiler or no torch for CUDA, or the program or an output cannot be started.
    """
    variables = request.machine.environment(request.count)
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_virtual"
    directory = store.claim_directory(_OUTPUTS, name, "outputs", partial(_begin, request))
    with tempfile.TemporaryDirectory(prefix="ptdbench-virtual-") as scratch:
        folder = directory / SNAPSHOTS if request.stacks else Path(scratch)
        folder.mkdir(exist_ok=True)
        watched = program.environment(folder.resolve(), request.steps, request.stacks)
        obstacle = step_time.obstacle(request.gpu, request.nodes or 1)
        logs = Path(os.environ.get(watch.LOGS) or Path(scratch, "logs").resolve())
        environ = {**os.environ, **variables, **watched, **({} if obstacle else {watch.LOGS: str(logs)})}
        size = (request.nodes or 1) * request.count
        launched = [*(range(size) if request.ranks is None else request.ranks)] if request.nodes else []
        of_ranks = program.of_ranks(launched, request.count, request.nodes or 1, Path(scratch)) if launched else [{}]
        commands = [(request.command, {**environ, **of_rank}) for of_rank in of_ranks]
        ended = program.execute(commands, folder, request.steps, stdout)
        predicted = Predicted(reason=obstacle) if obstacle else _predicted(request.gpu, logs, ended.reports)
    draft = {**store.load_record(directory), **_results(request, ended), "predicted": predicted}
    store.write_record(directory, draft)
    return typed(draft), ended.status


def _predicted(gpu: Device, folder: Path, reports: Sequence[Mapping[str, Any]]) -> Predicted:
    """Return the predicted step of a program, from the logs of its processes that take steps."""
    stepping = [report for report in reports if report["steps"]]
    if why := next((report["unlogged"] for report in stepping if "unlogged" in report), None):
        return Predicted(reason=why)
    steps, needed = min((report["steps"] for report in stepping), default=0), watch.BEFORE_LOG + watch.LOGGED
    if steps < needed:
        taken = f"it took {steps}, and {needed} are needed, {watch.BEFORE_LOG} of them to warm up"
        return Predicted(reason=taken if steps else "no step was found")
    pids = {report["pid"] for report in stepping}
    try:
        logs = [of_rank.last() for of_rank in log.read(folder) if of_rank.facts["pid"] in pids]
        if len(logs) < len(pids):
            return Predicted(reason=f"{len(pids) - len(logs)} of its processes wrote no log")
        if not all(of_rank.records["operators"].any() for of_rank in logs):
            return Predicted(reason="its operators were not counted, and the host's work is unknown")
        return step_time.predicted(logs, gpu)
    except (OSError, ValueError, KeyError) as fault:
        return Predicted(reason=f"its logs cannot be read: {fault}")


def _begin(request: Request, folder: Path, directory: Path) -> None:
    config = {
        "workload": {"name": "program"},
        "program": {"command": [*request.command], "options": [*_options(request)]},
        "virtual": {
            **{"name": request.name, "gpus": request.count, "nodes": request.nodes or 1},
            **{"memory": request.memory, "ranks": None if request.ranks is None else [*request.ranks]},
        },
    }
    draft = record.begin(config, directory, {}, [*request.command])
    store.write_record(folder, {**draft, "kind": "virtual", "launcher": "local"})


def _options(request: Request) -> Iterator[str]:
    """Yield the command-line words, before the program, that repeat the request."""
    yield f"{request.name}x{request.count}"
    ranks = ",".join(map(str, request.ranks or []))
    memory = f"{request.memory}B" if request.memory else None
    values = {"memory": memory, "nodes": request.nodes, "ranks": ranks, "steps": request.steps}
    yield from (f"--{name}={value}" for name, value in values.items() if value)


def _results(request: Request, ended: program.Ended) -> Draft:
    """Return the fields of the record that are known once the program has ended."""
    of_ranks = [*_of_processes(request.machine, ended.reports, "step")]
    virtual = record.merged_accounts(of_ranks) if of_ranks else None
    if virtual and any(report["steps"] > 1 for report in ended.reports):
        first = record.merged_accounts([*_of_processes(request.machine, ended.reports, "first")])
        virtual.first_step = FirstStep(first.allocated_bytes, first.kernels, first.flops, first.messages)
    needed = [report["out_of_memory"] for report in ended.reports if "out_of_memory" in report]
    status = "ok" if ended.status == 0 else "oom" if needed else "failed"
    message = f"ended with exit status {ended.status}"
    if status == "oom":
        message += f", out of memory on an allocation of {needed[0]:,} bytes; --memory 1TiB reveals how much it needs"
    failed = schema.NO_ERROR | {"type": "ExitStatus", "message": message}
    return {
        "status": status,
        "world_size": request.nodes * request.count if request.nodes else len(of_ranks) or len(ended.reports) or None,
        "steps": max((report["steps"] for report in ended.reports), default=0),
        "virtual": virtual,
        "error": None if status == "ok" else failed,
    }


def _of_processes(machine: Machine, reports: Sequence[Mapping[str, Any]], which: str) -> Iterator[Virtual]:
    """Yield an account of each device of each process, the process's kernels and messages with its first one.

    ``which`` selects the last step, ``step``, or the ``first`` one; a process without steps is reported as a whole.
    """
    for place, report in enumerate(reports):
        step = report.get(which) or report.get("total") or {}
        peaks = step.get("allocated", {})
        for number, device in report["devices"].items():
            kernels, messages = kernels_by_kind(step.get("kernels", {})), step.get("calls", {})
            yield Virtual(
                device=machine.gpu_name,
                ranks=[report["rank"] if report["rank"] >= 0 else place],
                allocated_bytes=[peaks.get(number, device.get("allocated", 0))],
                peak_steps=[device.get("allocated_step", 0)] if report["steps"] else None,
                reserved_bytes=[device.get("reserved", 0)],
                outside_bytes=[device["used"] - device.get("reserved", 0)],
                context_bytes=machine.gpu.context,
                kernels={kind: [count] for kind, count in kernels.most_common()},
                flops=[step.get("flops", {}).get("", 0)],
                messages={name: Messages(calls, step["bytes"][name]) for name, calls in messages.items()},
            )
            step = {}
