"""Before anything is submitted: would SLURM take the jobs of a sweep, and when would they start."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptdbench.launch import slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.problems import Problem, require
from ptdbench.sweep import submission
from ptdbench.sweep.requests import Request
from ptdbench.terminal import plural, say


def show(runs: Sequence[Request], options: Mapping[str, Any]) -> int:
    """What ``cluster.submit=test`` prints; nothing is submitted and nothing written.

    Args:
        runs: The runs of a command line.
        options: The launcher's own options; see :data:`ptdbench.setup.hydra_options.OPTIONS`.

    Returns:
        The exit status: 0 if every job would be taken.
    """
    refused = 0
    for run in runs:
        if run.refused:
            say(f"{run.label}: {run.refused}", sys.stderr)
            refused += 1
    for array in _arrays(runs):
        jobs, runs_of_job = len(array), len(array[0])
        each = f" of {plural(runs_of_job, 'run')}" if runs_of_job > 1 else ""
        what = f"{array[0][0].shape} ({plural(jobs, 'job')}{each})"
        try:
            say(f"{what}: {_ask(array, options)}")
        except SlurmError as error:
            say(f"{what}: SLURM would refuse it: {error}", sys.stderr)
            refused += jobs
    return int(refused > 0)


def require_accepted(runs: Sequence[Request], options: Mapping[str, Any]) -> None:
    """Raise a ConfigError with SLURM's words for every array that it would refuse."""
    found = []
    for array in _arrays(runs):
        try:
            _ask(array, options)
        except SlurmError as error:
            first, *_ = array[0]
            count = f" ({len(array)} jobs)" if len(array) > 1 else ""
            rule = f"nothing was submitted, because SLURM refuses {first.shape}{count}: {error}"
            found.append(Problem("cluster", first.cluster.name, rule))
    require(*found)


def _ask(array: Sequence[Sequence[Request]], options: Mapping[str, Any]) -> str:
    return slurm.test(submission.script(array, "ptdbench", Path(), options))


def _arrays(runs: Sequence[Request]) -> list[list[list[Request]]]:
    return [[[runs[place] for place in job] for job in array] for array in submission.arrays(runs)]
