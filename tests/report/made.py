"""Records as runs leave them, with phases and without, made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptdbench.profiling.phases import PHASES
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import NO_ERROR
from ptdbench.records.store import RESULTS, write_record


class Made(RunRecord):
    """A record as it is read, which ``|`` changes as a mapping."""

    def __or__(self, changes: Mapping[str, Any]) -> Made:
        return made({**self.written, **changes})

    def __getitem__(self, field: str) -> Any:
        return self.written[field]


#: What an evaluation has that a test does not name.
EVALUATION = {"step": 0, "samples": 1, "loss": None, "top1": None, "top5": None, "bits_per_byte": None, "seconds": 0.0}

#: What a start of a run has that a test does not name.
SEGMENT = {"layout": {}, "startup_seconds": {}, "warmup_steps": 0}


def made(written: Mapping[str, Any]) -> Made:
    """A record with these fields, and what every record has."""
    whole = {"status": "ok", "schema": 2, "workload": "train", "fingerprint": "", "directory": "outputs/a", **written}
    whole |= {
        name: [{**least, **one} for one in whole[name]]
        for name, least in (("evaluations", EVALUATION), ("segments", SEGMENT))
        if whole.get(name)
    }
    if whole.get("error"):
        whole["error"] = {**NO_ERROR, **whole["error"]}
    return Made.of(whole)


def run(parallel="ddp", tokens_per_second=1000.0, **changes):
    record = {
        "model": "gpt_tiny",
        "parallel": parallel,
        "world_size": 2,
        "global_batch": 16,
        "precision": "fp32",
        "parameters": 1234567,
        "layout": {"data": 2, "replicate": 2, "pipeline": 1, "microbatches": 1, "accumulation": 1},
        "final_loss": 2.51349,
        "metrics": {
            "tokens_per_second": tokens_per_second,
            "samples_per_second": 250.0,
            "step_seconds": {"median": 0.0986, "mean": 0.1986, "p5": 0.01234, "p95": 1.2345},
            "mfu": 0.41868,
            "mfu_reason": None,
            "peak_memory_bytes": 3 * 2**29,
        },
        "error": None,
        "directory": f"outputs/sweep/{parallel}",
    }
    record |= changes
    options = {name: record[name] for name in ("model", "layout", "precision", "global_batch")}
    return made({"config": {**options, "parallel": {"name": parallel, "schedule": "1f1b"}}, **record})


def repeated(parallel, rates, sweep="outputs/sweep", name="", options=None, **changes):
    """A run in each block of a sweep, with these throughputs."""
    runs = []
    for block, rate in enumerate(rates):
        one = run(parallel, rate, directory=f"{sweep}/{block}_{parallel}{name}", **changes)
        repeat = {"runs": len(rates), "max": 20, "block": block, **(options or {})}
        runs.append(one | {"config": {**one.config, "repeat": repeat}})
    return runs


def thrice(one):
    """A run in each of three blocks of a sweep, without noise."""
    config = [{**one.config, "repeat": {"runs": 3, "max": 20, "block": block}} for block in range(3)]
    return [one | {"directory": f"{one.directory}_{block}", "config": of} for block, of in enumerate(config)]


def failed(parallel, message, status="failed", rank=1):
    error = {"rank": rank, "type": "RuntimeError", "message": message}
    return run(parallel, status=status, metrics=None, final_loss=None, error=error)


def operation(exposed: float, seconds: float, size: float = 4e6, calls: float = 2, **more: float) -> dict[str, float]:
    """One of communication; times in milliseconds, but for further fields."""
    return {"calls": calls, "bytes": size, "seconds": seconds / 1e3, "exposed_seconds": exposed / 1e3, **more}


def phased(parallel: str, step: float, ranks: dict[str, list[float]], **changes: Any) -> Made:
    """A run with phases.

    Args:
        parallel: How it is parallelized.
        step: Milliseconds of a timed step.
        ranks: Milliseconds of phases, one number a rank; the others are zero.
        changes: Fields of the phases, or else of the record.
    """
    size = len(ranks["forward"])
    seconds = {phase: [one / 1e3 for one in ranks.get(phase, [0.0] * size)] for phase in PHASES}
    found: dict[str, Any] = {
        "steps": 5, "reason": None, "profiled_step_seconds": 1.25e-3 * step, "step_seconds": step / 1e3,
        "ranks": seconds, "communication": {}, "waited_for": [0.0] * size, "waited_for_most": [], "stages": None,
        "bubble_formula": None,
    }  # fmt: skip
    found |= {name: changes.pop(name) for name in list(changes) if name in found}
    metrics = run(tokens_per_second=1e6 / step)["metrics"]
    return run(parallel, metrics=metrics, world_size=size, phases=found, **changes)


DDP = phased(
    "ddp",
    76,
    {"forward": [24, 24], "backward": [38, 40], "communication": [6, 6], "optimizer": [4, 4], "other": [3, 1]},
    communication={"all_reduce": operation(6, 10)},
)
FSDP = phased(
    "fsdp",
    120,
    {"forward": [24, 24], "backward": [40, 40], "communication": [37, 37], "optimizer": [13, 13], "other": [6, 6]},
    communication={"all_gather": operation(37, 40, size=64e6)},
)
PDP = phased(
    "pdp",
    100,
    {
        "data": [1, 1], "forward": [22, 28], "backward": [36, 42], "bubble": [30, 18], "optimizer": [8, 8],
        "other": [3, 3],
    },
    stages=[[0], [1]],
    bubble_formula=0.2,
    waited_for=[0.0, 0.03],
    layout={"data": 1, "replicate": 1, "pipeline": 2, "microbatches": 4, "accumulation": 1},
)  # fmt: skip


def loaded(*records, sweep="outputs/sweep"):
    return [one | {"directory": f"{sweep}/{number}_{one.parallel}"} for number, one in enumerate(records)]


def keep(sweep: Path, name: str, record: Made) -> Path:
    (sweep / name).mkdir(parents=True)
    (sweep / RESULTS).touch()  # which makes it a sweep
    write_record(sweep / name, (record | {"directory": str(sweep / name)}).written)
    return sweep / name
