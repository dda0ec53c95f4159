"""The record of a run: what it says before the run, after it, and when it fails."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ptdbench.records.cause import status_of
from ptdbench.records.failure import Failure
from ptdbench.records.owner import Owner

#: The type of error of a record that was opened and not yet closed.
UNFINISHED = "Unfinished"

#: Fields of every record, in the order in which they are written.
FIELDS = (
    "status", "workload", "model", "parallel", "world_size", "global_batch", "tokens_per_sample", "precision",
    "parameters", "fingerprint", "started", "directory", "owner", "launcher", "nodes", "layout", "warmup_steps",
    "metrics", "error", "remarks", "environment", "config", "losses", "evaluations", "learning_rates",
    "gradient_norms", "wait_seconds", "step_memory_bytes", "rank_step_seconds", "segments",
)  # fmt: skip


def begin(
    config: Mapping[str, Any], directory: Path, environment: Mapping[str, Any], owner: Owner | None = None
) -> dict[str, Any]:
    """What is known before a run: a record that says ``failed``, for the case that nobody can say more later.

    It is written before the ranks start, so that no run directory is ever without a record, not even one
    whose processes were killed all at once.

    Args:
        config: The resolved configuration.
        directory: The run's directory.
        environment: Versions and hardware.
        owner: The process that starts the run; ``None`` where it only waits to be started.
    """
    record: dict[str, Any] = dict.fromkeys(FIELDS)
    record |= {
        "status": "failed",
        "workload": config["workload"]["name"],
        "model": config["model"]["name"],
        "parallel": config["parallel"]["name"],
        "global_batch": config["train"]["global_batch"],
        "precision": config["precision"],
        "fingerprint": fingerprint(config),
        "started": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "directory": str(directory),
        "owner": asdict(owner) if owner else None,
        "losses": [],
        "rank_step_seconds": [],
        "remarks": {},
        "environment": dict(environment),
        "config": dict(config),
        "error": {
            "rank": -1,
            "type": UNFINISHED,
            "message": "the run is still going, or was killed before it could say how it ended",
            "traceback": "",
        },
    }
    return record


def failed(record: Mapping[str, Any], failure: Failure) -> dict[str, Any]:
    """The record of a run that ended so."""
    return {**record, "status": status_of(failure), "error": failure.as_error()}


def going_on(draft: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The draft of a run that has been here before, with what it had found until then."""
    results = FIELDS[FIELDS.index("losses") :]
    kept = {name: earlier[name] for name in ("metrics", *results) if earlier.get(name) and name != "rank_step_seconds"}
    return {**draft, **(kept if earlier["fingerprint"] == draft["fingerprint"] else {})}


def stopped(record: Mapping[str, Any], why: str) -> dict[str, Any]:
    """The record of a run that was asked to stop, has saved, and can go on."""
    message = f"stopped by {why}; it has saved: python train.py resume={record['directory']}"
    error = {"rank": -1, "type": "Stopped", "message": message, "traceback": ""}
    return {**record, "status": "preempted", "error": error}


def requeued(record: Mapping[str, Any], number: int, limit: int) -> dict[str, Any]:
    """The record of a run whose job waits in the queue once more: it stays open."""
    message = f"saved and requeued for the {number}. time of at most {limit}; it goes on in the same directory"
    error = {"rank": -1, "type": UNFINISHED, "message": message, "traceback": ""}
    return {**record, "status": "preempted", "error": error}


def is_open(record: Mapping[str, Any]) -> bool:
    """Whether it still says what it said before the run: nobody has written down how that ended."""
    return (record.get("error") or {}).get("type") == UNFINISHED


def is_settled(record: Mapping[str, Any]) -> bool:
    """Whether its end was written down by one who sees more than a rank: the queue, or all ranks together.

    A rank on a node that was lost lives on for a while, and must not have the last word.
    """
    error = record.get("error") or {}
    return error.get("rank") == -1 and not is_open(record)


def fingerprint(config: Mapping[str, Any]) -> str:
    """Sixteen hex digits that two runs share if and only if their resolved configurations are equal.

    Where a run began, ``resume``, is not what it is.
    """
    config = {name: value for name, value in config.items() if name not in ("resume", "sweep")}
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
