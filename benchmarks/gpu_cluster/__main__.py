"""Two or more GPUs, on one node or several: every layout, the links, and failures under every launcher that is here.

    make gpu-cluster PYTHON=.venv/bin/python              # on one node
    salloc -N2 --gpus-per-node=8 make gpu-cluster ...     # in an allocation: srun and mpirun use all of its nodes
    python -m benchmarks.gpu_cluster --device cpu         # tries the script itself, on two ranks over gloo

Under each launcher (local ranks, torchrun, srun in an allocation, mpirun) the same command lines are typed as a person
would. Sweeps over layouts, whose losses must follow those of ``single`` within 1e-4 in fp32, with SGD, as Adam
would hide gradients of the wrong scale; what computes something else by design is held against the same ranks of a CPU;
``p2p`` and ``collectives``; and a model that is killed, stopped (SIGSTOP) or raises in one rank: 40 s later none of the
run's processes is left on any node, and its record says why. Exit status 0: all checks passed; 1: one failed; 2: fewer
than two GPUs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.script import ROOT, parser_of

from .checks import FAULTS, LAYOUTS, WORKLOADS, Checks, Layouts
from .launchers import LAUNCHERS, launchers


def main() -> int:
    """Carry out all checks and print what came out."""
    options = _parse()
    gpus = torch.cuda.device_count() if options.device == "cuda" else 2
    if gpus < 2:
        print(f"gpu-cluster needs two GPUs or more on a node, and torch finds {gpus} here", file=sys.stderr)
        return 2
    folder = options.outputs / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_gpu-cluster"
    folder.mkdir(parents=True)
    checks = Checks(options.device, options.model, options.batch, folder)
    own = [Layouts(tuple(typed.split())) for typed in options.layouts]
    for launcher in launchers(options.launchers, options.ranks or gpus):
        nodes = f"{launcher.nodes} node{'s' * (launcher.nodes > 1)}"
        print(f"{launcher.name}: {launcher.ranks} ranks on {nodes}", flush=True)
        checks.layouts(launcher, own or LAYOUTS)
        for workload in options.workloads:
            checks.workload(launcher, workload)
        for fault in options.faults:
            checks.fault(launcher, fault)
    print(f"records in {folder}")
    print(f"{len(checks.failed)} failed: {', '.join(checks.failed)}" if checks.failed else "all checks passed")
    return int(bool(checks.failed))


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, help="of a node (default: one a GPU; two on a CPU)")
    parser.add_argument("--model", default="gpt_small", help="a choice of conf/model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step for each rank (default: %(default)s)")
    parser.add_argument("--launchers", nargs="*", choices=LAUNCHERS, default=LAUNCHERS, help="default: all")
    parser.add_argument(
        "--layouts", nargs="*", default=(), metavar="OVERRIDES",
        help="each the overrides of a sweep, in quotes: 'parallel=ddp,fsdp parallel.context=2' (default: all)",
    )  # fmt: skip
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=WORKLOADS, help="default: all")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS, help="default: all")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
