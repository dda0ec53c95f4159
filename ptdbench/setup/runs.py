"""The runs of a command line, in the order of execution, with all that is read of Hydra's own configuration."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from ptdbench.launch.world import World
from ptdbench.problems import ConfigError
from ptdbench.records import store
from ptdbench.records.effects import OF_CHOICE, short_names
from ptdbench.setup.commandline import values
from ptdbench.setup.compose import Composed, without_hydra
from ptdbench.setup.config import Config, Repeat, Slurm
from ptdbench.terminal import plural


@dataclass(frozen=True)
class Shape:
    """The nodes of a SLURM job, and what it uses on each."""

    nodes: int  #: Number of nodes.
    ranks_per_node: int  #: Processes per node.
    gpus_per_node: int  #: GPUs requested per node.
    cpus_per_rank: int | None  #: Cores requested per rank, or ``None`` for the cluster's default.

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def world(self) -> World:
        """The world of the job, as its first rank will see it."""
        return World(0, self.world_size, 0, self.ranks_per_node, "SLURM", nodes=self.nodes)

    def __str__(self) -> str:
        return f"{plural(self.nodes, 'node')} x {plural(self.ranks_per_node, 'rank')}"


@dataclass(frozen=True)
class Run:
    """A run of a command line, as it was composed; specified or refused once it has been checked."""

    config: Config  #: Its configuration.
    overrides: Sequence[str]  #: The overrides typed for it.
    alternative: int  #: The number of its configuration among those of the command line, which repeats share.
    number: int | None  #: Its number in the sweep; ``None`` for a single run.
    subdirectory: str  #: Its directory below its sweep's; ``.`` for a single run.
    environment: Mapping[str, str]  #: The variables that ``hydra.job.env_set`` gives it.
    composed: Mapping[str, Any]  #: What Hydra composed, unresolved and with its own node: the content of its files.
    block: int | None = None  #: Its block of repeats; ``None`` without repeats.
    shape: Shape | None = None  #: The shape of its job; ``None`` if it runs on this machine.
    #: The record's fields from its specification; ``None`` if it has not been specified, or is refused.
    summary: Mapping[str, Any] | None = None
    refused: ConfigError | None = None  #: Why it cannot run; it then becomes a row of the table, but no job.

    @property
    def cluster(self) -> Slurm:
        """The cluster's options; only for a run that is submitted."""
        cluster = self.config.cluster
        assert isinstance(cluster, Slurm)
        return cluster


def of(composed: Composed, repeats: bool = True) -> list[Run]:
    """Return the runs of a command line; for a search, the possible runs that stand for its own.

    Without ``repeats``, each configuration is one run.
    """
    if not composed.is_sweep:
        return [_read(composed, composed.wholes[0], composed.configs[0], composed.typed, 0)]
    count = len(composed.wholes)
    ordered = order(count, composed.configs[0].repeat) if repeats else [(place, None) for place in range(count)]
    parts = [*zip(composed.wholes, composed.configs, composed.overrides, strict=True)]
    return [_read(composed, *parts[place], place, number, block) for number, (place, block) in enumerate(ordered)]


def of_search(composed: Composed, whole: DictConfig, overrides: Sequence[str], number: int) -> Run:
    """Return the run that a sweeper has just chosen, of a configuration with Hydra's own node."""
    return _read(composed, whole, without_hydra(whole), overrides, number, number)


def _read(
    line: Composed,
    whole: DictConfig,
    config: Config,
    overrides: Sequence[str],
    alternative: int,
    number: int | None = None,
    block: int | None = None,
) -> Run:
    job = numbered(whole, number, block)
    composed: Any = OmegaConf.to_container(job, resolve=False, enum_to_str=True)
    place = "." if number is None else str(Path(job.hydra.sweep.subdir))
    return Run(
        config=config if block is None else config.changed({"repeat.block": block}),
        overrides=[*overrides, *([] if block is None else [f"repeat.block={block}"])],
        alternative=alternative,
        number=number,
        subdirectory=place.replace("{swept}", _values_in_name(line.swept, values(overrides))),
        environment={str(name): str(value) for name, value in job.hydra.job.env_set.items()},
        composed=composed,
        block=block,
    )


def _values_in_name(swept: Collection[str], typed: Mapping[str, str]) -> str:
    """Return a run's values of the swept options for its directory's name: ``_lr-0.001``."""
    names = short_names(swept)
    of_label = ("model", "parallel", "workload", *(name for name in swept if name.endswith(OF_CHOICE)))
    chosen = {names[name]: typed[name].strip("'\"") for name in swept if name in typed and name not in of_label}
    return store.file_name("".join(f"_{name}={value}" for name, value in chosen.items()))


def numbered(whole: DictConfig, number: int | None, block: int | None = None) -> DictConfig:
    """Return a run's configuration with Hydra's own node, as Hydra would have it when it starts this run of a sweep.

    A single run has no number and no block of repeats.
    """
    job = copy.deepcopy(whole)
    with read_write(job), open_dict(job):
        if block is not None:  # as if it were one more override
            job.repeat.block = block
            job.hydra.overrides.task.append(f"repeat.block={block}")
        if number is not None:
            job.hydra.job.id = job.hydra.job.num = number
    return job


def order(alternatives: int, repeat: Repeat) -> list[tuple[int, int | None]]:
    """Return the alternative and the block of each run of a sweep, in order of execution.

    Every block has each alternative once. The order within a block is random, and every second block reverses the one
    before it (ABBA), so that a machine that gets steadily slower slows all alternatives alike. With ``repeat.block``,
    only the runs of that block are returned. The block is ``None`` if the runs' options need not be changed.
    """
    if repeat.runs == 1:
        return [(number, None) for number in range(alternatives)]
    runs: list[tuple[int, int | None]] = []
    for block in range(blocks(repeat)) if repeat.block is None else [repeat.block]:
        numbers = list(range(alternatives))
        random.Random(f"{repeat.seed} {block // 2}").shuffle(numbers)
        changed = block if repeat.block is None else None
        runs += [(number, changed) for number in (numbers if block % 2 == 0 else numbers[::-1])]
    return runs


def blocks(repeat: Repeat) -> int:
    """Return the largest number of blocks of repeats."""
    return repeat.max if repeat.runs == "auto" else repeat.runs
