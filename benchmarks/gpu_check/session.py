"""Runs of the product on the devices of this machine, and the verdicts on them."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from benchmarks.script import ROOT
from ptdbench import run as product
from ptdbench.entry import prepare_ranks
from ptdbench.launch.settings import enable_expandable_segments
from ptdbench.records import ledger, record, store
from ptdbench.records.load import Run, load
from ptdbench.records.run_record import typed
from ptdbench.report.remarks import reason
from ptdbench.setup.compose import compose_all
from ptdbench.virtual import machine

from .results import Check, Found

#: Steps whose losses are compared.
CHECKED_STEPS = 5

#: What no verdict goes by on a kind of device: ``numbers``, where nothing is computed, ``times``, and a device's
#: ``memory``, where it is that of a process.
LACKING = {"cpu": {"times", "memory"}, "virtual": {"times", "numbers"}}

#: By how much of it the loss of a reference must change: where nothing is trained, equal losses prove nothing.
LEAST_CHANGE = 0.05

#: How long the driver may take to let go of a process that has ended.
RELEASE_SECONDS = 5.0

#: The variable by which the processes that a session starts are known: others may use the device beside it.
MARK = "PTDBENCH_GPU_CHECK"

Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What suits a kind of device."""

    model: str  #: The language model whose numbers are compared.
    batch: int  #: Its samples of a step.
    images: Sequence[str]  #: Overrides of the image model.
    large: str  #: The language model whose speed is measured at several micro-batches.
    micro_batches: Sequence[int]  #: These.
    steps: int  #: Steps of a run whose speed is measured.


_TINY = Sizes("gpt_tiny", 4, ("model=resnet18", "model.image_size=32", "train.global_batch=8"), "gpt_tiny", (2, 4), 8)
SIZES = {
    "cuda": Sizes("gpt_small", 16, ("model=resnet50", "train.global_batch=128"), "gpt_xl", (8, 16, 32), 40),
    "cpu": _TINY,
    "virtual": replace(_TINY, model="gpt_small"),  # beside which workspaces of cuBLAS are small
}


