"""Traces in Chrome's format, made by hand: times are in milliseconds after :data:`EPOCH`."""

import json
from pathlib import Path
from typing import Any

from ptdbench.profiling import trace

EPOCH = 1_790_000_000  # seconds
MAIN = 7


def event(
    name: str, start: float, end: float, kind: str = "cpu_op", thread: Any = MAIN, **facts: Any
) -> dict[str, Any]:
    times = {"ts": start * 1e3, "dur": (end - start) * 1e3}
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": thread, **times, "args": facts}


def label(name: str, start: float, end: float) -> dict[str, Any]:
    return event(name, start, end, "user_annotation")


def step(start: float, data: float, gradients: float, update: float) -> list[dict[str, Any]]:
    """The labels of a step that begins at ``start``; the others say when its parts end."""
    return [
        label(f"{trace.STEP}3", start, update), label(trace.DATA, start, data),
        label(trace.GRADIENTS, data, gradients), label(trace.UPDATE, gradients, update),
    ]  # fmt: skip


def called(name: str, start: float, end: float, shape: list[int], **facts: Any) -> dict[str, Any]:
    return event(f"c10d::{name}", start, end, **{"Input Dims": [[shape]], "Input type": ["TensorList"], **facts})


def sent(name: str, start: float, end: float, shape: list[int], kind: str = "float") -> dict[str, Any]:
    facts = {"Input Dims": [shape], "Input type": [kind]}
    return event(f"gloo:{name}", start, end, "user_annotation", thread=99, **facts)


def launched(at: float, number: int) -> dict[str, Any]:
    return event("cudaLaunchKernel", at, at + 0.1, "cuda_runtime", correlation=number)


def kernel(name: str, start: float, end: float, number: int, **facts: Any) -> dict[str, Any]:
    return event(name, start, end, "kernel", 5, correlation=number, **facts)


def write(path: Path, *events: dict[str, Any], epoch: int = EPOCH) -> Path:
    other = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}]
    path.write_text(json.dumps({"baseTimeNanoseconds": epoch * 10**9, "traceEvents": [*other, *events]}))
    return path


def milliseconds(intervals: Any) -> list[tuple[float, float]]:
    return [tuple(round((moment - EPOCH) * 1e3, 2) for moment in interval) for interval in intervals]
