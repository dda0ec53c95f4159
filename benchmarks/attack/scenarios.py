"""What is attacked: commands, and how they go undisturbed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

#: A command that is not hurt may take this many times what it took undisturbed, and this many seconds more.
PATIENCE = (3, 60)


@dataclass(frozen=True)
class Scenario:
    """What is attacked, of ``scenarios.yaml``."""

    name: str  #: In the table.
    overrides: tuple[str, ...]  #: The command line.
    moments: tuple[str, ...]  #: When processes are killed, where it is not at the first birth.
    runs: int = 0  #: Of a sweep; 0 for a single run.
    resumes: bool = False  #: Whether the command is resumed.

    @property
    def is_sweep(self) -> bool:
        """Whether it is a sweep."""
        return self.runs > 0

    def command(self, tree: Path, directory: str | None = None) -> list[str]:
        """What a person would type; in a directory of the product's choice where none is named."""
        option = "hydra.sweep.dir" if self.is_sweep else "hydra.run.dir"
        place = [f"{option}={directory}"] if directory else []
        return [sys.executable, str(tree / "train.py"), *["-m"] * self.is_sweep, *self.overrides, *place]

    def resume(self, tree: Path, directory: Path) -> list[str]:
        """What a person would type to go on."""
        words = ["-m", f"sweep.resume={directory}"] if self.is_sweep else [f"resume={directory}"]
        return [sys.executable, str(tree / "train.py"), *words]


SCENARIOS = {
    name: Scenario(
        name, **{**entry, "overrides": tuple(entry["overrides"].split()), "moments": tuple(entry["moments"])}
    )
    for name, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}

#: The order in which rounds take them: what is resumed costs twice as much, and is what most can go wrong with.
TURNS = ("run", "sweep", "checkpoints", "run", "data workers", "checkpoints", "sweep", "run", "sweep, checkpoints")


def of_round(number: int) -> Scenario:
    """The scenario of a round on this machine."""
    return SCENARIOS[TURNS[number % len(TURNS)]]


@dataclass(frozen=True)
class Reference:
    """The command of a scenario, undisturbed."""

    birth: float  #: Seconds from its start to the first rank.
    seconds: float  #: And to its end.
    losses: Mapping[str, Sequence[float]]  #: Of each run, by the name of its directory; ``""`` for a single one.

    @property
    def patience(self) -> float:
        """How long one that was not hurt may take, in seconds."""
        return PATIENCE[0] * self.seconds + PATIENCE[1]
