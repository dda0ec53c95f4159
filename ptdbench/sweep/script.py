"""``ptdbench sbatch``: a run as a plain script for sbatch, for whoever wants to see and keep what is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ptdbench.launch import slurm
from ptdbench.launch.slurm import Partition, SlurmError
from ptdbench.planning import micro_batch
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records import store
from ptdbench.setup import commandline, compose, config
from ptdbench.setup.config import Config, Slurm
from ptdbench.sweep import container, requests, resources
from ptdbench.sweep.resources import Shape
from ptdbench.terminal import command


def write(overrides: Sequence[str], config_dir: Path | None = None) -> tuple[str, list[str]]:
    """Return the script, and what the SLURM of this machine would refuse in it: it may be meant for another.

    Overrides are as for ``train.py``; ``cluster`` is ``slurm`` unless it is given. Lists make a sweep that runs in one
    job, one run after the other.

    Raises:
        ConfigError: The overrides cannot be used, or ask for jobs of several shapes.
    """
    chosen = [] if "cluster" in map(commandline.option, overrides) else ["cluster=slurm"]
    extra = str(config_dir.resolve()) if config_dir else None
    composed = compose.compose_all([*overrides, *chosen], True, compose.Source(compose.conf_folder(), extra=extra))
    if composed.searches:
        name = composed.first.hydra.runtime.choices[commandline.SWEEPER]
        rule = "each rank of the script's job would search by itself"
        remedy = f"try {command()} -m cluster=slurm, which submits jobs"
        require(Problem(commandline.SWEEPER, name, rule, remedy))
    for sought in filter(micro_batch.is_sought, map(config.read, composed.jobs)):
        rule = "is found by short runs, each with fresh ranks, and the script of one run starts its ranks once"
        remedy = f"try {command()} cluster=slurm, which submits jobs"
        require(Problem("train.micro_batch", sought.train.micro_batch, rule, remedy))
    cluster = config.read(composed.jobs[0]).cluster
    if not isinstance(cluster, Slurm):
        raise ConfigError([Problem("cluster", cluster.name, "is not a SLURM cluster", "try slurm, or omit it")])
    if cluster.container.image and cluster.container.kind == "oci":
        rule = "srun takes no mounts for such containers, and a script alone has no folder for a bundle with ours"
        require(Problem("cluster.container.kind", "oci", rule, f"try {command()} cluster={cluster.name}"))
    shapes, remarks = _shapes([config.read(job) for job in composed.jobs])
    if len(shapes) != 1:
        rule = "one script has one shape, and these runs have several: " + ", ".join(sorted(map(str, shapes)))
        require(Problem("sbatch", " ".join(overrides), rule, f"write one for each, or {command()} cluster=slurm"))
    shape = shapes.pop()
    sweep = ["-m"] if len(composed.jobs) > 1 else []
    name = "sweep" if sweep else store.file_name(composed.jobs[0].workload.label)
    flags = [*sweep, *(["--config-dir", extra] if extra else [])]
    checkout = compose.conf_folder().with_name("train.py")  # where nothing need be installed
    program = [str(checkout)] if checkout.exists() else ["-m", "ptdbench", "train"]
    words = [sys.executable, *program, *flags, *_overrides(overrides, shape)]
    used = container.folders(config.read(composed.jobs[0]), None)
    step = container.enter(resources.Step(words), cluster.container, shape, used)
    text = resources.script(cluster, shape, f"ptdbench-{name}", [step], resources.Output("ptdbench-%j.log"))
    if own := slurm.ignored_variables(os.environ):
        remarks.append(f"sbatch prefers these variables of this shell to the script's lines: {' '.join(own)}")
    return text, remarks


def _shapes(jobs: Sequence[Config]) -> tuple[set[Shape], list[str]]:
    """The shapes of the runs, and what is doubtful about them."""
    known: Sequence[Partition] = []
    with suppress(SlurmError):
        known = slurm.partitions() if slurm.available() else []
    shapes, remarks = set(), []
    for job in jobs if known else map(_without_question, jobs):
        try:
            shapes.add(requests.shape_of(job, known))
        except ConfigError as doubtful:
            shapes.add(_elsewhere(job, known))
            remarks += [f"not on the SLURM of this machine: {problem}" for problem in doubtful.problems]
    if not known and any(_without_question(job) is not job for job in jobs):
        remarks.append(
            "no SLURM here tells how many GPUs a node has, so the script asks for none; try cluster.gpus_per_node=8"
        )
    return shapes, list(dict.fromkeys(remarks))


def _elsewhere(job: Config, known: Sequence[Partition]) -> Shape:
    """The shape on another cluster than this machine's."""
    try:
        return requests.shape_of(job, known, limits=[])
    except ConfigError:  # a partition that only the other one has
        return requests.shape_of(_without_question(job), [], limits=[])


def _without_question(job: Config) -> Config:
    """The same, with no GPUs where SLURM would have to be asked for their number."""
    cluster = job.resolved["cluster"]
    if cluster["gpus_per_node"] != "auto" or cluster["gres"] or job.resolved["device"] == "cpu":
        return job
    return Config({**job.resolved, "cluster": {**cluster, "gpus_per_node": 0}})


def _overrides(overrides: Sequence[str], shape: Shape) -> list[str]:
    """The same run on the ranks that are there, which must be those of the shape."""
    own = [override for override in overrides if not commandline.is_cluster(override)]
    found = [f"cluster.nodes={shape.nodes}", f"cluster.ranks_per_node={shape.ranks_per_node}"]
    return [*own, *found, *([f"cluster.cpus_per_rank={shape.cpus_per_rank}"] if shape.cpus_per_rank else [])]
