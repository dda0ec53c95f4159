"""Commands as a person types them, and the verdict on each."""

from __future__ import annotations

import itertools
import json
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.session import largest_difference
from benchmarks.script import ROOT
from ptdbench.parallel.conflicts import SETTERS, is_settable
from ptdbench.parallel.pipeline.schedules import SCHEDULES
from ptdbench.records.run_record import typed
from ptdbench.report.remarks import reason
from ptdbench.virtual.machine import is_virtual

from . import processes
from .launchers import Launcher, local

#: Largest relative difference of a loss from that of the reference, and the steps that are compared.
TOLERANCE, STEPS = 1e-4, 5

#: Seconds after a failure in which every process of the run must end, and after which a command is not waited for.
GONE, PATIENCE = 40.0, 600.0

WORKLOADS = ("p2p", "collectives")
FAULTS = ("kill", "stop", "raise")

Record = dict[str, Any]


@dataclass(frozen=True)
class Layouts:
    """Layouts that are tried in one sweep."""

    overrides: tuple[str, ...]  #: As they are typed after ``-m``: those with commas are swept over.
    ranks: int = 2  #: The fewest that they need.
    on_gpus: bool = False  #: Whether they need NCCL.

    @property
    def names(self) -> list[str]:
        """The overrides of each run, in a line."""
        choices = [
            [f"{option}={value}" for value in values.split(",")]
            for option, _, values in (one.partition("=") for one in self.overrides)
        ]
        return [" ".join(chosen) for chosen in itertools.product(*choices)]


#: Schedules beside the default one that this torch carries out: stages in turns and in the form of a V, whose messages
#: may wait for each other where one communicator has them all.
SCHEDULES_TO_TRY = [name for name in ("gpipe", "interleaved1f1b", "zbv", "dualpipev") if SCHEDULES[name].is_supported]

#: Layouts that change FSDP's messages, with a torch that has them.
OF_FSDP = (
    Layouts(("parallel=fsdp", "parallel.separate_reduce_scatter=true", "parallel.reduce_scatter_buffers=2")),
    Layouts(("parallel=fsdp", "parallel.message_buffers=nccl,symmetric"), on_gpus=True),
) if all(map(is_settable, SETTERS)) else ()  # fmt: skip

#: Each must follow ``single``.
LAYOUTS = (
    Layouts(("parallel=ddp,fsdp,pdp,tp",)),
    Layouts(("parallel=hsdp",), ranks=4),
    Layouts(("parallel=3d",), ranks=8),
    Layouts(("parallel=ddp,fsdp", "parallel.context=2", "parallel.context_method=ulysses,ring")),
    Layouts(("parallel=pdp", "parallel.pipeline=2", f"parallel.schedule={','.join(SCHEDULES_TO_TRY)}")),
    Layouts(("parallel=ddp", "parallel.optimizer=zero1")),
    *OF_FSDP,
    Layouts(("parallel=tp", "parallel.sequence=true", "parallel.async_tensor=true", "compile=layers"), on_gpus=True),
)


