"""The runs of a command line, each specified or refused, on a cluster with the shape of its job.

:func:`write_script` writes them as a plain script for sbatch, for users who want to see and keep what is run.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Manifest
from ptdbench.launch import slurm
from ptdbench.launch.slurm import Partition, SlurmError
from ptdbench.launch.world import World
from ptdbench.parallel import proof
from ptdbench.planning.tries import needs_search
from ptdbench.problems import ConfigError, ErrorCollector, Problem, broken, differing, in_shell, require
from ptdbench.records import record, store
from ptdbench.records.effects import leaves
from ptdbench.records.schema import Draft
from ptdbench.setup import choices, commandline, compose, config, run_spec
from ptdbench.setup import runs as setup_runs
from ptdbench.setup.compose import Composed, Source
from ptdbench.setup.config import Config, Slurm
from ptdbench.setup.runs import Run, Shape
from ptdbench.sweep import resources
from ptdbench.terminal import command, plural


@proof.in_one_process()
def specified(
    composed: Composed, world: World | None, goes_on: Path | None = None, shapes: Sequence[Shape] = ()
) -> list[Run]:
    """Return the runs of a command line, of a run or sweep that may be resumed in place, each specified or refused.

    They are executed on this machine, or as jobs with these ``shapes``. The repeats of a run are specified once.

    Raises:
        ConfigError: None of them can run; otherwise a refused run becomes a row.
    """
    runs, outcomes = setup_runs.of(composed), dict[int, Draft]()
    for run in runs:
        if (place := run.alternative) not in outcomes:
            shape = shapes[place] if shapes else None
            outcomes[place] = {"shape": shape, **_summary_or_refusal(run.config, shape, world, goes_on)}
    if all("refused" in outcome for outcome in outcomes.values()):
        raise ConfigError([problem for outcome in outcomes.values() for problem in outcome["refused"].problems])
    return [replace(run, **outcomes[run.alternative]) for run in runs]


def of_cluster(composed: Composed, goes_on: Path | None = None) -> list[Run]:
    """Return the runs of a command line, of a new or a resumed sweep, that SLURM will execute; nothing is submitted.

    Raises:
        ConfigError: SLURM is not available here, lacks resources that one of them requests, or none of them can run.
    """
    partitions = _partitions(composed.configs[0].cluster)
    problems = ErrorCollector()
    shapes = []
    for read in composed.configs:
        shapes.append(problems.catch(shape_of, read, partitions))
        if isinstance(read.cluster, Slurm):
            problems.problems += resources.check_container(read.cluster.container)
    problems.close()
    return specified(composed, None, goes_on, [shape for shape in shapes if shape])


def of_search(run: Run) -> Run:
    """Return a run that a sweeper has just chosen, specified or refused.

    Raises:
        ConfigError: SLURM is not available here, or lacks resources that the run requests.
    """
    cluster = run.config.cluster
    shape = shape_of(run.config, _partitions(cluster)) if isinstance(cluster, Slurm) else None
    return replace(run, shape=shape, **_summary_or_refusal(run.config, shape, None, None))


def shape_of(read: Config, partitions: Sequence[Partition]) -> Shape:
    """Return the shape of a run's job; ``partitions`` are the cluster's partitions, empty without SLURM.

    Raises:
        ConfigError: The cluster has no such partition or GPUs, or the options contradict each other.
    """
    cluster = read.cluster
    assert isinstance(cluster, Slurm)

    def ranks(available: int) -> int:
        """Return how many of a node's devices the run uses, which depends on the strategy if it trains."""
        trains = choices.build(read, "workload").trains
        return choices.build(read, "parallel").ranks(available) if trains else available

    shape = resources.shape(cluster, read.general.device, ranks, partitions)
    require(*resources.check(cluster, shape, partitions))
    return shape


def _partitions(cluster: config.Cluster) -> list[Partition]:
    if not slurm.available():
        remedy = "log in to a machine that submits jobs, or omit cluster to run here"
        raise ConfigError([Problem("cluster", cluster.name, "there is no sbatch on PATH", remedy)])
    try:
        return slurm.partitions()
    except SlurmError as error:
        raise ConfigError([Problem("cluster", cluster.name, f"SLURM does not answer: {error}")]) from None


def _summary_or_refusal(read: Config, shape: Shape | None, world: World | None, goes_on: Path | None) -> Draft:
    """Return the field ``summary`` of a run, or ``refused`` with the reason."""
    try:
        _check_model(read, goes_on)
        summary = run_spec.summarize(read, shape.world if shape else world, shape.gpus_per_node if shape else None)
        if "layout" in summary:  # it trains
            _check_beginning(read, goes_on)
    except ConfigError as error:
        return {"refused": error}
    return {"summary": summary}


def _beginning(read: Config, goes_on: Path | None) -> Manifest | None:
    """Return the checkpoint that a run will begin with.

    A run that ``goes_on`` in its directory prefers its own, once there is one. In a resumed sweep each run that is not
    complete looks for its own.
    """
    places = [goes_on, *([Path(str(named))] if (named := read.resolved.get("resume")) else [])]
    return next(filter(None, (checkpoint_dir.latest_manifest(place) for place in places if place)), None)


def _check_model(read: Config, goes_on: Path | None) -> None:
    """Refuse to resume from a checkpoint of another model, before that which a record names is built."""
    manifest, model = _beginning(read, goes_on), read.resolved.get("model")
    if manifest and isinstance(model, dict) and (other := record.other_model(manifest.model, model)):
        rule = f"resume={read.resolved.get('resume') or goes_on} holds {other}"
        raise ConfigError([Problem("model", model.get("name"), rule, "a run begins with the weights of its model")])


