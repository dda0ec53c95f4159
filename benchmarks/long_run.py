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
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import psutil

from benchmarks.rank import on_ranks
from benchmarks.script import judged, parser_of, read
from ptdbench.data.protocol import HeldOut, HeldOutPart
from ptdbench.data.synthetic import SyntheticVectors
from ptdbench.job import Job
from ptdbench.measure.hardware import environment
from ptdbench.records import record, series, store
from ptdbench.training.checkpointing import Checkpointing
from ptdbench.training.evaluation import Evaluator
from ptdbench.training.recorder import Recorder
from ptdbench.workloads.train import Train

#: The last fifth of the steps costs at most this many times what an early one does.
LIMIT = 1.1

#: Steps with which both windows have a save and an evaluation.
LEAST = 2500


class Judged(SyntheticVectors):
    """Random vectors, of which some are kept to judge by."""

    @property
    def held_out(self) -> HeldOut:
        """256 of them, far beyond those that are trained on."""
        return HeldOutPart(256, lambda start, stop: self.samples(10**12 + start, 10**12 + stop))


def main() -> int:
    """Print the figures of the start and the end; 1 if one is not flat."""
    options = _parse()
    noted, steps, size = on_ranks(read(*_overrides(options)), _measure)
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
    print(f"  {what:<31} {one:7.1f} (median of {len(early)} from step {begin:,}), {other:7.1f} (last {len(late)})")
    return judged(f"    end / start: {other / one:.3f}", f"at most {LIMIT}", other <= LIMIT * one)


def _measure(job: Job) -> tuple[dict[str, list[tuple[int, float]]], int, int]:
    """In a rank: seconds and bytes by step, how many steps the series have, and their bytes."""
    noted: dict[str, list[tuple[int, float]]] = {"save": [], "memory": []}
    process, looked, path = psutil.Process(), defaultdict[int, float](float), job.directory / series.NAME

    def saved(keeper: Any, seconds: float) -> None:
        noted["save"].append((keeper._loop.done, seconds))
        noted["memory"].append((keeper._loop.done, process.memory_info().rss))

    def evaluated(one: Any, seconds: float) -> None:
        looked[one._loop.done] += seconds

    if job.world.is_first:
        begun = record.begin(job.spec.config.resolved, job.directory, environment("cpu"))
        store.write_record(job.directory, begun)
    with (
        _timed(Checkpointing, "_save", saved),
        _timed(Evaluator, "__call__", evaluated),
        _timed(Recorder, "show", evaluated),
    ):
        Train()(job)
    steps = sum(len(rows) for rows in series.blocks(path))
    return {**noted, "evaluation": list(looked.items())}, steps, path.stat().st_size


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
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=50_000, help="default: %(default)s")
    parser.add_argument("--parallel", default="single", help="single or ddp (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    if options.steps < LEAST:
        parser.error(f"--steps {options.steps}: a window may hold no save or evaluation; give at least {LEAST}")
    return options


if __name__ == "__main__":
    sys.exit(main())
