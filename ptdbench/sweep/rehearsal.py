"""Before anything is submitted: would SLURM take the jobs of a sweep, and when would they start."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ptdbench.launch import resources, slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.problems import Problem, require
from ptdbench.sweep.requests import Request
from ptdbench.terminal import say


def show(runs: Sequence[Request]) -> int:
    """What ``cluster.submit=test`` prints; nothing is submitted and nothing written.

    Returns:
        The exit status: 0 if every job would be taken.
    """
    refused = 0
    for run in runs:
        if run.refused:
            say(f"{run.label}: {run.refused}", sys.stderr)
            refused += 1
    for request, count in _shapes(runs):
        what = f"{request.shape} ({count} job{'s' * (count != 1)})"
        try:
            say(f"{what}: {_ask(request)}")
        except SlurmError as error:
            say(f"{what}: SLURM would refuse it: {error}", sys.stderr)
            refused += count
    return int(refused > 0)


def require_accepted(runs: Sequence[Request]) -> None:
    """Raise a ConfigError with SLURM's words for every shape that it would refuse."""
    found = []
    for request, _ in _shapes(runs):
        try:
            _ask(request)
        except SlurmError as error:
            rule = f"nothing was submitted, because SLURM refuses {request.shape}: {error}"
            found.append(Problem("cluster", request.cluster.name, rule))
    require(*found)


def _ask(request: Request) -> str:
    assert request.shape is not None
    return slurm.test(resources.flags(request.cluster, request.shape, "ptdbench"))


def _shapes(runs: Sequence[Request]) -> list[tuple[Request, int]]:
    """One run of each shape, and how many there are."""
    alike: dict[str, list[Request]] = {}
    for run in runs:
        if not run.refused:
            assert run.shape is not None
            alike.setdefault(repr(resources.flags(run.cluster, run.shape, "")), []).append(run)
    return [(same[0], len(same)) for same in alike.values()]
