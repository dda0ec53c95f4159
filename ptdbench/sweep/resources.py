"""What a job asks of SLURM by the ``cluster`` config: its shape, sbatch's flags, its script, and its ranks' container.

SLURM's partitions (:func:`ptdbench.launch.slurm.partitions`) are passed in; on a machine without SLURM the list is
empty, and rules that need it do not apply.

Folders have the same path in a container as outside, so that the paths in records, checkpoints and messages are valid
in both. The ranks run the submitting ptdbench, mounted, with the interpreter and the packages of the image.
"""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ptdbench import search_path
from ptdbench.files import user_cache
from ptdbench.launch.slurm import Partition, gpu_count, options, srun_help
from ptdbench.problems import ConfigError, Problem, nearest, require, try_these
from ptdbench.setup.config import RANKS_WITHOUT_GPU, Config, Container, Slurm
from ptdbench.setup.runs import Shape
from ptdbench.terminal import plural

#: sbatch flags whose options have the same name.
_ALIKE = ("partition", "account", "qos", "constraint", "dependency", "mail_user", "mail_type", "chdir")

#: sbatch flags that ``cluster.extra`` may not set, and what sets them.
_SAME = (*_ALIKE, "nodes", "gpus_per_node", "gres", "exclusive", "requeue")
GIVEN_BY = {name: f"cluster.{name}" for name in _SAME} | {
    "array": "-m and lists of values: each run of a sweep is a job of its own",
    "clusters": "SLURM_CLUSTERS, for all commands of SLURM",
    "job_name": "workload.label",
    "mem": "cluster.mem_gb",
    "no_requeue": "cluster.requeue",
    "ntasks": "cluster.nodes and cluster.ranks_per_node",
    "signal": "hydra.launcher.signal_delay_s",
    "time": "cluster.time_minutes",
    "wait": "cluster.submit=wait",
    **dict.fromkeys(("cpus_per_gpu", "cpus_per_task"), "cluster.cpus_per_rank"),
    **dict.fromkeys(("error", "open_mode", "output"), "hydra.sweep.dir, whose folder logs has the output"),
    **dict.fromkeys(("gpus", "gpus_per_task"), "cluster.gpus_per_node"),
    **dict.fromkeys(("ntasks_per_gpu", "ntasks_per_node"), "cluster.ranks_per_node"),
}

#: Defines the command ``module``, which otherwise exists only in login shells, from wherever sites keep it.
MODULE_COMMAND = [
    "if ! type module > /dev/null 2>&1; then",
    '  for init in "${MODULESHOME:-}/init/bash" /etc/profile.d/{z00_lmod,lmod,modules}.sh \\',
    "      /usr/share/{lmod/lmod,modules,Modules}/init/bash; do",
    '    if [ -r "$init" ]; then source "$init" || true; break; fi',
    "  done",
    "fi",
]

#: The variable with the image that ranks run in, for ``workload=hello`` and the record.
VARIABLE = "PTDBENCH_CONTAINER"

#: The package, which the ranks run too.
PACKAGE = Path(__file__).parents[1]

#: Mount point of an installed ptdbench: apart from this machine's other packages, which must not replace the image's.
_INSTALLED = Path("/opt/ptdbench/ptdbench")


def shape(cluster: Slurm, device: str, ranks: Callable[[int], int], partitions: Sequence[Partition]) -> Shape:
    """Return the shape of a job, with every ``auto`` resolved.

    Args:
        cluster: The requested resources.
        device: The option ``device``; with ``cpu`` no GPU is requested unless the config gives a number.
        ranks: Returns how many of a node's devices the strategy uses if the config does not say.
        partitions: SLURM's partitions; empty if SLURM is not available.

    Raises:
        ConfigError: The number of GPUs per node is unknown, or there are none for ``device=cuda``.
    """
    gpus = _gpus(cluster, device, partitions)
    if device == "cuda" and gpus == 0:
        rule = "the nodes that this job would get have no GPU, or none is asked for"
        raise ConfigError([Problem("device", device, rule, "try auto, cpu, or another cluster.partition")])
    per_node = cluster.ranks_per_node
    if per_node == "auto":
        per_node = ranks(gpus) if gpus and device != "cpu" else ranks(RANKS_WITHOUT_GPU)
        if cluster.gpus_per_node == "auto" and not gpu_count(cluster.gres or ""):
            gpus = min(gpus, per_node)  # more would be reserved and idle
    nodes = 1 if cluster.nodes == "auto" else cluster.nodes
    return Shape(nodes, per_node, gpus, None if cluster.cpus_per_rank == "auto" else cluster.cpus_per_rank)


