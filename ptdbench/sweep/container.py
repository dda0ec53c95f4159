"""Containers for the ranks of a job: how the commands of srun and the ranks change, and which folders are mounted.

Folders have the same path inside as outside, so that the paths in records, checkpoints and messages are valid in both.
The ranks run the submitting ptdbench, mounted, with the interpreter and the packages of the image.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ptdbench import search_path
from ptdbench.cache import user_cache
from ptdbench.launch import slurm
from ptdbench.problems import Problem
from ptdbench.setup.config import Config, Container, Slurm
from ptdbench.setup.runs import Shape
from ptdbench.sweep.resources import Step

#: The variable with the image that ranks run in, for ``workload=hello`` and the record.
VARIABLE = "PTDBENCH_CONTAINER"

#: The package, which the ranks run too.
PACKAGE = Path(__file__).parents[1]

#: Mount point of an installed ptdbench: apart from this machine's other packages, which must not replace the image's.
_INSTALLED = Path("/opt/ptdbench/ptdbench")


def check(container: Container, srun_help: Callable[[], str] = slurm.srun_help) -> list[Problem]:
    """Return the problems that prevent ranks from running in the container, as far as the submitting machine can tell.

    The image is only looked up on the nodes. ``srun_help`` returns what ``srun --help`` prints.
    """
    if container.image is None:
        return []
    problems = [
        Problem("cluster.container.mounts", mount, "must be a path, or HOST:CONTAINER[:ro]", "give absolute paths")
        for mount in container.mounts
        if not all(part.startswith(("/", "~")) for part in mount.removesuffix(":ro").split(":"))
    ]
    if container.kind == "pyxis" and not re.search("--container-image[ =]", srun_help()):
        rule = "is a plugin of SLURM, which srun does not have here"
        problems.append(Problem("cluster.container.kind", "pyxis", rule, "try apptainer"))
    return problems


def folders(config: Config, outputs: Path | None) -> list[Path]:
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


def enter(step: Step, container: Container, shape: Shape, used: Sequence[Path]) -> Step:
    """Return a step whose ranks run in the container; without an image the step is unchanged.

    The command of the given step must begin with a Python interpreter. The folders ``used`` come from :func:`folders`.
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


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the folders that are not inside others."""
    ordered = sorted(set(paths))
    return [path for path in ordered if not any(other in path.parents for other in ordered)]
