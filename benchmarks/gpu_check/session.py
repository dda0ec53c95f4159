"""Runs of the product on this machine's devices, checks of them, and stored results."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from benchmarks.attack.victims import MARK, left
from benchmarks.script import TORCHRUN, TORCHRUN_THREADS, TRAIN, seconds_of, trained
from benchmarks.tables import drawn
from ptdbench.files import write_json
from ptdbench.records.load import load
from ptdbench.records.run_record import typed
from ptdbench.report.remarks import reason
from ptdbench.virtual import machine

#: Steps whose losses are compared.
CHECKED_STEPS = 5

#: What checks cannot compare on a kind of device: ``numbers`` where nothing is computed, ``times``, and a device's
#: ``memory`` where only the process's is known.
LACKING = {"cpu": {"times", "memory"}, "virtual": {"times", "numbers"}}

#: The relative change that a reference's loss must have: where nothing is trained, equal losses prove nothing.
LEAST_CHANGE = 0.05

#: Timeout of a run, and the time that the driver may take to release a process that has ended, in seconds.
PATIENCE, RELEASE_SECONDS = 1200.0, 5.0

Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Models and batches for a kind of device."""

    model: str  #: The language model whose numbers are compared.
    batch: int  #: Its samples of a step.
    images: Sequence[str]  #: Overrides of the image model.
    large: str  #: The language model whose speed is measured at several micro-batches.
    micro_batches: Sequence[int]  #: These.
    steps: int  #: Steps of a run whose speed is measured.


_TINY_IMAGES = ("model=resnet18", "model.image_size=32", "train.global_batch=8")
SIZES = {
    "cuda": Sizes("gpt_small", 16, ("model=resnet50", "train.global_batch=128"), "gpt_xl", (8, 16, 32), 40),
    "cpu": Sizes("gpt_tiny", 4, _TINY_IMAGES, "gpt_tiny", (2, 4), 8),
    "virtual": Sizes("gpt_small", 4, _TINY_IMAGES, "gpt_tiny", (2, 4), 8),  # large next to cuBLAS's workspaces
}


