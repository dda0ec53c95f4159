"""What runs cost beside their steps: how long ranks take to exist, against ``torchrun``, and a run of a sweep in all.

    python benchmarks/launch_time.py
    python benchmarks/launch_time.py --ranks 4 --runs 20 --sweep 200

The run is empty: its ranks join a gloo process group, pass one barrier and report when they did. Under ptdbench the
time goes from "run ready" (it is specified, nothing started) to the last rank's report, through the functions that
``train.py`` uses; it is told for the first run of a sweep, which still waits for the fork server's imports, and for
the following ones. ``torchrun`` starts an equally empty script, which imports torch and no ptdbench; its time goes from
the command. The following runs and ``torchrun`` take turns, so that what disturbs the machine disturbs both.

The sweep is ``python train.py -m`` with runs of two steps of a small model on two CPU ranks, of which next to nothing
are the steps. Its time beyond that of a sweep of one such run is what the other runs cost: composing and checking
their configurations, starting and ending their ranks, records, curves, results. They are not profiled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.script import ROOT, judged, parser_of, spread
from ptdbench.launch import local
from ptdbench.launch.world import discover

#: A following run may take this share of torchrun's time.
LIMIT = 1 / 5

#: A run of a sweep may take so many seconds, its two steps included.
RUN_LIMIT = 0.5

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
    options = _parse()
    local.warm_up(MODULES)  # as train.py does, which then reads and checks the configuration
    import ptdbench.run  # noqa: F401 - the rest of what train.py imports before it has specified a run

    first = _ours(options.ranks)
    turns = [(_ours(options.ranks), _torchrun(options.ranks)) for _ in range(options.runs)]
    following, torchrun = zip(*turns, strict=True)
    ratio = statistics.median(following) / statistics.median(torchrun)
    print(f'seconds from "run ready" to "all {options.ranks} ranks in the process group" (gloo, CPU)')
    print(f"  first run       {first:.3f}")
    print(f"  following runs  {spread(following)}")
    print(f"  torchrun        {spread(torchrun)}")
    are_fast = judged(f"following / torchrun: {ratio:.3f}", f"at most {LIMIT:.3f}", ratio <= LIMIT)
    first, many = _sweep_seconds(1), _sweep_seconds(options.sweep)
    following_run = (many - first) / (options.sweep - 1)
    print(f"seconds of a run of two steps of toy, of {options.sweep} in a sweep (2 ranks, CPU)")
    print(f"  first run       {first:.3f}, imports included")
    are_short = judged(f"a following run: {following_run:.3f}", f"at most {RUN_LIMIT:.3f}", following_run <= RUN_LIMIT)
    return int(not (are_fast and are_short))


def _sweep_seconds(runs: int) -> float:
    toy = ("model=toy", "parallel=ddp", "device=cpu", "cluster.ranks_per_node=2", "train.steps=2", "profile.steps=0")
    with TemporaryDirectory() as directory:
        sweep = ("-m", *toy, f"seed=range(0,{runs})", f"hydra.sweep.dir={directory}/sweep")
        command = [sys.executable, str(ROOT / "train.py"), *sweep]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.perf_counter() - started


def _ours(ranks: int) -> float:
    with TemporaryDirectory() as directory:
        ready = time.time()
        local.start(_empty_run, ranks, directory)
        return _last_report(directory, ranks) - ready


def _empty_run(environ: Mapping[str, str], directory: str) -> None:
    """What a rank of :mod:`ptdbench.run` does until it is in the process group."""
    import torch

    from ptdbench.launch import rendezvous

    os.environ.update({name: value for name, value in environ.items() if name not in os.environ})
    world = discover(os.environ)
    assert world is not None  # local.start has just said who this is
    with rendezvous.process_group(world, "gloo", torch.device("cpu"), key=directory):
        torch.distributed.barrier()
        Path(directory, str(world.rank)).write_text(repr(time.time()))


def _torchrun(ranks: int) -> float:
    with TemporaryDirectory() as directory:
        script = Path(directory, "empty.py")
        script.write_text(EMPTY_SCRIPT)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        # Set, because torchrun would print a warning that it sets it.
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        started = time.time()
        subprocess.run([*launcher, str(script), directory], check=True, env=environ)
        return _last_report(directory, ranks) - started


def _last_report(directory: str, ranks: int) -> float:
    """When the last rank was in, in seconds since the epoch: the ranks' clock and this process's are one."""
    return max(float(Path(directory, str(rank)).read_text()) for rank in range(ranks))


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=10, help="turns of both, after the first (default: %(default)s)")
    parser.add_argument("--sweep", type=int, default=50, help="runs of the sweep, 2 or more (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
