"""What runs cost beside their steps: how long ranks take to exist, against ``torchrun``, and a run of a sweep in all.

    make launch-time ARGS="--ranks 4 --runs 20 --sweep 200"

An empty run's ranks join a gloo process group and pass one barrier; ``torchrun`` starts an equally empty script, by
turns. The sweep has runs of two steps of a small model: its time beyond that of one such run is what the others cost.
Good is a fifth of torchrun's time, and half a second a run.
"""

import os
import statistics
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.script import TORCHRUN, TORCHRUN_THREADS, TRAIN, judged, keep, options, read, seconds_of, spread
from ptdbench.launch import local

#: A following run may take this share of torchrun's time, and a run of a sweep so many seconds.
LIMIT, RUN_LIMIT = 1 / 5, 0.5

#: What the ranks of ``python train.py`` need, so that the fork server has as much to import as in a real sweep.
MODULES = ("ptdbench.workloads.train", "ptdbench.parallel.strategy", "ptdbench.models.gpt", "ptdbench.data.text")

EMPTY_SCRIPT = """
import sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
joined = time.time()
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as report:
    report.write(repr(joined))
dist.destroy_process_group()
"""


def main() -> int:
    """Print the figures; 1 if they miss the requirement."""
    args = options(
        __doc__, ranks=(2, "of a run"), runs=(10, "turns of both, after the first"),
        sweep=(50, "runs of the sweep, 2 or more"),
    )  # fmt: skip
    local.warm_up(MODULES)  # as train.py does, which then reads and checks the configuration
    first = _ours(args.ranks)
    following, torchrun = zip(*[(_ours(args.ranks), _torchrun(args.ranks)) for _ in range(args.runs)], strict=True)
    ratio = statistics.median(following) / statistics.median(torchrun)
    print(f'seconds from "run ready" to "all {args.ranks} ranks in the process group" (gloo, CPU)')
    print(f"  first run       {first:.3f}")
    print(f"  following runs  {spread(following)}")
    print(f"  torchrun        {spread(torchrun)}")
    is_fast = judged(f"following / torchrun: {ratio:.3f}", f"at most {LIMIT:.3f}", ratio <= LIMIT)
    single, whole = _sweep_seconds(1), _sweep_seconds(args.sweep)
    seconds = (whole - single) / (args.sweep - 1)
    print(f"seconds of a run of two steps of toy, of {args.sweep} in a sweep (2 ranks, CPU)")
    print(f"  first run       {single:.3f}, imports included")
    is_short = judged(f"a following run: {seconds:.3f}", f"at most {RUN_LIMIT:.3f}", seconds <= RUN_LIMIT)
    keep("start", f"{ratio:.3f}")
    keep("run of a sweep", f"{seconds:.3f} s")
    return int(not (is_fast and is_short))


def _ours(ranks: int) -> float:
    from benchmarks import rank  # what train.py too imports while the fork server does

    run = read("model=toy", "parallel=ddp", "device=cpu", f"cluster.ranks_per_node={ranks}")
    started = time.time()
    return float(rank.on_ranks(run, _joined)) - started


def _joined(_: object) -> float:
    """In a rank: when the last one was there."""
    import torch.distributed as dist

    from ptdbench.launch.collect import gather

    dist.barrier()
    return max(gather(time.time()))


def _torchrun(ranks: int) -> float:
    with TemporaryDirectory() as directory:
        script = Path(directory, "empty.py")
        script.write_text(EMPTY_SCRIPT)
        started = time.time()
        environ = {**TORCHRUN_THREADS, **os.environ}
        seconds_of([*TORCHRUN, f"--nproc_per_node={ranks}", str(script), directory], env=environ)
        return max(float(Path(directory, str(rank)).read_text()) for rank in range(ranks)) - started


def _sweep_seconds(runs: int) -> float:
    toy = ("model=toy", "parallel=ddp", "device=cpu", "cluster.ranks_per_node=2", "train.steps=2", "profile.steps=0")
    with TemporaryDirectory() as directory:
        command = [*TRAIN, "-m", *toy, f"seed=range(0,{runs})", f"hydra.sweep.dir={directory}/sweep"]
        return seconds_of(command, stderr=subprocess.DEVNULL)  # its progress
