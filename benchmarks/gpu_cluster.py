"""Two or more GPUs, on one node or several: every layout, the links, and failures under every launcher that is here.

    make gpu-cluster PYTHON=.venv/bin/python              # on one node
    salloc -N2 --gpus-per-node=8 make gpu-cluster ...     # in an allocation: srun and mpirun use all of its nodes
    python benchmarks/gpu_cluster.py --device cpu         # tries the script itself, on two ranks over gloo

Under each launcher (local ranks, torchrun, srun in an allocation, mpirun) the same command lines are typed as a person
would. All layouts in one sweep, whose losses must follow those of ``single`` within 1e-4 in fp32, with SGD, as Adam
would hide gradients of the wrong scale;
``p2p`` and ``collectives``; and a model that is killed, stopped (SIGSTOP) or raises in one rank: 40 s later none of the
run's processes is left on any node, and its record says why. Exit status 0: all checks passed; 1: one failed; 2: fewer
than two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

#: Largest relative difference of a loss from that of ``single``, and the steps that are compared.
TOLERANCE, STEPS = 1e-4, 5

#: Seconds after a failure in which every process of the run must end, and after which it is not waited for any more.
GONE, PATIENCE = 40.0, 600.0

LAUNCHERS = ("local", "torchrun", "srun", "mpirun")
WORKLOADS = ("p2p", "collectives")
FAULTS = ("kill", "stop", "raise")

#: Tells the processes of one command from all others, on every node.
MARK = "PTDBENCH_GPU_CLUSTER"

Record = dict[str, Any]


@dataclass(frozen=True)
class Launcher:
    """How ranks are started.

    Attributes:
        name: One of :data:`LAUNCHERS`.
        prefix: The words before ``train.py``.
        ranks: How many ranks there are.
        nodes: How many nodes they are on.
        options: Overrides that it needs.
    """

    name: str
    prefix: tuple[str, ...]
    ranks: int
    nodes: int = 1
    options: tuple[str, ...] = ()


def main() -> int:
    """Carry out all checks and print what came out."""
    options = _parse()
    if options.living:
        print(json.dumps(living(options.living)))
        return 0
    gpus = _gpus() if options.device == "cuda" else 2
    if gpus < 2:
        print(f"gpu-cluster needs two GPUs or more on a node, and torch finds {gpus} here", file=sys.stderr)
        return 2
    folder = options.outputs / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_gpu-cluster"
    folder.mkdir(parents=True)
    checks = Checks(options.device, options.model, options.batch, folder)
    for launcher in launchers(options.launchers, options.ranks or gpus):
        nodes = f"{launcher.nodes} node{'s' * (launcher.nodes > 1)}"
        print(f"{launcher.name}: {launcher.ranks} ranks on {nodes}", flush=True)
        checks.layouts(launcher, options.layouts)
        for workload in options.workloads:
            checks.workload(launcher, workload)
        for fault in options.faults:
            checks.fault(launcher, fault)
    print(f"records in {folder}")
    print(f"{len(checks.failed)} failed: {', '.join(checks.failed)}" if checks.failed else "all checks passed")
    return int(bool(checks.failed))


def launchers(names: Sequence[str], ranks: int) -> list[Launcher]:
    """Those of ``names`` that are here, with ``ranks`` on each node; srun and mpirun use the nodes of an allocation."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    every, python = ranks * nodes, sys.executable
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    srun = ("srun", f"--nodes={nodes}", f"--ntasks-per-node={ranks}", python)
    # Open MPI would bind a rank to one core, and counts cores, not GPUs.
    mpirun = ("mpirun", *root, "--oversubscribe", "--bind-to", "none", "-np", str(every), "--map-by")
    known = [
        Launcher("local", (python,), ranks, options=(f"cluster.ranks_per_node={ranks}",)),
        Launcher("torchrun", torchrun, ranks),
        Launcher("srun", srun, every, nodes),
        Launcher("mpirun", (*mpirun, f"ppr:{ranks}:node", python), every, nodes),
    ]
    here = [one for one in known if one.name in names and (shutil.which(one.prefix[0]) or one.prefix[0] == python)]
    left_out = [name for name in names if name not in [one.name for one in here]]
    if "SLURM_JOB_ID" not in os.environ:
        left_out += [one.name for one in here if one.name == "srun"]
        here = [one for one in here if one.name != "srun"]
    if left_out:
        print(f"left out, as they are not here (srun needs an allocation): {', '.join(left_out)}")
    return here


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

    def layouts(self, launcher: Launcher, names: Sequence[str]) -> None:
        """All layouts in one sweep, against ``single`` in a run of its own."""
        if not (names := [name for name in names if name != "hsdp" or launcher.ranks >= 4]):  # of two times two ranks
            return
        training = (
            f"model={self._model}", f"train.global_batch={self._batch * launcher.ranks}", f"train.steps={STEPS}",
            "optimizer=sgd", "optimizer.lr=0.01",
        )  # fmt: skip
        alone = Launcher("local", (sys.executable,), 1)
        folder = self._folder / f"{launcher.name}-single"
        shape = ("parallel=single", f"train.micro_batch={self._batch}")
        self._finish(alone, folder, *training, *shape, f"hydra.run.dir={folder}")
        reference = _losses(folder)
        folder = self._folder / f"{launcher.name}-layouts"
        sweep = (f"parallel={','.join(names)}", f"hydra.sweep.dir={folder}", "-m")
        said = self._finish(launcher, folder, *training, *sweep)
        found = {record["parallel"]: path.parent for path in folder.glob("*/record.json") if (record := _read(path))}
        for name in names:
            run = found.get(name, folder)  # which has no record
            losses = _losses(run)
            if not reference or len(losses) != len(reference):
                self._tell(f"{launcher.name} {name}", False, _reason(_read(run / "record.json"), said))
                continue
            off = max(abs(loss / expected - 1) for loss, expected in zip(losses, reference, strict=True))
            self._tell(f"{launcher.name} {name}", off <= TOLERANCE, f"off by {off:.1e}, at most {TOLERANCE:.0e}")

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
            "model=custom", "model._target_=benchmarks.victim.Victim", f"+model.how={how}", f"+model.rank={victim}",
            f"+model.begun={begun}", "data=synthetic_vectors", "data.inputs=8", "data.outputs=4", "parallel=ddp",
            "train.steps=1000000", "timeout_minutes=0.05", f"hydra.run.dir={folder / 'run'}",
        )  # fmt: skip
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                self._command(launcher, *overrides), cwd=ROOT, env=_environ(mark), stdout=output, stderr=output
            )
            seconds = _seconds_until_gone(begun, mark, launcher, process)
        record = _read(folder / "run" / "record.json")
        error = record.get("error") or {}
        named = error.get("rank") == victim or f"rank {victim}" in str(error.get("message"))
        gone = "all gone" if seconds <= GONE else "not gone"
        said = f"{gone} {seconds:.0f} s after, at most {GONE:.0f}; {_reason(record, folder / 'output.txt')}"
        self._tell(name, seconds <= GONE and named and record.get("status") not in (None, "ok"), said)

    def _command(self, launcher: Launcher, *overrides: str) -> list[str]:
        options = (*launcher.options, f"device={self._device}")
        return [*launcher.prefix, str(ROOT / "train.py"), *options, *overrides]

    def _finish(self, launcher: Launcher, folder: Path, *overrides: str) -> Path:
        """Carry out a command to its end; the file with what it said."""
        path = self._folder / f"{folder.name}.txt"
        with path.open("w") as output:
            command = self._command(launcher, *overrides)
            try:
                subprocess.run(
                    command, cwd=ROOT, env=_environ(""), stdout=output, stderr=output, timeout=PATIENCE, check=False
                )
            except subprocess.TimeoutExpired:
                print(f"\nended after {PATIENCE:g} s", file=output)
        return path

    def _tell(self, name: str, passed: bool, said: str) -> None:
        print(f"  {'ok  ' if passed else 'FAIL'}  {name:<22} {said}", flush=True)
        if not passed:
            self.failed.append(name)