@dataclass
class Session:
    """Runs and checks of one start of gpu-check, or of gpu-cluster under one launcher."""

    device: str  #: ``cuda`` or ``cpu``.
    environment: Mapping[str, Any]  #: Hardware and versions, as in a record.
    directory: Path  #: Where the runs leave their records.
    launcher: Sequence[str] = TRAIN[:1]  #: The words before ``train.py``.
    results: Path | None = None  #: The file of results, if there is one.
    part: str = ""  #: Whose checks these are.
    checks: list[dict[str, Any]] = field(default_factory=list)  #: The results so far.
    started: float = field(default_factory=time.time)  #: When, in seconds since the epoch.

    @classmethod
    def begin(cls, device: str, outputs: Path) -> Session:
        """Begin with a new folder for records."""
        directory = outputs.resolve() / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_gpu-check-{os.getpid()}"
        directory.mkdir(parents=True)
        os.environ[MARK] = str(directory)  # others may use the device at the same time
        # In another process: one that has initialized CUDA cannot fork ranks.
        code = "import json; from ptdbench.measure import hardware"
        code += f"; print(json.dumps(hardware.environment({device!r})))"
        environment = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
        return cls(device, json.loads(environment), directory)

    @property
    def device_name(self) -> str:
        """Name of the device, as torch reports it, or ``cpu``."""
        return self.environment["devices"][0] if self.device == "cuda" else "cpu"

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda``, or ``virtual`` for a GPU that is not there."""
        return "virtual" if machine.is_virtual(self.device_name) else self.device

    @property
    def sizes(self) -> Sizes:
        """The models and batches for the device."""
        return SIZES[self.kind]

    def report(self, name: str, passed: bool, text: str, *, by: str = "facts", **figures: Any) -> None:
        """Record a check, print it and store it at once, so that an interrupted part has its checks so far.

        Args:
            name: What was checked.
            passed: Whether it is as required.
            text: The figure and the rule.
            by: What was compared: ``facts``, or what some devices lack, see :data:`LACKING`.
            figures: The measured figures.
        """
        if by in LACKING.get(self.kind, ()):
            passed, text = True, f"{self.kind}: not compared: {text}"
        print(f"  {'ok  ' if passed else 'FAIL'}  {name:<30} {text}", flush=True)
        self.checks.append({"name": name, "passed": passed, "said": text, "figures": figures})
        if self.results:
            self._keep(self.results)

    def _keep(self, path: Path) -> None:
        """Replace this part's earlier results in the device's file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        taken, seconds = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(self.started)), time.time() - self.started
        part = {"taken": taken, "seconds": round(seconds, 1), "environment": self.environment, "checks": self.checks}
        with FileLock(path.with_suffix(".lock"), fallback_to_soft=False):  # parts run at the same time
            results: Record = {"device": self.device_name, "parts": {}}
            if path.exists():
                results = json.loads(path.read_text())
            results["parts"][self.part] = part
            write_json(path, results)

    def watched(self, part: Callable[[Session], object]) -> None:
        """Run a part; an error of it is a failed check."""
        try:
            part(self)
        except Exception as error:
            self.report(self.part, False, f"{type(error).__name__}: {error}")
        took = time.time() - self.started
        self.report("duration", took < 540, f"{took:.0f} s, must be below 540", by="times", seconds=took)

    def run(self, name: str, *overrides: str) -> Record:
        """Run a configuration, after which no process may be left; return its record, with its losses."""
        typed = without_repeats(f"device={self.device}", "cluster.ranks_per_node=1", *overrides)
        directory, before = self.directory / re.sub(r"[^\w=.-]+", "-", name), holders()
        record = trained(directory, *typed, launcher=self.launcher, fails=True, timeout=PATIENCE)
        if there := wait_until_released(before):
            self.report(f"{name}: processes", False, f"still on the device: {'; '.join(there)}")
        if record["status"] == "ok":
            record["losses"] = load(directory).series("losses").tolist()  # type: ignore[union-attr]
        return {**record, "directory": str(directory)}

    def well(self, name: str, *overrides: str) -> Record | None:
        """Return the record of a run that must succeed; ``None``, and a failed check, if it does not."""
        record = self.run(name, *overrides)
        if record["status"] == "ok":
            return record
        self.report(name, False, reason(typed(record)))
        return None

    def reference(self, name: str, *overrides: str) -> list[float]:
        """Return the losses of a run that others must follow; none if they prove nothing."""
        if not (record := self.well(name, *overrides)):
            return []
        losses: list[float] = record["losses"][:CHECKED_STEPS]
        moves = difference(losses[-1], losses[0]) >= LEAST_CHANGE
        text = f"loss {losses[0]:.4f} to {losses[-1]:.4f}, must change by {LEAST_CHANGE:.0%}"
        self.report(name, moves, text, by="numbers", losses=losses)
        return losses if moves else []

    def follows(self, name: str, reference: Sequence[float], tolerance: float, *overrides: str) -> None:
        """Check that a run's first losses equal the reference within a relative tolerance."""
        if record := self.well(name, *overrides):
            self.compare(name, record, reference, tolerance)

    def compare(self, name: str, record: Record, reference: Sequence[float], tolerance: float) -> None:
        """Compare the first losses of a successful run with a reference, if there is one."""
        if not reference:
            self.report(name, False, "ran, and there is no reference", by="numbers")
            return
        off = largest_difference(record["losses"], reference)
        self.report(name, off <= tolerance, f"off by {off:.1e}, at most {tolerance:.0e}", by="numbers", off=off)

    def measured(self, name: str, *overrides: str) -> Record:
        """Run for speed; running out of memory is a result, an MFU of 1 is none."""
        record = self.run(name, *overrides)
        if record["status"] == "ok":
            self.report(name, plausible(record), speed_text(record), **speed(record))
        else:
            self.report(name, record["status"] == "oom", reason(typed(record)), status=record["status"])
        return record

    def launched(self, name: str, *overrides: str) -> list[Record]:
        """Run a sweep in one process, under torchrun; return the records of its runs."""
        folder = self.directory / name
        command = [*TORCHRUN, "--nproc-per-node=1", TRAIN[1], "-m", f"device={self.device}", *overrides]
        seconds_of([*command, f"hydra.sweep.dir={folder}"], env={**TORCHRUN_THREADS, **os.environ})
        return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def without_repeats(*overrides: str) -> Iterable[str]:
    """Return overrides, of several for one option only the last."""
    return {word.partition("=")[0]: word for word in overrides}.values()