@dataclass
class Session:
    """Runs and checks of one start of gpu-check."""

    device: str  #: ``cuda`` or ``cpu``.
    environment: Mapping[str, Any]  #: Hardware and versions, as in a record.
    directory: Path  #: Where the runs leave their records.
    sizes: Sizes  #: What suits the device.
    checks: list[Check] = field(default_factory=list)  #: What the part so far has looked at.
    on_check: Callable[[], None] = field(default=lambda: None)  #: Is called after each check.

    @classmethod
    def begin(cls, options: argparse.Namespace) -> Session:
        """With a new folder for its records."""
        name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_gpu-check"
        directory = store.claim_directory(options.outputs, name, "outputs", lambda folder, _: ledger.begin(folder, []))
        enable_expandable_segments(os.environ)  # as runs do, whichever part is first
        os.environ[MARK] = str(directory)
        session = cls(options.device, environment_of(options.device), directory, SIZES[options.device])
        return replace(session, sizes=SIZES[session.kind])

    @property
    def device_name(self) -> str:
        """Name of the device, as torch reports it, or ``cpu``."""
        return self.environment["devices"][0] if self.device == "cuda" else "cpu"

    @property
    def kind(self) -> str:
        """``cpu``, ``cuda``, or ``virtual`` for a GPU that is not there."""
        return "virtual" if machine.is_virtual(self.device_name) else self.device

    def carry_out(self, name: str, part: Callable[[Session], None], keep: Callable[[Found], None]) -> None:
        """Do a part; an error of the part itself is a failed check.

        Args:
            name: Of the part.
            part: Looks at one thing after the other.
            keep: Takes what has been found so far, after each check: whoever ends a part that takes long has the rest.
        """
        started, taken = time.monotonic(), datetime.now(timezone.utc)

        def found() -> Found:
            seconds = round(time.monotonic() - started, 1)
            return Found(taken.isoformat(timespec="seconds"), seconds, self.environment, self.checks)

        self.checks, self.on_check = [], lambda: keep(found())
        try:
            part(self)
        except Exception as error:
            self.tell(name, False, f"{type(error).__name__}: {error}")
        seconds = found().seconds
        self.tell("duration", seconds < 540, f"{seconds:.0f} s, must be below 540", by="times", seconds=seconds)

    def tell(self, name: str, passed: bool, said: str, *, by: str = "facts", **figures: Any) -> None:
        """Note a check, print it, and say that there is one.

        Args:
            name: What was looked at.
            passed: Whether it is as it must be.
            said: The figure and the rule.
            by: What the verdict goes by: ``facts``, or what some devices do not have, see :data:`LACKING`.
            figures: What was measured.
        """
        if by in LACKING.get(self.kind, ()):
            passed, said = True, f"{self.kind}: not compared: {said}"
        print(f"  {'ok  ' if passed else 'FAIL'}  {name:<30} {said}", flush=True)
        self.checks.append(Check(name, passed, said, figures))
        self.on_check()

    def run(self, name: str, *overrides: str) -> Record:
        """The record of a run of the product in ranks of its own, with its losses; nothing may be left of it."""
        words = (f"device={self.device}", "cluster.ranks_per_node=1", *overrides)
        typed = [*{word.partition("=")[0]: word for word in words}.values()]  # of an option the last word counts
        asked = compose_all(typed).configs[0]

        def begin(folder: Path, directory: Path) -> None:
            store.write_record(folder, record.begin(asked.resolved, directory, {}, typed))

        directory = store.claim_directory(self.directory, name, "outputs", begin)
        prepare_ranks([asked])
        before = holders()
        with suppress(SystemExit):  # the record says how it ended
            product.run(directory)
        if left := wait_until_released(before):
            self.tell(f"{name}: processes", False, f"still on the device: {'; '.join(left)}")
        done = load(directory)
        assert isinstance(done, Run)  # it is the directory of one
        return {**done, "losses": done.series("losses").tolist(), "directory": str(directory)}

    def well(self, name: str, *overrides: str) -> Record | None:
        """The record of a run, if it went well; else a check has failed."""
        found = self.run(name, *overrides)
        if found["status"] == "ok":
            return found
        self.tell(name, False, reason(typed(found)))
        return None

    def reference(self, name: str, *overrides: str) -> list[float]:
        """Losses of a run that others must follow; empty where they cannot be compared with."""
        if not (found := self.well(name, *overrides)):
            return []
        losses = found["losses"]
        moves = difference(losses[CHECKED_STEPS - 1], losses[0]) >= LEAST_CHANGE
        said = f"loss {losses[0]:.4f} to {losses[CHECKED_STEPS - 1]:.4f}, must change by {LEAST_CHANGE:.0%}"
        self.tell(name, moves, said, by="numbers", losses=losses[:CHECKED_STEPS])
        return losses[:CHECKED_STEPS] if moves else []

    def follows(self, name: str, reference: Sequence[float], tolerance: float, *overrides: str) -> None:
        """Carry out a run, whose first losses must be those of the reference within a relative tolerance."""
        if found := self.well(name, *overrides):
            self.compare(name, found, reference, tolerance)

    def compare(self, name: str, found: Record, reference: Sequence[float], tolerance: float) -> None:
        """Hold the first losses of a run that went well against those of a reference, if there is one."""
        if not reference:
            self.tell(name, False, "ran, and there is no reference", by="numbers")
            return
        off = largest_difference(found["losses"], reference)
        self.tell(name, off <= tolerance, f"off by {off:.1e}, at most {tolerance:.0e}", by="numbers", off=off)

    def measured(self, name: str, *overrides: str) -> Record:
        """The record of a run whose speed counts; running out of memory is a result, an MFU of 1 is none."""
        found = self.run(name, *overrides)
        if found["status"] == "ok":
            self.tell(name, plausible(found), speed_text(found), **speed(found))
        else:
            self.tell(name, found["status"] == "oom", reason(typed(found)), status=found["status"])
        return found

    def launched(self, name: str, *overrides: str) -> list[Record]:
        """Records of the runs of a sweep in one process, as ``torchrun ... train.py -m`` makes them."""
        folder = self.directory / name
        typed = [f"device={self.device}", *overrides, f"hydra.sweep.dir={folder}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        command = [*torchrun, str(ROOT / "train.py"), "-m", *typed]
        # Set, because torchrun would print a warning that it sets it.
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"torchrun ... -m ended with {done.returncode}: {done.stderr[-500:]}")
        return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def speed(found: Record) -> dict[str, Any]:
    """The figures of a run that are kept."""
    metrics = found["metrics"]
    rates = ("tokens_per_second", "samples_per_second", "mfu", "share_of_ceiling")
    kept = {name: metrics.get(name) for name in (*rates, "peak_memory_bytes", "peak_reserved_bytes")}
    power = {"watts": ((found.get("hardware") or {}).get("gpu") or {}).get("watts")}
    return {**kept, **power, "step_seconds": metrics["step_seconds"]["median"], "overrides": found["overrides"]}


