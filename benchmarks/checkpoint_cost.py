"""What checkpoints cost a run: steps beside a save against steps without, and how long a save holds the step loop.

    python benchmarks/checkpoint_cost.py                                       # gpt_small, one rank
    python benchmarks/checkpoint_cost.py --model gpt_tiny --tokens 64 --every 20   # a quick look

One process trains in segments of ``--every`` steps, by turns with an asynchronous checkpoint at the start and without;
the two orders alternate too, so that a machine that gets slower slows both. The steps are timed without the call that
saves, which is the stall and is timed by itself. Between segments, outside of every step, the save is waited for, and
blocking saves of the same tensors are timed. All saves make checksums and bring their files to the disk.

Where the kernel tells (Linux), the step's thread is followed too. It runs, or waits for a core (other processes take
it, or the kernel while it writes), or is blocked (by the interpreter lock, the disk, or memory that is being freed).
Its time running also grows where the save takes the bandwidth of memory.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.rank import on_ranks
from benchmarks.ratio import Ratio
from benchmarks.script import judged, parser_of, read
from ptdbench.checkpoints.saver import Saver
from ptdbench.checkpoints.state import TrainingState
from ptdbench.job import Job
from ptdbench.workloads.train import assemble

#: The median step beside checkpoints is at most this many times the one without.
STEP_LIMIT = 1.03

#: The median stall of a save is below this share of a blocking save; the aim is half of it.
STALL_LIMIT = 0.2

#: Steps before the first segment.
WARMUP = 3


def main() -> int:
    """Print both ratios; 1 if one misses its limit."""
    options = _parse()
    asked = read(*_overrides(options))
    seconds = on_ranks(asked, _measure, options.pairs, options.every, within=options.directory)
    plain, beside, stalls, blocking = (seconds[name] for name in ("plain", "beside", "stalls", "blocking"))
    steps = median_ratio(beside, plain)
    stall = statistics.median(stalls) / statistics.median(blocking)
    print(
        f"{options.model} single, {options.tokens} tokens, {options.threads} threads, {seconds['bytes'] / 1e9:.2f} GB "
        f"every {options.every} steps: {options.pairs} segments of each kind"
    )
    print(f"  step without checkpoints  {_milliseconds(plain)}")
    print(f"  step beside checkpoints   {_milliseconds(beside)}")
    print(f"    worst step {max(beside) * 1e3:.1f} ms beside, {max(plain) * 1e3:.1f} ms without")
    for name, without, with_save in _shares(seconds["threads"]):
        print(f"    mean of the thread {name:18} {without:9.1f} ms without, {with_save:9.1f} ms beside")
    are_light = judged(f"    ratio of medians {steps}", f"at most {STEP_LIMIT}", steps.value <= STEP_LIMIT)
    print(f"  blocking save             {_milliseconds(blocking)}")
    print(f"  stall, second save and on {_milliseconds(stalls)}")
    are_short = judged(f"    ratio of medians {stall:.4f}", f"below {STALL_LIMIT}", stall < STALL_LIMIT)
    return int(not (are_light and are_short))


def median_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The median of ``a`` over that of ``b``, with a percentile bootstrap (4000 resamples from a fixed seed)."""
    left, right = np.asarray(a), np.asarray(b)
    generator = np.random.default_rng(0)
    resampled = [
        np.median(generator.choice(left, len(left))) / np.median(generator.choice(right, len(right)))
        for _ in range(4000)
    ]
    low, high = np.quantile(resampled, (0.025, 0.975)).tolist()
    return Ratio(float(np.median(left) / np.median(right)), low, high)


def _measure(job: Job, pairs: int, every: int) -> dict[str, Any]:
    return Bench(job).seconds(pairs, every)


class Bench:
    """A step loop and the two ways of saving it."""

    def __init__(self, job: Job) -> None:
        self._loop = assemble(job)
        self._state = TrainingState(self._loop.engine.module, self._loop.update.optimizer, job.training.tied, 0)
        self._asynchronous = Saver(job.directory / "asynchronous", keep=1)
        self._blocking = Saver(job.directory / "blocking", keep=1, asynchronous=False)

    def seconds(self, pairs: int, every: int) -> dict[str, Any]:
        """Seconds of steps without and beside saves, of stalls from the second on and of blocking saves."""
        steps: dict[bool, list[float]] = {False: [], True: []}
        threads: dict[bool, list[list[float]]] = {False: [], True: []}
        for _ in range(WARMUP):
            self._loop.step()
        self._save(self._asynchronous)  # the first one allocates the copies
        self._asynchronous.wait()
        gc.disable()
        for pair in range(pairs):
            for saving in (False, True) if pair % 2 else (True, False):
                taken = self._segment(every, saving)
                steps[saving] += [seconds for seconds, _ in taken]
                threads[saving] += [thread for _, thread in taken if thread]
            self._save(self._blocking)
        assert not self._asynchronous.problems + self._blocking.problems
        return {
            "plain": steps[False],
            "beside": steps[True],
            "threads": [threads[False], threads[True]],
            "stalls": self._asynchronous.stall_seconds[1:],
            "blocking": self._blocking.stall_seconds,
            "bytes": sum(tensor.nbytes for tensor in self._tensors().values()),
        }

    def _segment(self, count: int, saving: bool) -> list[tuple[float, list[float]]]:
        """Each step's seconds, and those of its thread: running, waiting for a core, blocked."""
        if saving:
            self._save(self._asynchronous)
        taken = []
        for _ in range(count):
            before, started = _scheduled(), time.perf_counter()
            self._loop.step()
            seconds, after = time.perf_counter() - started, _scheduled()
            known = [end - begin for begin, end in zip(before, after, strict=True)]
            taken.append((seconds, [*known, seconds - sum(known)] if known else []))
        self._asynchronous.wait()
        return taken

    def _save(self, saver: Saver) -> None:
        saver.save(len(self._loop.losses), self._tensors(), {}, {})

    def _tensors(self) -> dict[str, Tensor]:
        return self._state.collect(with_buffers=True)


def _scheduled() -> list[float]:
    """Seconds that this thread has run, and has waited for a core; empty where the kernel does not tell."""
    with suppress(OSError):
        return [int(value) / 1e9 for value in Path("/proc/thread-self/schedstat").read_text().split()[:2]]
    return []


def _shares(threads: Sequence[Sequence[Sequence[float]]]) -> list[tuple[str, float, float]]:
    """What a step's thread did, and its mean milliseconds in steps without and beside a save."""
    names = ("running", "waiting for a core", "blocked")
    without, beside = ([1e3 * statistics.mean(column) for column in zip(*steps, strict=True)] for steps in threads)
    return list(zip(names, without, beside, strict=False))


def _milliseconds(seconds: Sequence[float]) -> str:
    low, median, high = (value * 1e3 for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{median:9.1f} ms (median of {len(seconds)}, {low:.1f} to {high:.1f})"


def _overrides(options: argparse.Namespace) -> list[str]:
    return [
        f"model={options.model}",
        f"model.sequence_length={options.tokens}",
        "parallel=single",
        "device=cpu",
        f"train.global_batch={options.batch}",
        "train.max_minutes=null",
        f"cluster.cpus_per_rank={options.threads}",
    ]


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="gpt_small", help="a GPT of conf/model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="samples of a step (default: %(default)s)")
    parser.add_argument("--every", type=int, default=48, help="steps of a segment (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=2, help="segments of each kind (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the rank (default: %(default)s)")
    parser.add_argument("--directory", help="where to save; removed at the end (default: the one for temporary files)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