def _check_beginning(read: Config, goes_on: Path | None) -> None:
    """Refuse a run whose ``resume`` names no complete checkpoint, or one after its last step."""
    if (named := read.general.resume) is None or (goes_on and store.is_sweep(goes_on)):
        return
    if (manifest := _beginning(read, goes_on)) is None:
        rule = "holds no complete checkpoint"
        raise ConfigError([Problem("resume", named, rule, "omit it to start over; see checkpoint.every_steps")])
    evaluated = [evaluation["step"] for evaluation in manifest.facts.get("evaluations", [])][-1:] == [manifest.step]
    examines = read.profile.trace or (read.eval.every and not evaluated)
    if goes_on is None and manifest.step >= read.train.steps and not examines:
        rule = f"resume={named} has taken {plural(manifest.step, 'step')}, and none is left"
        remedy = f"try {2 * manifest.step}, to train on from there, or profile=true, to trace steps of it"
        raise ConfigError([Problem("train.steps", read.train.steps, rule, remedy)])


def write_script(overrides: Sequence[str], source: Source | None = None) -> tuple[str, list[str]]:
    """Return a script for sbatch, and remarks, such as on what sbatch takes from this shell.

    Overrides are as for ``train.py``; ``cluster`` is ``slurm`` unless they or files choose another one. Lists make a
    sweep that runs in one job, one run after the other. Without SLURM here, the script is for another machine's.

    Raises:
        ConfigError: The overrides are invalid, request jobs of several shapes, or what SLURM here does not have.
    """
    source = source or Source(compose.conf_folder())
    words_of_run, has_jobs = [override for override in overrides if not commandline.is_cluster(override)], [True]
    if "cluster" not in map(commandline.option, overrides):  # files may choose one
        has_jobs = [isinstance(read.cluster, Slurm) for read in compose.compose_all(words_of_run, True, source).configs]
    composed = compose.compose_all([*overrides, *([] if all(has_jobs) else ["cluster=slurm"])], True, source)
    first = composed.configs[0]
    cluster = first.cluster
    if not isinstance(cluster, Slurm):
        raise ConfigError([Problem("cluster", cluster.name, "is not a SLURM cluster", "try slurm, or omit it")])
    require(*_unfit_for_script(composed, cluster))
    partitions: Sequence[Partition] = []
    with suppress(SlurmError):
        partitions = slurm.partitions() if slurm.available() else []
    jobs = zip(composed.configs, composed.overrides, strict=True)
    shapes = {shape_of(read, partitions): commandline.values(words) for read, words in jobs}
    rule, remedy = "one script is one job, and has one", f"write one for each, or {command()} cluster=slurm"
    clusters = [dict(leaves(read.resolved["cluster"], "cluster.")) for read in composed.configs]
    require(*differing(clusters, f"{rule} value", remedy))
    if len(shapes) != 1:
        rule = f"{rule} number of nodes and ranks, and these runs have several: {', '.join(sorted(map(str, shapes)))}"
        require(*differing([*shapes.values()], rule, remedy))
    (shape,) = shapes
    # Also for a list or a glob with a single value: the overrides of its run are not the ones that were typed.
    sweep = ["-m"] if len(composed.configs) > 1 or {*composed.overrides[0]} - {*composed.typed} else []
    name = "sweep" if sweep else store.file_name(first.label)
    checkout = compose.conf_folder().with_name("train.py")  # works without an installed ptdbench
    program = [str(checkout)] if checkout.exists() else ["-m", "ptdbench", "train"]
    ranks = [f"cluster.nodes={shape.nodes}", f"cluster.ranks_per_node={shape.ranks_per_node}"]
    ranks += [f"cluster.cpus_per_rank={shape.cpus_per_rank}"] if shape.cpus_per_rank else []
    words_of_run = ["cluster=local", *words_of_run] if any(has_jobs) else words_of_run
    words = [sys.executable, *program, *sweep, *source.flags, *words_of_run, *ranks]
    used = resources.mounted_folders(first, None)
    step = resources.in_container(resources.Step(words), cluster.container, shape, used)
    text = resources.script(cluster, shape, f"ptdbench-{name}", [step], {"output": "ptdbench-%j.log"})
    preferred = slurm.ignored_variables(os.environ)
    remark = f"sbatch prefers these variables of this shell to the script's lines: {' '.join(preferred)}"
    return text, [remark] if preferred else []


def _unfit_for_script(composed: Composed, cluster: Slurm) -> Iterator[Problem]:
    """Yield options that need more than one start of the ranks, which is all that a plain script has."""
    first, remedy = composed.configs[0], f"try {command()} -m cluster={cluster.name}, which submits jobs"
    sought = [str(read.train.micro_batch) for read in composed.configs if needs_search(read)]
    resumed = first.sweep.resume
    return broken([
        (bool(sought), "train.micro_batch", ",".join(dict.fromkeys(sought)),
         "is found by short runs, each with fresh ranks, and the script starts its ranks once", remedy),
        (resumed is not None, "sweep.resume", resumed, "continues as the jobs that it was submitted as",
         f"try {command()} {in_shell('sweep.resume', resumed)}"),
        (cluster.requeue, "cluster.requeue", True,
         "lets a run save ahead of the time limit and go on in its directory, which a script does not know", remedy),
    ])  # fmt: skip
