"""Exclusive write access to a run's directory: one start of the run at a time.

The record names the process that opened it. While it is open, and that process or its job is alive, no other may open
it: two jobs of one run would overwrite each other's checkpoints.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ptdbench.launch import slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import record, store
from ptdbench.records.owner import locked, slurm_job
from ptdbench.records.schema import Written
from ptdbench.terminal import say


def open_record(directory: Path, draft: Written) -> Written:
    """Write the first record of a start of a run; results of an earlier start are kept in it.

    Args:
        directory: The run's directory, which exists.
        draft: The result of :func:`ptdbench.records.record.begin`.

    Returns:
        The record written.

    Raises:
        ConfigError: An earlier start is still running.
        OSError: The record cannot be written.
    """
    with locked(directory):
        if earlier := store.earlier_record(directory):
            _require_ended(directory, earlier, draft.get("owner"))
            draft = record.going_on(draft, earlier)
        store.write_record(directory, draft)
    return draft


def _require_ended(directory: Path, earlier: Written, mine: Mapping[str, Any] | None) -> None:
    owner = earlier.get("owner")
    if not owner or not record.is_open(earlier) or (mine and owner["launch"] == mine["launch"]):
        return
    who = f"job {owner['job']}" if owner["job"] else f"process {owner['pid']} on {owner['host']}"
    goes_on = _goes_on(owner)
    if goes_on:
        rule = f"{who} is writing its results there"
        raise ConfigError([Problem("directory", directory, rule, "wait for it, or end it")])
    if goes_on is None:
        say(f"{directory}: was opened by {who}; whether that has ended cannot be determined from here", sys.stderr)


def _goes_on(owner: Mapping[str, Any]) -> bool | None:
    """Whether the owner of an open record is alive; ``None`` if that cannot be determined from here."""
    if owner["job"]:
        if owner["job"] == slurm_job(os.environ):  # an earlier start of this same job, which was restarted
            return False
        try:
            state = slurm.queue([owner["job"]]).get(owner["job"])
        except SlurmError:
            return None
        return state is not None and state.state in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")
    if owner["host"] != socket.gethostname():
        return None
    with suppress(psutil.Error):
        return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) < 1.0
    return False
