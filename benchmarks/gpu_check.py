"""Every strategy on the GPUs of this machine: are its numbers right, and how fast is it?

    make gpu-check PYTHON=python3 WHEELS=wheels        # a machine that has torch and cannot install
    python benchmarks/gpu_check.py                     # where ptdbench is installed

All runs go through ptdbench's own ``run()``, one rank a GPU over NCCL. First the numbers: a few steps of SGD in fp32,
whose losses must follow those of ``single`` (SGD, because Adam would hide gradients of the wrong scale). Then the
speed: AdamW in bf16, eager and compiled, whose first losses must stay near those of ``single`` in fp32. Exit status 0:
all checks passed; 1: one failed; 2: there is no GPU here.

The wheels are hydra-core, omegaconf, antlr4-python3-runtime, submitit and hydra-submitit-launcher, made elsewhere by
``pip wheel --no-deps -w wheels NAME ...``. They are unpacked and not installed, so they must be pure Python; what the
machine has already is left alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

# ptdbench itself is imported inside of the functions: only main() puts it on the path.

ROOT = Path(__file__).parents[1]
STRATEGIES = ("single", "ddp", "fsdp", "pdp")

#: Steps whose losses are compared.
CHECKED_STEPS = 5
#: Largest relative difference of a loss. A GPU adds up in another order from run to run, and every step amplifies that;
#: a wrong gradient is off by far more, as long as the losses move at all (:data:`LEAST_FALL`).
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
#: The share of its loss that a reference must have lost: where nothing is learned, equal losses prove nothing.
LEAST_FALL = 0.05

Record = dict[str, Any]


def main() -> int:
    """Carry out all runs and print what came out."""
    options = _parse()
    with _importable(options.wheels):
        import torch

        gpus = torch.cuda.device_count() if options.device == "cuda" else 0
        if options.device == "cuda" and not gpus:
            print(f"gpu-check needs a GPU, and torch {torch.__version__} finds none on this machine", file=sys.stderr)
            return 2
        return _check(options, options.ranks or gpus or 2)


@contextmanager
def _importable(wheels: Path | None) -> Iterator[None]:
    """Put the checkout on the path, and what the wheels hold; Hydra finds its files only outside of a wheel."""
    with TemporaryDirectory() as site:
        for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
            if not _installed(wheel.name.split("-")[0]):
                with ZipFile(wheel) as archive:
                    archive.extractall(site)
        folders = [str(ROOT), site]
        sys.path[:0] = folders
        # Also for the processes that this one starts: the fork server, and torch's compilers.
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, *inherited]))
        yield


def _installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


def _check(options: argparse.Namespace, ranks: int) -> int:
    from ptdbench.records import ledger, store
    from ptdbench.report import table

    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_gpu-check"
    directory = store.claim_directory(options.outputs, name, "outputs", lambda folder, _: ledger.begin(folder, []))
    runs = Runs(options, ranks, directory)
    print(f"{options.model}, {ranks} ranks, global batch {runs.global_batch}")
    if ranks == 1:
        print("one rank, as NCCL refuses two on one GPU: pdp has one stage here, ddp and fsdp have nobody to talk to")
    print("losses, against those of single in fp32", flush=True)
    _check_numbers(runs)
    speeds = _check_speeds(runs, options.steps)
    for mode, records in speeds.items():
        print(f"\n{mode}\n{table.render(records)}")
    print(f"\nrecords in {directory}")
    print(f"{len(runs.failed)} checks failed: {', '.join(runs.failed)}" if runs.failed else "all checks passed")
    return int(bool(runs.failed))


def _check_numbers(runs: Runs) -> None:
    sgd = ("optimizer=sgd", "optimizer.lr=0.01", f"train.steps={CHECKED_STEPS}")
    reference = runs.reference("sgd fp32", *sgd)
    for strategy in STRATEGIES[1:]:
        runs.compared("sgd fp32", strategy, reference, TOLERANCE["fp32"], *sgd)


def _check_speeds(runs: Runs, steps: int) -> dict[str, list[Record]]:
    """The records of all strategies, eager and compiled."""
    reference = runs.reference("adamw fp32", f"train.steps={CHECKED_STEPS}")
    return {
        mode: [
            runs.compared(
                f"adamw bf16 {mode}",
                strategy,
                reference,
                TOLERANCE["bf16"],
                "precision=bf16",
                f"compile={compiled}",
                f"train.steps={steps}",
            )
            for strategy in STRATEGIES
        ]
        for mode, compiled in {"eager": "false", "compiled": "layers"}.items()
    }


class Runs:
    """Runs of the product, and the verdict on each.

    Attributes:
        failed: Names of the runs that did not pass.
        global_batch: Samples of a step, in every run.

    Args:
        options: The command line.
        ranks: How many ranks every strategy but ``single`` has.
        directory: Where the runs leave their records.
    """

    def __init__(self, options: argparse.Namespace, ranks: int, directory: Path) -> None:
        self.failed: list[str] = []
        self.global_batch = options.batch * ranks
        self._ranks = ranks
        self._common = [f"model={options.model}", f"device={options.device}", f"train.global_batch={self.global_batch}"]
        self._directory = directory

    def reference(self, name: str, *overrides: str) -> list[float]:
        """Losses of ``single``; empty where they cannot be compared with."""
        record = self._run(f"{name} single", "parallel=single", *overrides)
        losses = record["losses"] if record["status"] == "ok" else []
        fell = bool(losses) and losses[-1] < (1 - LEAST_FALL) * losses[0]
        said = f"loss {losses[0]:.4f} to {losses[-1]:.4f}, must fall by {LEAST_FALL:.0%}" if losses else _reason(record)
        self._tell(f"{name} single", fell, said)
        return losses if fell else []

    def compared(
        self, name: str, strategy: str, reference: Sequence[float], tolerance: float, *overrides: str
    ) -> Record:
        """The record of a run, whose first losses must be those of the reference."""
        record = self._run(f"{name} {strategy}", f"parallel={strategy}", *overrides)
        if record["status"] != "ok":
            self._tell(f"{name} {strategy}", False, _reason(record))
        elif not reference:
            self._tell(f"{name} {strategy}", False, "ran, and there is no reference")
        else:
            pairs = zip(record["losses"][:CHECKED_STEPS], reference, strict=True)
            off = max(abs(loss / expected - 1) for loss, expected in pairs)
            self._tell(f"{name} {strategy}", off <= tolerance, f"off by {off:.1e}, at most {tolerance:.0e}")
        return record

    def _run(self, name: str, *overrides: str) -> Record:
        from ptdbench import run as product
        from ptdbench.records import record, store
        from ptdbench.records.load import Run, load
        from ptdbench.setup import config
        from ptdbench.setup.compose import compose_all, conf_folder

        if "parallel=single" in overrides:  # it holds no more samples at a time than a rank of the others
            shape = f"train.micro_batch={self.global_batch // self._ranks}"
        else:
            shape = f"cluster.ranks_per_node={self._ranks}"
        composed = compose_all(conf_folder(), "config", [*self._common, shape, *overrides], multirun=False).jobs[0]

        def begin(folder: Path, directory: Path) -> None:
            store.write_record(folder, record.begin(config.resolve(composed), directory, {}, overrides))

        directory = store.claim_directory(self._directory, name, "outputs", begin)
        product.run(composed, directory)
        done = load(directory)
        assert isinstance(done, Run)  # it is the directory of one
        return {**done, "losses": done.series("losses").tolist()}

    def _tell(self, name: str, passed: bool, said: str) -> None:
        print(f"  {'ok  ' if passed else 'FAIL'}  {name:<28} {said}", flush=True)
        if not passed:
            self.failed.append(name)


def _reason(record: Record) -> str:
    error = record["error"]
    message = str(error["message"]).strip().partition("\n")[0]
    return f"{record['status']} on rank {error['rank']}: {error['type']}: {message}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to put on the path")
    parser.add_argument("--model", default="gpt_small", help="a choice of conf/model (default: %(default)s)")
    parser.add_argument("--ranks", type=int, help="of ddp, fsdp and pdp (default: one a GPU)")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step for each rank (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="of the bf16 runs (default: %(default)s)")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs", help="default: %(default)s")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu tries the check itself, on two ranks over gloo (default: %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
