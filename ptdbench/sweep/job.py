"""What a job of SLURM, or of submitit on this machine, runs: the run of one directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ptdbench import terminal
from ptdbench.launch import leaving, local
from ptdbench.sweep.agenda import Opened


def carry_out(directory: str, environment: Mapping[str, str | None]) -> None:
    """Carry out the run of a directory, in every task of the job.

    Args:
        directory: The run's directory.
        environment: Variables that the run must see; ``None`` for one that it must not.

    Raises:
        SystemExit: The run failed here.
    """
    from ptdbench.run import run

    for name, value in environment.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    local.stop_on_signals()  # submitit's own handlers ignore SIGTERM, and requeue without being asked
    try:
        run(Path(directory))
    finally:
        leaving.soon()


def arguments(sweep: Path, opened: Opened, **environment: str | None) -> tuple[str, dict[str, str | None]]:
    """What :func:`carry_out` is called with in the job of a run; ``environment``: variables beside the run's own."""
    typed = terminal.as_variable(sys.argv)  # what the job says of how to go on names the same program
    return str(sweep / opened.subdirectory), {**typed, **opened.request.environment, **environment}
