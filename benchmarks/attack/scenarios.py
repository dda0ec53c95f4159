"""Attacked commands, and their runs without an attack."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

#: A command that is not hit may take so many times the time of its reference, and so many seconds more.
PATIENCE = (3, 60)


@dataclass(frozen=True)
class Scenario:
    """An attacked command, of ``scenarios.yaml``."""

    name: str  #: In the table.
    overrides: tuple[str, ...]  #: The command line.
    moments: tuple[str, ...]  #: Of kills, other than the first birth.
    runs: int = 0  #: Of a sweep; 0 for a single run.
    resumes: bool = False  #: Whether the command is resumed.

    @property
    def is_sweep(self) -> bool:
        """Whether it is a sweep."""
        return self.runs > 0

    def command(self, tree: Path, directory: str | None = None) -> list[str]:
        """Return the command line, with a directory of the product's choice by default."""
        option = "hydra.sweep.dir" if self.is_sweep else "hydra.run.dir"
        place = [f"{option}={directory}"] if directory else []
        return [sys.executable, str(tree / "train.py"), *["-m"] * self.is_sweep, *self.overrides, *place]

    def resume(self, tree: Path, directory: Path) -> list[str]:
        """Return the command line that resumes it."""
        words = ["-m", f"sweep.resume={directory}"] if self.is_sweep else [f"resume={directory}"]
        return [sys.executable, str(tree / "train.py"), *words]


SCENARIOS = {
    name: Scenario(
        name, **{**entry, "overrides": tuple(entry["overrides"].split()), "moments": tuple(entry["moments"])}
    )
    for name, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}

#: The order of rounds; those with a resume find the most faults, and cost twice as much.
TURNS = ("run", "sweep", "checkpoints", "run", "data workers", "checkpoints", "sweep", "run", "sweep, checkpoints")


def of_round(number: int) -> Scenario:
    """Return the scenario of a round on this machine."""
    return SCENARIOS[TURNS[number % len(TURNS)]]


@dataclass(frozen=True)
class Reference:
    """The command of a scenario without an attack."""

    birth: float  #: Seconds from its start to the first rank.
    seconds: float  #: And to its end.
    losses: Mapping[str, Sequence[float]]  #: Of each run, by the name of its directory; ``""`` for a single one.

    @property
    def patience(self) -> float:
        """The seconds that a command may take if it is not hit."""
        return PATIENCE[0] * self.seconds + PATIENCE[1]
