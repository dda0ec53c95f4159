"""Reopens a run whose record exists already, after checking it on the machine that will execute it."""

import sys
from pathlib import Path

from ptdbench.launch import settings
from ptdbench.launch.world import World
from ptdbench.planning.tries import with_found_micro_batch
from ptdbench.problems import ConfigError
from ptdbench.records import failure, ownership, record, store
from ptdbench.setup import run_spec
from ptdbench.setup.config import of_record
from ptdbench.terminal import echo


def reopen(directory: Path, world: World | None) -> bool:
    """Open the record of a directory's run again, with the summary of its specification for these ranks.

    A run that waits for its first start by as many ranks, such as the job of a sweep, is open as it is.

    Returns:
        Whether it can be executed; if not, its record says why.

    Raises:
        SystemExit: An earlier start is still in progress.
    """
    earlier = store.read_record(directory)
    if world and not earlier.owner and earlier.world_size == world.size:
        return True
    config = of_record(earlier.written)
    variables = earlier.variables or {}
    draft = record.begin(config.resolved, directory, {}) | {"variables": variables}
    refused = None
    try:
        with settings.added(variables):
            draft |= run_spec.summarize(with_found_micro_batch(config, earlier), world)
    except ConfigError as error:
        refused = error
        draft = record.failed(draft, failure.describe(error, rank=-1))
    try:
        ownership.open_record(directory, draft)
    except ConfigError as held:
        echo(str(held), sys.stderr)
        raise SystemExit(1) from None
    return refused is None
