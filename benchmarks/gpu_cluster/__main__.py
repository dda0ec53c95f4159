"""Layouts, links and failures under every available launcher, on two or more GPUs of one node or several.

    make gpu-cluster PYTHON=.venv/bin/python              # on one node
    salloc -N2 --gpus-per-node=8 make gpu-cluster ...     # in an allocation: srun and mpirun use all of its nodes
    python -m benchmarks.gpu_cluster --device cpu         # tries the script itself, on two ranks over gloo

Under each launcher (local ranks, torchrun, srun in an allocation, mpirun) it runs the command lines of a user: layouts,
whose losses must follow ``single`` within 1e-4 in fp32, with SGD, as Adam would hide gradients of the wrong scale;
``p2p`` and ``collectives``; and a model that is killed, stopped (SIGSTOP) or raises in one rank: after 40 s no process
of the run is left on any node, and its record says why. Exit status 0: all checks passed; 1: one failed; 2: fewer than
two GPUs.
"""

import sys
from dataclasses import replace

import torch

from benchmarks.gpu_check.session import Session
from benchmarks.script import ROOT, options

from .checks import FAULTS, LAUNCHERS, LAYOUTS, WORKLOADS, fault, launchers, layouts, workload


def main() -> int:
    """Run all checks and print them."""
    args = options(
        __doc__,
        device=("cuda", "of the ranks", ["cuda", "cpu"]),
        ranks=(int, "of a node; by default one a GPU, two on a CPU"),
        model=("gpt_small", "a choice of conf/model"),
        batch=(16, "samples of a step for each rank"),
        launchers=(LAUNCHERS, "of the ranks", LAUNCHERS),
        layouts=((), "each the overrides of a run, in quotes: 'parallel=fsdp parallel.context=2'; by default all"),
        workloads=(WORKLOADS, "that measure links", WORKLOADS),
        faults=(FAULTS, "of a rank", FAULTS),
        outputs=(ROOT / "outputs", "folder of the runs"),
    )
    gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    if gpus < 2:
        print(f"gpu-cluster needs two GPUs or more on a node, and torch finds {gpus} here", file=sys.stderr)
        return 2
    session = Session.begin(args.device, args.outputs)
    typed = [(2, words) for words in args.layouts]
    for launcher in launchers(args.launchers, args.ranks or gpus):
        print(f"{launcher.name}: {launcher.ranks} ranks on {launcher.nodes} nodes", flush=True)
        under = replace(session, launcher=launcher.prefix)
        layouts(under, launcher, typed or LAYOUTS, args.model, args.batch)
        for name in args.workloads:
            workload(under, launcher, name)
        for how in args.faults:
            fault(under, launcher, how)
    failed = [check["name"] for check in session.checks if not check["passed"]]
    print(f"records in {session.directory}")
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all checks passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