def check(cluster: Slurm, shape: Shape, partitions: Sequence[Partition]) -> list[Problem]:
    """Return contradictions in a request, and unknown partitions; SLURM itself reports which resources it lacks."""
    return [*_contradictions(cluster, shape), *_extra(cluster), *_unknown_partitions(cluster, partitions)]


def flags(cluster: Slurm, shape: Shape, name: str) -> dict[str, str | int | bool]:
    """Return the flags of sbatch, with underscores for hyphens; ``True`` is a flag without a value."""
    # Without GPUs if the job uses none.
    gres = ",".join(part for part in (cluster.gres or "").split(",") if shape.gpus_per_node or not gpu_count(part))
    wanted = {
        "job_name": name,
        **{flag: getattr(cluster, flag) or None for flag in _ALIKE},
        "nodes": shape.nodes,
        "ntasks_per_node": shape.ranks_per_node,
        "cpus_per_task": shape.cpus_per_rank,
        "gpus_per_node": None if gpu_count(gres) else shape.gpus_per_node or None,
        "gres": gres or None,
        "mem": None if cluster.mem_gb is None else f"{math.ceil(cluster.mem_gb * 1024)}M",  # 0: all memory of a node
        "time": cluster.time_minutes,
        "exclusive": cluster.exclusive,
        "requeue": cluster.requeue,
        "no_requeue": not cluster.requeue,  # otherwise SLURM would restart the job after a node failure
    }
    wanted |= {_flag(flag): value for flag, value in cluster.extra.items()}
    return {flag: value for flag, value in wanted.items() if value is not None and value is not False}


def setup_lines(cluster: Slurm, shape: Shape) -> list[str]:
    """Return the shell commands that a job runs before its ranks start; the first that fails ends the job."""
    lines = ["set -e"]
    if cluster.modules:
        lines += [*MODULE_COMMAND, f"module load {shlex.join(cluster.modules)}"]
    lines.append("export SLURM_KILL_BAD_EXIT=1")  # a failed rank ends all ranks
    if shape.cpus_per_rank:
        # Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch.
        lines += [f"export {name}={shape.cpus_per_rank}" for name in ("SRUN_CPUS_PER_TASK", "OMP_NUM_THREADS")]
    return [*lines, *cluster.setup]


@dataclass(frozen=True)
class Step:
    """A command that all ranks of a job run."""

    command: Sequence[str]  #: The command and its arguments.
    flags: Sequence[str] = ()  #: Additional flags for srun, before the cluster's.
    before: Sequence[str] = ()  #: A command that the script itself runs first; if it fails, the ranks are not started.
    operand: str = ""  #: The last operand of both commands, as the script's shell is to read it.


def script(
    cluster: Slurm,
    shape: Shape,
    name: str,
    steps: Sequence[Step],
    more: Mapping[str, str | int],
    setup: Sequence[str] = (),
    after: Sequence[str] = (),
) -> str:
    """Return a script for sbatch, whose ranks run one step after the other.

    A failed step does not stop the others, but the job counts as failed. There are ``more`` flags for sbatch, and lines
    before the cluster's own setup and after all ranks have ended. The flag ``output`` is the file for the script's own
    output, with ``%j`` for the job's id; sbatch does not create its folder.
    """
    wanted = options({**flags(cluster, shape, name), **more})
    lines = [
        " && ".join(
            f"{shlex.join(words)} {step.operand}".rstrip() for words in (step.before, srun(cluster, step)) if words
        )
        for step in steps
    ]
    if len(lines) > 1 or after:
        lines = ["failed=0", *(f"{line} || failed=$?" for line in lines), *after, "exit $failed"]
    return "\n".join([
        "#!/bin/bash",
        f"# {shape}",
        *(f"#SBATCH {_quoted(option)}" for option in wanted),
        "",
        *setup,
        *setup_lines(cluster, shape),
        "",
        *lines,
        "",
    ])  # fmt: skip


