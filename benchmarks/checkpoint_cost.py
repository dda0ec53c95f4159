"""What checkpoints cost a run: steps beside a save against steps without, and how long a save holds the step loop.

    make overhead ARGS="checkpoints --model gpt_tiny --tokens 64 --every 20"         # a quick look

Good is a median step beside a save of at most 1.03 times one without, and a stall below 0.2 of a blocking save.
"""

import gc
import statistics
import time
from typing import Any

from torch import Tensor

from benchmarks.rank import on_ranks
from benchmarks.ratio import ratio_of_medians
from benchmarks.script import judged, keep, options, read, spread
from ptdbench.checkpoints.saver import Saver
from ptdbench.checkpoints.state import TrainingState
from ptdbench.job import Job
from ptdbench.workloads.train import assemble

#: The limits of the ratio of medians of steps, and of the stall as a share of a blocking save.
STEP_LIMIT, STALL_LIMIT = 1.03, 0.2

#: Steps before the first segment.
WARMUP = 3


def main() -> int:
    """Print both ratios; 1 if one misses its limit."""
    args = options(
        __doc__,
        model=("gpt_small", "a GPT of conf/model"),
        tokens=(128, "of a sample"),
        batch=(1, "samples of a step"),
        every=(48, "steps of a segment"),
        pairs=(2, "segments of each kind"),
        threads=(1, "of the rank"),
        directory=(str, "where to save, removed at the end; by default among temporary files"),
    )
    run = read(
        f"model={args.model}", f"model.sequence_length={args.tokens}", "parallel=single", "device=cpu",
        f"train.global_batch={args.batch}", "train.max_minutes=null", f"cluster.cpus_per_rank={args.threads}",
    )  # fmt: skip
    figures = on_ranks(run, _measure, args.pairs, args.every, within=args.directory)
    steps = ratio_of_medians(figures["beside"], figures["plain"])
    stall = statistics.median(figures["stalls"]) / statistics.median(figures["blocking"])
    print(
        f"{args.model} single, {args.tokens} tokens, {args.threads} threads, {figures['bytes'] / 1e9:.2f} GB "
        f"every {args.every} steps: {args.pairs} segments of each kind; seconds"
    )
    print(f"  step without checkpoints  {spread(figures['plain'])}")
    print(f"  step beside checkpoints   {spread(figures['beside'])}")
    is_light = judged(f"    ratio of medians {steps}", f"at most {STEP_LIMIT}", steps.value <= STEP_LIMIT)
    print(f"  blocking save             {spread(figures['blocking'])}")
    print(f"  stall, second save and on {spread(figures['stalls'])}")
    is_short = judged(f"    ratio of medians {stall:.4f}", f"below {STALL_LIMIT}", stall < STALL_LIMIT)
    keep("checkpoints", f"{stall:.3f}; {steps.value:.3f}")
    return int(not (is_light and is_short))


def _measure(job: Job, pairs: int, every: int) -> dict[str, Any]:
    """In the rank: return the seconds of steps without and beside saves, of stalls but the first, of blocking saves."""
    loop = assemble(job)
    state = TrainingState(loop.engine.module, loop.update.optimizer, job.training.tied, 0)
    asynchronous = Saver(job.directory / "asynchronous", keep=1)
    blocking = Saver(job.directory / "blocking", keep=1, asynchronous=False)
    steps: dict[bool, list[float]] = {False: [], True: []}
    stalls: dict[Saver, list[float]] = {asynchronous: [], blocking: []}

    def tensors() -> dict[str, Tensor]:
        return state.collect(with_buffers=True)

    def save(saver: Saver) -> None:
        content, started = tensors(), time.perf_counter()
        saver.save(len(loop.losses), content, {}, {})
        stalls[saver].append(time.perf_counter() - started)

    for _ in range(WARMUP):
        loop.step()
    save(asynchronous)  # the first one allocates the copies
    asynchronous.wait()
    gc.disable()
    for pair in range(pairs):
        for saving in (False, True) if pair % 2 else (True, False):
            if saving:
                save(asynchronous)
            for _ in range(every):
                started = time.perf_counter()
                loop.step()
                steps[saving].append(time.perf_counter() - started)
            asynchronous.wait()
        save(blocking)
    assert not asynchronous.problems + blocking.problems
    return {
        "plain": steps[False], "beside": steps[True], "stalls": stalls[asynchronous][1:],
        "blocking": stalls[blocking], "bytes": sum(tensor.nbytes for tensor in tensors().values()),
    }  # fmt: skip