class Checks:
    """Runs of the product, and the verdict on each.

    Attributes:
        failed: Names of the checks that did not pass.

    Args:
        device: ``cuda`` or ``cpu``.
        model: What the layouts train.
        batch: Samples of a step for each rank.
        folder: Where the runs leave their records, on a file system that all nodes see.
    """

    def __init__(self, device: str, model: str, batch: int, folder: Path) -> None:
        self.failed: list[str] = []
        self._device, self._model, self._batch, self._folder = device, model, batch, folder.absolute()

    def layouts(self, launcher: Launcher, every: Sequence[Layouts]) -> None:
        """Sweeps over layouts, against ``single`` in a run of its own."""
        training = (
            f"model={self._model}", f"train.global_batch={self._batch * launcher.ranks}", f"train.steps={STEPS}",
            "optimizer=sgd", "optimizer.lr=0.01",
        )  # fmt: skip
        alone = ("parallel=single", f"train.micro_batch={self._batch}")
        reference = self._losses(local(1), f"{launcher.name}-single", *training, *alone)
        for number, layouts in enumerate(every):
            if layouts.ranks <= launcher.ranks and (self._device == "cuda" or not layouts.on_gpus):
                self._sweep(launcher, f"{launcher.name}-layouts-{number}", layouts, training, reference)

    def workload(self, launcher: Launcher, name: str) -> None:
        """A workload that measures the links comes to an end, and well."""
        folder = self._folder / f"{launcher.name}-{name}"
        said = self._finish(launcher, folder, f"workload={name}", f"hydra.run.dir={folder}")
        record = _read(folder / "record.json")
        passed = record.get("status") == "ok"
        self._tell(f"{launcher.name} {name}", passed, "ok" if passed else _reason(record, said))

    def fault(self, launcher: Launcher, how: str) -> None:
        """One rank breaks: all processes end in time, and the record names that rank."""
        name, folder = f"{launcher.name} {how}", self._folder / f"{launcher.name}-{how}"
        folder.mkdir(parents=True)
        begun, victim, mark = folder / "begun", launcher.ranks - 1, uuid.uuid4().hex
        overrides = (
            "model=custom", "model._target_=benchmarks.gpu_cluster.victim.Victim", f"+model.how={how}",
            f"+model.rank={victim}", f"+model.begun={begun}", "data=synthetic_vectors", "data.inputs=8",
            "data.outputs=4", "parallel=ddp", "train.steps=1000000", "timeout_minutes=0.1",
            f"hydra.run.dir={folder / 'run'}",
        )  # fmt: skip
        with (folder / "output.txt").open("w") as output:
            command, environ = self._command(launcher, *overrides), processes.environ(mark)
            process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
            seconds = processes.seconds_until_gone(begun, mark, launcher, process, PATIENCE)
        record = _read(folder / "run" / "record.json")
        error = record.get("error") or {}
        named = error.get("rank") == victim or f"rank {victim}" in str(error.get("message"))
        gone = "all gone" if seconds <= GONE else "not gone"
        said = f"{gone} {seconds:.0f} s after, at most {GONE:.0f}; {_reason(record, folder / 'output.txt')}"
        self._tell(name, seconds <= GONE and named and record.get("status") not in (None, "ok"), said)

    def _losses(self, launcher: Launcher, name: str, *overrides: str) -> list[float]:
        folder = self._folder / name
        self._finish(launcher, folder, *overrides, f"hydra.run.dir={folder}")
        return _losses(folder)

    def _sweep(
        self, launcher: Launcher, name: str, layouts: Layouts, training: Sequence[str], reference: Sequence[float]
    ) -> None:
        folder = self._folder / name
        said = self._finish(launcher, folder, *training, *layouts.overrides, f"hydra.sweep.dir={folder}", "-m")
        found, options = {}, [one.partition("=")[0] for one in layouts.overrides]
        for path in folder.glob("*/record.json"):
            typed = _read(path).get("overrides", [])
            found[" ".join(one for one in typed if one.partition("=")[0] in options)] = path.parent
        for layout in layouts.names:
            run = found.get(layout, folder)  # which has no record
            shown, losses = f"{launcher.name} {layout.replace('parallel', '', 1).lstrip('=')}", _losses(run)
            if not reference or len(losses) != len(reference):
                self._tell(shown, False, _reason(_read(run / "record.json"), said))
                continue
            if any(map(is_virtual, _read(run / "record.json")["environment"]["devices"] or ())):
                self._tell(shown, True, "virtual: not compared")
                continue
            off = largest_difference(losses, reference)
            self._tell(shown, off <= TOLERANCE, f"off by {off:.1e}, at most {TOLERANCE:.0e}")

    def _command(self, launcher: Launcher, *overrides: str) -> list[str]:
        device = () if any(one.startswith("device=") for one in overrides) else (f"device={self._device}",)
        return [*launcher.prefix, str(ROOT / "train.py"), *launcher.options, *device, *overrides]

    def _finish(self, launcher: Launcher, folder: Path, *overrides: str) -> Path:
        """Carry out a command to its end; the file with what it said."""
        path = self._folder / f"{folder.name}.txt"
        command, environ = self._command(launcher, *overrides), processes.environ("")
        with path.open("w") as output:
            try:
                subprocess.run(
                    command, cwd=ROOT, env=environ, stdout=output, stderr=output, timeout=PATIENCE, check=False
                )
            except subprocess.TimeoutExpired:
                print(f"\nended after {PATIENCE:g} s", file=output)
        return path

    def _tell(self, name: str, passed: bool, said: str) -> None:
        print(f"  {'ok  ' if passed else 'FAIL'}  {name:<22} {said}", flush=True)
        if not passed:
            self.failed.append(name)


def _read(path: Path) -> Record:
    return json.loads(path.read_text()) if path.exists() else {}


def _losses(folder: Path) -> list[float]:
    """Of a run that went well; else empty."""
    import ptdbench

    if _read(folder / "record.json").get("status") != "ok":
        return []
    found = ptdbench.load(folder)
    return [float(loss) for loss in found.series("losses")]  # type: ignore[union-attr]


def _reason(record: Mapping[str, Any], said: Path) -> str:
    """Why a run failed, in a line; where there is no record, where to look."""
    return reason(typed(record)) if record.get("error") else f"{record.get('status', 'no record')}; see {said}"