def srun(cluster: Slurm, step: Step) -> list[str]:
    """Return the command that starts the ranks of a step."""
    return ["srun", "--kill-on-bad-exit=1", *step.flags, *cluster.srun_args, *step.command]


def check_container(container: Container, help_of_srun: Callable[[], str] = srun_help) -> list[Problem]:
    """Return the problems that prevent ranks from running in the container, as far as the submitting machine can tell.

    The image is only looked up on the nodes. ``help_of_srun`` returns what ``srun --help`` prints.
    """
    if container.image is None:
        return []
    problems = [
        Problem("cluster.container.mounts", mount, "must be a path, or HOST:CONTAINER[:ro]", "give absolute paths")
        for mount in container.mounts
        if not all(part.startswith(("/", "~")) for part in mount.removesuffix(":ro").split(":"))
    ]
    if container.kind == "pyxis" and not re.search("--container-image[ =]", help_of_srun()):
        rule = "is a plugin of SLURM, which srun does not have here"
        problems.append(Problem("cluster.container.kind", "pyxis", rule, "try apptainer"))
    return problems


def mounted_folders(config: Config, outputs: Path | None) -> list[Path]:
    """Return the folders of this machine that a run uses: ptdbench, the current directory, outputs, data and caches.

    Paths are absolute, with what links lead to; there are none if the run uses no container. A plain script has no
    sweep directory: ``outputs`` is ``None``.
    """
    if not (isinstance(config.cluster, Slurm) and config.cluster.container.image):
        return []
    user_cache().mkdir(parents=True, exist_ok=True)  # what is mounted must exist
    data = config.resolved.get("data")
    named = [*(data.values() if isinstance(data, Mapping) else []), config.resolved.get("resume")]
    paths = [Path(text).expanduser() for text in named if isinstance(text, str) and "/" in text]
    # Of a folder that the run will make below this one, that which it is made in, perhaps behind a link.
    below = [path for path in paths if not (path.is_absolute() or ".." in path.parts)]
    made_in = (next(filter(Path.exists, (path, *path.parents))) for path in below)
    used = [Path.cwd(), user_cache(), *filter(Path.exists, paths), *made_in]
    if outputs:
        used.append(outputs)
    if not _is_installed():
        used.append(PACKAGE.parent)
    return outermost(real for path in used for real in (path.absolute(), path.resolve()))  # what links lead to, too


