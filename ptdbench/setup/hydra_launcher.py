"""Whether Hydra's launcher and the group ``cluster`` ask for the same."""

from __future__ import annotations

from ptdbench.launch.world import World
from ptdbench.problems import Problem, require
from ptdbench.setup.commandline import LAUNCHER
from ptdbench.setup.compose import Composed
from ptdbench.setup.config import Cluster, Slurm
from ptdbench.terminal import command

#: Options of the launcher that say nothing of resources, and what they are where nobody gives them.
OPTIONS = {"array_parallelism": 256, "signal_delay_s": 120}


def check(composed: Composed, cluster: Cluster, world: World | None) -> None:
    """Refuse a launcher that would not do what the cluster says, or would start launchers from ranks."""
    launcher = str(composed.first.hydra.runtime.choices.get(LAUNCHER))
    submits = isinstance(cluster, Slurm)
    if submits != (launcher == "submitit_slurm"):
        rule = f"does not go with cluster={cluster.name}"
        remedy = "omit it" if submits else "try cluster=slurm, or basic or submitit_local for this machine"
        require(Problem(LAUNCHER, launcher, rule, remedy))
    if submits and not composed.is_sweep:
        require(Problem("hydra.mode", "RUN", f"cluster={cluster.name} submits jobs, which is a sweep", "omit it"))
    if world and launcher.startswith("submitit"):
        rule = (
            f"this is rank {world.rank} of {world.size} that {world.launcher} started; each would submit the jobs again"
        )
        remedy = "start it with plain python, or omit cluster and launcher to run on these ranks"
        name, value = ("cluster", cluster.name) if submits else (LAUNCHER, launcher)
        require(Problem(name, value, rule, remedy))
    if submits:
        require(*_given_twice(composed))


def _given_twice(composed: Composed) -> list[Problem]:
    """Resources are given in one place, the group ``cluster``."""
    rule = "the resources of a job are given in the group cluster only"
    remedy = f"see {command()} cluster=slurm --cfg job --package cluster"
    typed = dict(override.partition("=")[::2] for override in composed.first.hydra.overrides.hydra)
    passed_on = {f"hydra.launcher.{option}" for option in OPTIONS}
    names = [name for name in typed if name.startswith("hydra.launcher.") and name not in passed_on]
    return [Problem(name, typed[name], rule, remedy) for name in names]