def speed_text(found: Record) -> str:
    """The same for people."""
    metrics = found["metrics"]
    rate, unit = metrics["tokens_per_second"], "tokens/s"
    if rate is None:
        rate, unit = metrics["samples_per_second"], "samples/s"
    mfu = "no MFU" if metrics["mfu"] is None else f"MFU {metrics['mfu']:.1%}"
    shown = "too few steps to time" if rate is None else f"{rate:,.0f} {unit}"
    return f"{shown}, {mfu}, {metrics['peak_memory_bytes'] / 2**30:.1f} GiB"


def plausible(found: Record) -> bool:
    """Whether the MFU of a run is one, where it has one."""
    mfu = found["metrics"]["mfu"]
    return mfu is None or 0 < mfu < 1


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of a loss; infinite where one is missing or no number."""
    if len(losses) < len(reference) or not all(map(math.isfinite, (*losses, *reference))):
        return math.inf
    return max(map(difference, losses, reference))


def difference(found: float, expected: float) -> float:
    """The relative difference of two numbers; infinite from 0."""
    if not expected:
        return math.inf if found else 0.0
    return abs(found / expected - 1)


def holders(device_file: str = r"/dev/(nvidia\d+|kfd)") -> dict[int, str]:
    """Processes of this session that have a device's file open, by their id; nothing but /proc is needed."""
    found = {}
    for process in psutil.process_iter():
        folder = Path(f"/proc/{process.pid}/fd")
        with suppress(OSError, psutil.Error):
            is_open = any(re.fullmatch(device_file, os.readlink(link)) for link in folder.iterdir())
            if is_open and process.environ().get(MARK) == os.environ.get(MARK):
                found[process.pid] = f"{process.pid} {' '.join(process.cmdline())[:80]}"
    return found


def wait_until_released(before: Iterable[int], look: Callable[[], dict[int, str]] = holders) -> list[str]:
    """The processes that hold the device and did not ``before``, after the driver has had its time."""
    until = time.monotonic() + RELEASE_SECONDS
    while True:
        left = [told for pid, told in look().items() if pid not in before]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def environment_of(device: str) -> dict[str, Any]:
    """Hardware and versions, asked in another process: a process that has initialized CUDA cannot fork ranks.

    Raises:
        subprocess.CalledProcessError: They could not be asked.
    """
    ask = f"import json; from ptdbench.measure.hardware import environment; print(json.dumps(environment({device!r})))"
    asked = subprocess.run([sys.executable, "-c", ask], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(asked.stdout)
    return found