def speed(record: Record) -> dict[str, Any]:
    """Return the figures of a run that are stored."""
    metrics = record["metrics"]
    rates = ("tokens_per_second", "samples_per_second", "mfu", "share_of_ceiling")
    kept = {name: metrics.get(name) for name in (*rates, "peak_memory_bytes", "peak_reserved_bytes")}
    power = {"watts": ((record.get("hardware") or {}).get("gpu") or {}).get("watts")}
    return {**kept, **power, "step_seconds": metrics["step_seconds"]["median"], "overrides": record["overrides"]}


def speed_text(record: Record) -> str:
    """Return throughput, MFU and memory of a run as text."""
    metrics = record["metrics"]
    unit = "tokens" if metrics["tokens_per_second"] is not None else "samples"
    rate = metrics[f"{unit}_per_second"]
    shown = "too few steps to time" if rate is None else f"{rate:,.0f} {unit}/s"
    mfu = "no MFU" if metrics["mfu"] is None else f"MFU {metrics['mfu']:.1%}"
    return f"{shown}, {mfu}, {metrics['peak_memory_bytes'] / 2**30:.1f} GiB"


def plausible(record: Record) -> bool:
    """Return whether the MFU of a run, if known, is between 0 and 1."""
    mfu = record["metrics"]["mfu"]
    return mfu is None or 0 < mfu < 1


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of a loss; infinite if one is missing or not finite."""
    if len(losses) < len(reference) or not all(map(math.isfinite, (*losses, *reference))):
        return math.inf
    return max(map(difference, losses, reference))


def difference(number: float, expected: float) -> float:
    """Return the relative difference of two numbers; infinite from 0."""
    if not expected:
        return math.inf if number else 0.0
    return abs(number / expected - 1)


def holders(device_file: str = r"/dev/(nvidia\d+|kfd)") -> dict[int, str]:
    """Return the processes of this session that have a device's file open, by their id, from /proc."""
    processes = {}
    for process in left(os.environ.get(MARK, "")):
        with suppress(OSError):  # of one that has ended meanwhile
            if any(re.fullmatch(device_file, os.readlink(link)) for link in Path(f"/proc/{process.pid}/fd").iterdir()):
                processes[process.pid] = f"{process.pid} {process.command[:80]}"
    return processes


def wait_until_released(before: Iterable[int]) -> list[str]:
    """Return the processes that still hold the device and did not ``before``."""
    until = time.monotonic() + RELEASE_SECONDS
    while there := [process for pid, process in holders().items() if pid not in before]:
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return there


def on_record(folder: Path) -> str:
    """Return the stored checks of each device as tables."""
    tables = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text())
        checks = [(name, check) for name, part in results["parts"].items() for check in part["checks"]]
        rows = [(name, check["name"], "ok" if check["passed"] else "FAIL", check["said"]) for name, check in checks]
        tables.append(f"{results['device']}\n\n{drawn(('part', 'check', '', 'figure'), rows)}")
    return "\n\n".join(tables) or f"no results in {folder}: no part has run on a GPU yet"
