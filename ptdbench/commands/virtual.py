"""``ptdbench virtual GPU[xN] -- COMMAND``: any program on GPUs that are not there; without arguments, lists the GPUs.

The program and all processes that it starts, with any launcher, see N virtual GPUs. A table then shows what each
process ran on them. Nothing is computed: losses are zeros.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ptdbench.problems import ConfigError, Problem, at_least, require
from ptdbench.terminal import echo, width

if TYPE_CHECKING:
    from ptdbench.run.program import Request

HELP = "start any program on GPUs that are not there: does it fit, what does it send, and how long is a step"

#: What follows ``--`` is a program with its arguments.
TAKES_PROGRAM = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``virtual``."""
    parser.add_argument("gpu", nargs="?", metavar="GPU[xN]", help="such as h100, h100x8, or a YAML file of your own")
    about = "of each GPU, such as 20GiB; more than it has, such as 1TiB, reveals how much the program needs"
    parser.add_argument("--memory", metavar="SIZE", help=about)
    words = "start the program once for each rank of N nodes, as torchrun would"
    parser.add_argument("--nodes", type=int, metavar="N", help=words)
    parser.add_argument("--ranks", metavar="A,B", help="run only these ranks; the others are absent")
    parser.add_argument("--steps", type=int, metavar="N", help="end the program after N steps, which is a success")
    parser.add_argument("--stacks", action="store_true", help="show the largest tensors at the peak, and their stacks")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; the program's output goes to stderr"
    )
    parser.epilog = "The exit status is the program's, 128 + n for signal n; 0 if --steps ended it."


def main(arguments: argparse.Namespace) -> int:
    """Run the program and show its table, or list the GPUs."""
    if arguments.gpu is None:
        return _list(arguments.program)
    from ptdbench import files
    from ptdbench.report import virtual
    from ptdbench.run import program

    run, status = program.execute(_request(arguments), sys.stderr.fileno() if arguments.json else None)
    if arguments.json:
        echo(files.as_text(run.written))
        return status
    lines = [virtual.of_program(run, width()), *virtual.largest(Path(run.directory))]
    echo("\n".join(["", *lines]), sys.stderr if status else None)
    return status


def _request(arguments: argparse.Namespace) -> Request:
    """Return what was asked for; raises ConfigError for what cannot be."""
    from ptdbench.run import program
    from ptdbench.setup import choices
    from ptdbench.units import size_of
    from ptdbench.virtual.machine import MOST_GPUS

    name, count = re.fullmatch(r"(.+?)(?:x(\d+))?", arguments.gpu).groups()  # type: ignore[union-attr]
    number, memory, counts = int(count or 1), None, {"--steps": arguments.steps, "--nodes": arguments.nodes}
    if not 1 <= number <= MOST_GPUS:
        require(Problem("GPU", arguments.gpu, f"torch is compiled for 1 to {MOST_GPUS} GPUs of a node"))
    if not arguments.program:
        require(Problem("COMMAND", "(none)", "there is no program", f"try {arguments.gpu} -- python train.py"))
    require(*at_least(1, **{option: value for option, value in counts.items() if value is not None}))
    try:
        memory = size_of(arguments.memory) if arguments.memory else None
    except ValueError:
        raise ConfigError([Problem("--memory", arguments.memory, "must be a size", "try 20GiB")]) from None
    gpu = choices.gpu(name)
    if memory is not None and memory <= gpu.context:
        require(Problem("--memory", arguments.memory, f"the CUDA context takes {gpu.context} bytes of it"))
    nodes = arguments.nodes or (1 if arguments.ranks else None)
    ranks = _ranks(arguments.ranks, (nodes or 1) * number) if arguments.ranks else None
    if nodes and any(Path(word).name in _LAUNCHERS for word in arguments.program[:3:2]):  # python -m LAUNCHER
        rule = "--nodes and --ranks start each rank by themselves"
        require(Problem("COMMAND", arguments.program[0], rule, "give the program that it would start"))
    options = {"steps": arguments.steps, "stacks": arguments.stacks}
    return program.Request(arguments.program, name, gpu, number, memory, nodes, ranks, **options)


#: Programs that start ranks.
_LAUNCHERS = (
    *("torchrun", "accelerate", "deepspeed", "mpirun", "srun"),
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
)


def _ranks(text: str, size: int) -> list[int]:
    """Return the ranks in a text, in ascending order; raises ConfigError for those that ``size`` ranks do not have."""
    words = text.split(",")
    ranks = sorted({int(word) for word in words if word.isdecimal()})
    if len(ranks) < len(words) or ranks[-1] >= size:
        require(Problem("--ranks", text, f"must be different ranks from 0 to {size - 1}", "try 0"))
    return ranks


def _list(program: Sequence[str]) -> int:
    from ptdbench.report.text import drawn
    from ptdbench.setup import choices
    from ptdbench.units import memory_text

    names = choices.gpu_names()
    if program:
        require(Problem("GPU", "(none)", "there is no GPU for the program", f"try one of {', '.join(names)}"))
    rows = [(name, gpu.name, memory_text(gpu.memory), gpu.source) for name, gpu in ((n, choices.gpu(n)) for n in names)]
    words = ["GPU", "as torch names it", "memory", "sources"]
    echo(drawn(words, rows, width(), words=words))
    echo("memory: as torch reports it, in a device's properties or when memory runs out; conf/virtual has each figure")
    return 0