def in_container(step: Step, container: Container, shape: Shape, used: Sequence[Path]) -> Step:
    """Return a step whose ranks run in the container; without an image the step is unchanged.

    The command of the step must begin with a Python interpreter. The folders ``used`` come from
    :func:`mounted_folders`.
    """
    if container.image is None:
        return step
    path = _INSTALLED.parent if _is_installed() else PACKAGE.parent
    variables = [f"{VARIABLE}={container.image}", f"PYTHONPATH={path}", f"{search_path.FOLDER}={Path.cwd()}"]
    command = ["env", *variables, container.python, *step.command[1:]]
    mounts, workdir = _mounts(container, used), container.workdir or str(Path.cwd())
    if container.kind == "apptainer":
        flags = [*(["--nv"] if shape.gpus_per_node else []), *(f"--bind={mount}" for mount in mounts)]
        outer = ["apptainer", "exec", *flags, f"--pwd={workdir}", *container.args, container.image]
        return replace(step, command=[*outer, *command])
    flags = [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"]
    flags += [f"--container-workdir={workdir}", *container.args]
    return replace(step, command=command, flags=[*step.flags, *flags])


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the folders that are not inside others."""
    ordered = sorted(set(paths))
    return [path for path in ordered if not any(other in path.parents for other in ordered)]


def _gpus(cluster: Slurm, device: str, partitions: Sequence[Partition]) -> int:
    if cluster.gpus_per_node != "auto":
        return cluster.gpus_per_node
    if device == "cpu":
        return 0
    if typed := gpu_count(cluster.gres or ""):
        return typed
    require(*_unknown_partitions(cluster, partitions))
    if partitions and not _chosen(cluster, partitions):
        names = try_these(partition.name for partition in partitions)
        raise ConfigError([Problem("cluster.partition", None, "this cluster has no default partition", names)])
    counts = sorted({count for partition in _chosen(cluster, partitions) for count in partition.gpus})
    if cluster.ranks_per_node != "auto" and any(counts):
        return cluster.ranks_per_node
    if len(counts) == 1:
        return counts[0]
    name = cluster.partition or "the default partition"
    if counts:
        rule = f"nodes of {name} have {', '.join(map(str, counts[:-1]))} or {counts[-1]} GPUs"
        raise ConfigError([Problem("cluster.gpus_per_node", "auto", rule, try_these(reversed(counts)))])
    rule = f"how many GPUs a node of {name} has is not known here"
    raise ConfigError([Problem("cluster.gpus_per_node", "auto", rule, "give the number, or 0 for none")])


def _chosen(cluster: Slurm, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions that the job may start in: of several names, SLURM uses the first that is free."""
    if not cluster.partition:
        return [partition for partition in partitions if partition.is_default]
    names = cluster.partition.split(",")
    return [partition for partition in partitions if partition.name in names]


def _unknown_partitions(cluster: Slurm, partitions: Sequence[Partition]) -> list[Problem]:
    names = [partition.name for partition in partitions]
    wanted = cluster.partition.split(",") if cluster.partition and partitions else []
    rule = f"there is no such partition; SLURM has {', '.join(names)}"
    unknown = [name for name in wanted if name not in names]
    return [Problem("cluster.partition", name, rule, try_these(nearest(name, names))) for name in unknown]


def _contradictions(cluster: Slurm, shape: Shape) -> Iterator[Problem]:
    """Find options that contradict each other on any cluster."""
    gpus, typed = shape.gpus_per_node, gpu_count(cluster.gres or "")
    if cluster.gpus_per_node != "auto" and typed and cluster.gpus_per_node != typed:
        rule = f"cluster.gres={cluster.gres} asks for {plural(typed, 'GPU')} a node"
        yield Problem("cluster.gpus_per_node", cluster.gpus_per_node, rule, f"try auto, {typed}")
    if gpus and shape.ranks_per_node > gpus:
        rule = f"must not exceed the GPUs of a node that are asked for, {gpus}: one rank, one GPU"
        remedy = f"try auto, {gpus}, or cluster.gpus_per_node=0 for ranks without GPUs"
        yield Problem("cluster.ranks_per_node", cluster.ranks_per_node, rule, remedy)


def _extra(cluster: Slurm) -> Iterator[Problem]:
    """Find extra flags for which the group has an option, and invalid values."""
    for flag, value in cluster.extra.items():
        option = f"cluster.extra.{flag}"
        if _flag(flag) in GIVEN_BY:
            rule = "would contradict what ptdbench passes to sbatch"
            yield Problem(option, value, rule, f"use {GIVEN_BY[_flag(flag)]}")
        elif not re.fullmatch("[a-z0-9_-]+", flag):
            yield Problem(option, value, "is no flag of sbatch: these have small letters, digits, - and _")
        elif not (value is None or isinstance(value, str | int | float)):
            yield Problem(option, value, "must be text, a number, or true for a flag without a value")


def _flag(name: str) -> str:
    """Normalize the spelling of a flag: users write ``mem-per-cpu`` and ``mem_per_cpu``."""
    return name.lstrip("-").replace("-", "_")


def _quoted(option: str) -> str:
    """Quote an option for a line of ``#SBATCH``, which is parsed as by a shell, but with escapes inside quotes, too."""
    flag, equals, value = option.partition("=")
    escaped = value.replace("\\", "\\\\")
    return f"{flag}={shlex.quote(escaped)}" if equals else flag


def _mounts(container: Container, used: Iterable[Path]) -> list[str]:
    typed = []
    for mount in container.mounts:
        source, _, target = mount.removesuffix(":ro").partition(":")
        outside = str(Path(source).expanduser())
        typed.append(f"{outside}:{target or outside}{':ro' * mount.endswith(':ro')}")
    installed = [f"{PACKAGE}:{_INSTALLED}"] if _is_installed() else []
    return [*(f"{path}:{path}" for path in used), *installed, *typed]


def _is_installed() -> bool:
    """Return whether ptdbench is installed, rather than run from a checkout, which has ``train.py`` beside it."""
    return not PACKAGE.with_name("train.py").exists()
