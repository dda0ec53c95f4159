"""What is attacked: commands, and how they go undisturbed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: A command that is not hurt may take this many times what it took undisturbed, and this many seconds more.
PATIENCE = (3, 60)


@dataclass(frozen=True)
class Scenario:
    """What is attacked."""

    name: str  #: In the table.
    overrides: tuple[str, ...]  #: The command line.
    moments: tuple[str, ...]  #: When processes are killed, where it is not at the first birth.
    runs: int = 0  #: Of a sweep; 0 for a single run.
    resumes: bool = False  #: Whether the command is resumed.

    def command(self, tree: Path, directory: str | None = None) -> list[str]:
        """What a person would type; in a directory of the product's choice where none is named."""
        option = "hydra.sweep.dir" if self.runs else "hydra.run.dir"
        place = [f"{option}={directory}"] if directory else []
        return [*train(tree), *(["-m"] if self.runs else []), *self.overrides, *place]

    def resume(self, tree: Path, directory: Path) -> list[str]:
        """What a person would type to go on."""
        return [*train(tree), *(["-m", f"sweep.resume={directory}"] if self.runs else [f"resume={directory}"])]


_TOY = ("model=toy", "device=cpu", "cluster.ranks_per_node=2", "train.global_batch=8", "train.max_minutes=null")
_FED = ("data=synthetic_vectors", "data._target_=benchmarks.attack.fed.Fed")
_SAVES = ("checkpoint.every_steps=5", "checkpoint.keep=2")

SCENARIOS = (
    Scenario("run", (*_TOY, "parallel=ddp", "train.steps=200"), ("start", "run", "run", "end")),
    Scenario("data workers", (*_TOY, *_FED, "parallel=ddp", "train.steps=200"), ("run", "end")),
    Scenario(
        "sweep", (*_TOY, "parallel=ddp,fsdp,pdp", "train.steps=20"), ("start", "run", "end", "end"),
        runs=3, resumes=True,
    ),
    Scenario(
        "checkpoints", (*_TOY, *_SAVES, "parallel=ddp", "train.steps=60"), ("start", "run", "save", "save", "end"),
        resumes=True,
    ),
    Scenario(
        "sweep, checkpoints", (*_TOY, *_SAVES, "parallel=ddp,fsdp", "train.steps=40"), ("run", "save", "end"),
        runs=2, resumes=True,
    ),
)  # fmt: skip

#: The order in which rounds take them: what is resumed costs twice as much, and is what most can go wrong with.
TURNS = ("run", "sweep", "checkpoints", "run", "data workers", "checkpoints", "sweep", "run", "sweep, checkpoints")


def of_round(number: int) -> Scenario:
    """The scenario of a round on this machine."""
    return next(one for one in SCENARIOS if one.name == TURNS[number % len(TURNS)])


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


def train(tree: Path) -> list[str]:
    """The words that begin every command."""
    return [sys.executable, str(tree / "train.py")]
