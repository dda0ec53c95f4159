"""Whether a long run stays as light as it began: its memory, and the time of a save and of an evaluation.

    python -m benchmarks.long_run                                # 50,000 steps of toy on one rank
    python -m benchmarks.long_run --parallel ddp --ranks 2

One run of ``workload=train``, with a blocking save every 400 steps (files brought to the disk) and an evaluation with
curves every 500. A save is timed as a whole: draining the series, collecting the tensors, writing; an evaluation with
what TensorBoard is shown after it. What a window of a fifth of the steps near the start took is held against the last
fifth; memory is what rank 0 has resident after each save.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import psutil
from omegaconf import DictConfig
from torch import Tensor

from ptdbench.data.protocol import HeldOut
from ptdbench.data.synthetic import SyntheticVectors
from ptdbench.job import Job
from ptdbench.launch import local, peers, rendezvous
from ptdbench.launch.watchdog import Watchdog
from ptdbench.launch.world import discover
from ptdbench.measure.clock import Stopwatch
from ptdbench.measure.hardware import environment
from ptdbench.records import record, series, store
from ptdbench.setup import config, run_spec
from ptdbench.setup.compose import compose_all
from ptdbench.training.checkpointing import Checkpointing
from ptdbench.training.evaluation import Evaluator
from ptdbench.training.recorder import Recorder
from ptdbench.workloads.train import Train

#: The last fifth of the steps costs at most this many times what an early one does.
LIMIT = 1.1


class Judged(SyntheticVectors):
    """Random vectors, of which some are kept to judge by."""

    @property
    def held_out(self) -> HeldOut:
        """256 of them."""
        return _Kept(self)


class _Kept(HeldOut):
    """Samples far beyond those that are trained on."""

    bytes_per_token = None

    def __init__(self, data: SyntheticVectors) -> None:
        self._data = data

    def __len__(self) -> int:
        return 256

    def samples(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self._data.samples(10**12 + start, 10**12 + stop)


def main() -> int:
    """Print the figures of the start and the end; 1 if one is not flat."""
    options = _parse()
    composed = compose_all(_overrides(options)).jobs[0]
    with TemporaryDirectory() as directory:
        local.start(_measure, options.ranks, composed, directory)
        noted = json.loads(Path(directory, "noted.json").read_text())
        steps = sum(len(rows) for rows in series.blocks(Path(directory, series.NAME)))
        size = Path(directory, series.NAME).stat().st_size
    if steps != options.steps:
        raise SystemExit(f"{series.NAME} should have {options.steps} steps, and has {steps}")
    print(f"toy {options.parallel}, {options.ranks} ranks: {steps:,} steps, {size / 1e6:.1f} MB of series")
    flat = [
        _compared("memory of rank 0, MiB", noted["memory"], 2**-20, options.steps),
        _compared("save, ms", noted["save"], 1e3, options.steps),
        _compared("evaluation with its curves, ms", noted["evaluation"], 1e3, options.steps),
    ]
    return int(not all(flat))


def _compared(what: str, values: Sequence[tuple[int, float]], unit: float, steps: int) -> bool:
    """Print the medians of an early window and of the last one; whether the last one is no more than it may be."""
    fifth, begin = steps // 5, steps // 25  # what is done for the first time takes longer
    early = [unit * value for step, value in values if begin < step <= begin + fifth]
    late = [unit * value for step, value in values if step > steps - fifth]
    one, other = statistics.median(early), statistics.median(late)
    verdict = "PASS" if other <= LIMIT * one else "MISS"
    print(f"  {what:<31} {one:7.1f} (median of {len(early)} from step {begin:,}), {other:7.1f} (last {len(late)})")
    print(f"    end / start: {other / one:.3f}, at most {LIMIT} required: {verdict}")
    return verdict == "PASS"


def _measure(environ: Mapping[str, str], composed: DictConfig, directory: str) -> None:
    """A rank; rank 0 leaves what it has noted in ``directory``."""
    os.environ.update({name: value for name, value in environ.items() if name not in os.environ})
    world = discover(os.environ)
    assert world is not None  # local.start has just said who this is
    spec = run_spec.specify(config.read(composed), world)
    device, place = spec.device(world.local_rank), Path(directory)
    noted: dict[str, list[tuple[int, float]]] = {"save": [], "evaluation": [], "memory": []}
    process = psutil.Process()

    def saved(keeper: Any, seconds: float) -> None:
        noted["save"].append((keeper._loop.done, seconds))
        noted["memory"].append((keeper._loop.done, process.memory_info().rss))

    looked: dict[int, float] = {}

    def evaluated(one: Any, seconds: float) -> None:
        looked[one._loop.done] = looked.get(one._loop.done, 0.0) + seconds

    if world.rank == 0:
        store.write_record(place, record.begin(config.resolve(composed), place, environment("cpu")))
    with (
        rendezvous.process_group(world, spec.backend, device, key=directory) as own_store,
        _timed(Checkpointing, "_save", saved),
        _timed(Evaluator, "__call__", evaluated),
        _timed(Recorder, "show", evaluated),
    ):
        met = peers.meet(world, device, spec.config.cluster.cpus_per_rank)
        dog = Watchdog(world, own_store, place, math.inf, lambda *_: None)
        Train()(Job(spec, world, met, own_store, device, place, Stopwatch(time.time()), dog))
    noted["evaluation"] = list(looked.items())
    if world.rank == 0:
        (place / "noted.json").write_text(json.dumps(noted))


def _timed(owner: type, name: str, note: Callable[[Any, float], None]) -> Any:
    """Meanwhile each call of a method is timed."""
    method = getattr(owner, name)

    def timed(self: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        found = method(self, *arguments)
        note(self, time.perf_counter() - started)
        return found

    return mock.patch.object(owner, name, timed)


def _overrides(options: argparse.Namespace) -> list[str]:
    return [
        "model=toy", "data._target_=benchmarks.long_run.Judged", f"parallel={options.parallel}", "device=cpu",
        f"train.steps={options.steps}", "train.max_minutes=null", "checkpoint.every_steps=400", "checkpoint.keep=1",
        "checkpoint.asynchronous=false", "eval.every=500", f"cluster.ranks_per_node={options.ranks}",
        "cluster.cpus_per_rank=1",
    ]  # fmt: skip


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000, help="default: %(default)s")
    parser.add_argument("--parallel", default="single", help="single or ddp (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
