"""Directories of sweeps as runs, launchers and jobs leave them, without any of these."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ptdbench.launch.slurm import JobState, SlurmError
from ptdbench.records import ledger, ownership, record, store
from ptdbench.records.failure import Failure

CONFIG = {
    "workload": {"name": "train", "label": "toy_ddp"}, "model": {"name": "toy"}, "parallel": {"name": "ddp"},
    "train": {"global_batch": 16}, "cluster": {"time_minutes": 60}, "precision": "fp32",
}  # fmt: skip

#: The name of the array in the queue.
NAME = "ptdbench-sweep-3d737b7c"

#: How far a run that goes on has come.
PROGRESS = {"step": 3, "steps": 60, "unit": "tokens", "per_second": 41234.5}

#: What a run that went well adds to its record, as far as a table of a sweep shows it.
DONE = {
    "status": "ok",
    "error": None,
    "world_size": 4,
    "nodes": ["n1", "n2"],
    "steps": 3,
    "final_loss": 0.25,
    "metrics": {
        "tokens_per_second": 41234.5,
        "samples_per_second": 322.1,
        "startup_seconds": {"import": 4.25, "config": 0.0, "rendezvous": 0.5, "build": 1.0, "first_step": 2.0},
    },
}


class Directory:
    """A sweep's directory, and a queue that says what a test wants.

    Attributes:
        path: The directory.
        queue: What SLURM says, by job id; an exception is what it says instead.
        asked: The ids of every question that was put to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.queue: dict[str, JobState] | SlurmError = {}
        self.asked: list[list[str]] = []
        path.mkdir()

    def ask(self, ids: Any) -> dict[str, JobState]:
        """Stands in for :func:`ptdbench.launch.slurm.queue`."""
        asked = sorted(ids)
        if not asked:  # SLURM is not bothered
            return {}
        self.asked.append(asked)
        if isinstance(self.queue, SlurmError):
            raise self.queue
        return {identity: self.queue[identity] for identity in asked if identity in self.queue}

    def ask_by_name(self, names: Any) -> dict[str, dict[int | None, JobState]]:
        """Stands in for :func:`ptdbench.launch.slurm.named`."""
        if not (asked := set(names)):
            return {}
        if isinstance(self.queue, SlurmError):
            raise self.queue
        states = {int(identity.partition("_")[2]): state for identity, state in self.queue.items()}
        return {NAME: dict(states)} if NAME in asked else {}

    def begin(self, number: int) -> Path:
        """A run that has begun, and could have been killed at any time since."""
        path = self.path / f"{number}_toy_ddp"
        path.mkdir()
        store.write_record(path, record.begin(CONFIG, path, {}))
        return path

    def end(self, number: int, **changes: Any) -> dict[str, Any]:
        """A run that has begun ends well, or with ``changes``."""
        path = self.path / f"{number}_toy_ddp"
        written = {**store.load_record(path), **DONE, **changes}
        store.write_record(path, written)
        return written

    def submit(self, count: int, *, known: bool = True) -> list[ledger.Job]:
        """Runs 0 to ``count - 1`` are submitted as elements of job 7, whose id is noted down if it is ``known``."""
        jobs = [
            ledger.Job(
                number=number, name=NAME, element=number, id=f"7_{number}" if known else None,
                shape="2 nodes x 2 ranks", directory=self.begin(number).name,
                log=str(self.path / "logs" / f"7_{number}"),
            )
            for number in range(count)
        ]  # fmt: skip
        ledger.write(self.path, ledger.Ledger(["model=toy"], jobs))
        return jobs

    def submit_together(self, count: int) -> list[ledger.Job]:
        jobs = [
            replace(job, id="7", element=None, step=job.number, log=str(self.path / "logs" / "7" / str(job.number)))
            for job in self.submit(count)
        ]
        ledger.write(self.path, ledger.Ledger(["model=toy"], jobs))
        return jobs

    def tell(self, number: int, progress: Mapping[str, Any]) -> None:
        (self.path / f"{number}_toy_ddp" / ownership.PROGRESS).write_text(json.dumps(progress))

    def log(self, job: ledger.Job, rank: int, text: str) -> None:
        folder = Path(job.log)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{job.id}_{rank}_log.err").write_text(text)

    def says(self, **states: str) -> None:
        """What the queue says: ``says(_0="RUNNING n1", _1="PENDING (Priority)")``."""
        self.queue = {f"7{name}": state(f"7{name}", words) for name, words in states.items()}

    def results(self) -> list[Mapping[str, Any]]:
        return [record.written for record in store.read_results(self.path)]


def state(identity: str, words: str) -> JobState:
    """``PENDING (Priority)`` or ``RUNNING n[1-2]`` as the queue says it."""
    name, _, rest = words.partition(" ")
    nodes, reason = ("", rest.strip("()")) if rest.startswith("(") else (rest, "")
    return JobState(identity, name, nodes, reason)


def failure(rank: int = 1, kind: str = "RuntimeError", message: str = "on purpose") -> dict[str, Any]:
    traceback = f"Traceback (most recent call last):\n{kind}: {message}\n"
    error = Failure(rank=rank, type=kind, message=message, traceback=traceback, time=0.0, host="vm").as_error()
    return {"status": "failed", "error": error, "steps": None, "metrics": None}
