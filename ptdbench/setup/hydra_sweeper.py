"""Hydra's sweepers that choose each run by the results of the earlier ones, such as Optuna's.

The basic sweeper's runs are known when the command line is read. Those of a search are not: two of them stand for all,
with the first and with the last value of everything that is searched, and are checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ptdbench.launch.world import World
from ptdbench.problems import Problem, as_typed, require
from ptdbench.records.objective import DIRECTIONS
from ptdbench.setup.commandline import SWEEPER, option
from ptdbench.setup.compose import Composed
from ptdbench.setup.config import Cluster, Slurm, read


def check(composed: Composed, cluster: Cluster, world: World | None, goes_on: Path | None) -> None:
    """Refuse a search that would lose its way."""
    if not composed.searches:
        return
    name = composed.first.hydra.runtime.choices[SWEEPER]
    found = []
    if world and world.size > 1:
        rule = f"each of the {world.size} ranks that {world.launcher} started would search by itself"
        found.append(Problem(SWEEPER, name, rule, "start it with plain python, here or with cluster=slurm"))
    if isinstance(cluster, Slurm) and cluster.submit == "detach":
        rule = f"{SWEEPER}={name} needs the results of its jobs before it can choose the next ones"
        found.append(Problem("cluster.submit", "detach", rule, "try wait"))
    if read(composed.jobs[0]).sweep.same_nodes:
        rule = f"{SWEEPER}={name} chooses runs by the results of others, and those of one job are chosen at once"
        found.append(Problem("sweep.same_nodes", as_typed(True), rule, "omit it"))
    if goes_on and not _seeds(composed.first.hydra.sweeper):
        rule = f"its values were drawn without a seed, and {name} would draw others now"
        remedy = "start another sweep; one that can go on has hydra.sweeper.sampler.seed"
        found.append(Problem("sweep.resume", goes_on, rule, remedy))
    require(*found)


def overrides(composed: Composed) -> list[str]:
    """What a search needs of its sweeper where nobody typed it: the objective's direction, and failures as results."""
    sweeper = composed.first.hydra.sweeper
    typed = {option(override) for override in composed.first.hydra.overrides.hydra}
    objective = read(composed.jobs[0]).general.objective
    wanted = {"direction": DIRECTIONS[objective], "max_failure_rate": 1.0}
    return [
        f"hydra.sweeper.{name}={value}"
        for name, value in wanted.items()
        if composed.searches and name in sweeper and f"hydra.sweeper.{name}" not in typed
    ]


def _seeds(node: Any) -> list[Any]:
    """The seeds that are given anywhere among a sweeper's options."""

    def values(node: Any) -> Iterator[Any]:
        for key, value in node.items():
            if isinstance(value, dict):
                yield from values(value)
            elif key == "seed" and value is not None:
                yield value

    plain = OmegaConf.to_container(node, resolve=False) if isinstance(node, DictConfig) else node
    return list(values(plain))