def living(mark: str) -> list[int]:
    """The processes of this node that a command with this mark has started, but not zombies."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:  # ended meanwhile, or somebody else's
            continue
    return found


def _seconds_until_gone(begun: Path, mark: str, launcher: Launcher, process: subprocess.Popen[bytes]) -> float:
    """Seconds from the failure until no process is left; ends what is left after :data:`PATIENCE`."""
    started = time.time()
    while time.time() < started + PATIENCE:
        ended = process.poll() is not None
        if not begun.exists() and ended:  # it never came so far
            return float("inf")
        if begun.exists() and ended and not _living(mark, launcher):
            return time.time() - begun.stat().st_mtime
        time.sleep(0.2)
    process.kill()
    return float("inf")


def _living(mark: str, launcher: Launcher) -> list[int]:
    """The processes of a command on all of its nodes."""
    if launcher.nodes == 1:
        return living(mark)
    ask = ("srun", "--overlap", f"--nodes={launcher.nodes}", "--ntasks-per-node=1", sys.executable, __file__)
    said = subprocess.run([*ask, "--living", mark], capture_output=True, text=True, check=True).stdout
    return [pid for line in said.splitlines() for pid in json.loads(line)]


def _environ(mark: str) -> dict[str, str]:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), MARK: mark}


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
    error = record.get("error")
    if not error:
        return f"{record.get('status', 'no record')}; see {said}"
    message = str(error["message"]).strip().partition("\n")[0]
    return f"{record['status']} on rank {error['rank']}: {error['type']}: {message}"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, help="of a node (default: one a GPU; two on a CPU)")
    parser.add_argument("--model", default="gpt_small", help="a choice of conf/model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step for each rank (default: %(default)s)")
    parser.add_argument("--launchers", nargs="*", choices=LAUNCHERS, default=LAUNCHERS, help="default: all")
    parser.add_argument("--layouts", nargs="*", default=("ddp", "fsdp", "hsdp", "pdp"), help="default: all")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=WORKLOADS, help="default: all")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS, help="default: all")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs", help="default: %(default)s")
    parser.add_argument("--living", metavar="MARK", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
