"""The output directory of a command line: claimed by nobody else, and the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ptdbench.launch import slurm
from ptdbench.launch.world import World
from ptdbench.records import ledger, ownership, record, store
from ptdbench.setup import config
from ptdbench.setup.compose import Composed


def claim(composed: Composed, overrides: Sequence[str], world: World | None, goes_on: Path | None) -> Path:
    """Make the output directory, or occupy the one that was typed, or that of what ``goes_on`` in its place.

    Raises:
        ConfigError: It holds results already, or cannot be made.
    """
    option = "hydra.sweep.dir" if composed.is_sweep else "hydra.run.dir"
    hydra = composed.first.hydra
    wish = Path(hydra.sweep.dir if composed.is_sweep else hydra.run.dir)

    def make() -> str:
        if not any(override.startswith(f"{option}=") for override in overrides):
            claimed = store.claim_directory(wish.parent, wish.name, option, fill)
            if composed.is_sweep:
                store.point_latest(claimed)
            return str(claimed)
        store.occupy(wish, option, fill, again=bool(goes_on or slurm.restarts(os.environ)))
        return str(wish)

    def fill(folder: Path, directory: Path) -> None:
        """Write what it is, for whoever finds it after the program was killed."""
        if composed.is_sweep:
            ledger.begin(folder, composed.typed)
            return
        resolved = config.read(composed.jobs[0]).resolved
        ownership.open_record(folder, record.begin(resolved, directory, {}, composed.typed))

    if world is None:
        return Path(make())
    from ptdbench.launch import rendezvous

    return Path(rendezvous.agree("directory", world, make() if world.rank == 0 else None))
