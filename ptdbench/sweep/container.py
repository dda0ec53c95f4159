"""Containers for the ranks of a job: how the commands of srun and the ranks change, and which folders are mounted.

Folders have the same path inside as outside, so that the paths in records, checkpoints and messages are valid in both.
The ranks run the submitting ptdbench, mounted, with the interpreter and the packages of the image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptdbench.cache import user_cache
from ptdbench.launch import slurm
from ptdbench.problems import Problem
from ptdbench.setup.config import Config, Container, Slurm
from ptdbench.sweep.resources import Shape, Step

#: The variable with the image that ranks run in, for ``workload=hello`` and the record.
VARIABLE = "PTDBENCH_CONTAINER"

#: The package, which the ranks run too.
PACKAGE = Path(__file__).parents[1]

#: Mount point of an installed ptdbench: apart from this machine's other packages, which must not replace the image's.
_INSTALLED = Path("/opt/ptdbench/ptdbench")

#: The srun flag that each kind needs, and what to do if srun lacks it.
_FLAGS = {
    "pyxis": ("--container-image", "is a plugin of SLURM, which srun does not have here", "try apptainer, oci"),
    "oci": ("--container", "needs Slurm 21.08 or newer", "try apptainer"),
}

#: The newest version of Slurm known to run only one task per node in a container.
_ONE_TASK = (22, 5)


def check(container: Container, shape: Shape, srun_says: Callable[[str], str] = slurm.srun_says) -> list[Problem]:
    """Return the problems that prevent ranks from running in the container, as far as the submitting machine can tell.

    An image is only looked up on the nodes; just the bundle of ``kind=oci`` is read here. ``srun_says`` returns what
    srun prints with ``--help`` and ``--version``.
    """
    if container.image is None:
        return []
    found = [
        Problem("cluster.container.mounts", mount, "must be a path, or HOST:CONTAINER[:ro]", "give absolute paths")
        for mount in container.mounts
        if not all(part.startswith(("/", "~")) for part in _without_flag(mount).split(":"))
    ]
    if container.kind in _FLAGS:
        flag, rule, remedy = _FLAGS[container.kind]
        if not re.search(rf"{flag}[ =]", srun_says("--help")):
            found.append(Problem("cluster.container.kind", container.kind, rule, remedy))
    if container.kind == "oci":
        found += _problems_of_bundle(container.image, shape, srun_says("--version"))
    return found


def _problems_of_bundle(image: str, shape: Shape, version: str) -> Iterator[Problem]:
    try:
        _specification(image)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        rule = f"must be the folder of an OCI bundle: its config.json cannot be read ({reason})"
        yield Problem("cluster.container.image", image, rule)
    number = re.search(r"(\d+)\.(\d+)", version)
    if number and tuple(map(int, number.groups())) <= _ONE_TASK and shape.world_size > 1:
        rule = f"with --container Slurm {number[0]} starts one task a node and does not tell it its rank"
        remedy = "try pyxis, apptainer, or one rank on one node"
        yield Problem("cluster.container.kind", "oci", rule, remedy)


def folders(config: Config, outputs: Path | None) -> list[Path]:
    """Return the folders of this machine that a run uses: ptdbench, the current directory, outputs, data and caches.

    Paths are absolute, with what links lead to; there are none if the run uses no container. A plain script has no
    sweep directory (``outputs`` is ``None``), nor is its output in ``cluster.log``.
    """
    if not (isinstance(config.cluster, Slurm) and config.cluster.container.image):
        return []
    from submitit.core.utils import JobPaths  # imported only here, to keep other starts fast

    user_cache().mkdir(parents=True, exist_ok=True)  # what is mounted must exist
    data = config.resolved.get("data")
    named = [*(data.values() if isinstance(data, Mapping) else []), config.resolved.get("resume")]
    paths = [Path(text).expanduser() for text in named if isinstance(text, str) and "/" in text]
    # Of a folder that the run will make below this one, that which it is made in, perhaps behind a link.
    below = [path for path in paths if not (path.is_absolute() or ".." in path.parts)]
    made_in = (next(one for one in (path, *path.parents) if one.exists()) for path in below)
    here = [Path.cwd(), user_cache(), *filter(Path.exists, paths), *made_in]
    if outputs and config.cluster.log:
        here.append(JobPaths.get_first_id_independent_folder(Path(config.cluster.log).expanduser()))
    if outputs:
        here.append(outputs)
    if not _is_installed():
        here.append(PACKAGE.parent)
    return outermost(one for path in here for one in (path.absolute(), path.resolve()))  # what links lead to, too


def enter(step: Step, container: Container, shape: Shape, used: Sequence[Path], bundle: Path | None = None) -> Step:
    """Return a step whose ranks run in the container; without an image the step is unchanged.

    The command of the given step must begin with a Python interpreter. The folders ``used`` come from :func:`folders`,
    and the ``bundle`` of ``kind=oci`` from :func:`write_bundle`.
    """
    if container.image is None:
        return step
    path = dict.fromkeys([_INSTALLED.parent if _is_installed() else PACKAGE.parent, Path.cwd()])
    variables = [f"{VARIABLE}={container.image}", f"PYTHONPATH={':'.join(map(str, path))}"]
    command = ["env", *variables, container.python, *step.command[1:]]
    mounts, workdir = _mounts(container, used), container.workdir or str(Path.cwd())
    if container.kind == "apptainer":
        flags = [*(["--nv"] if shape.gpus_per_node else []), *(f"--bind={mount}" for mount in mounts)]
        outer = ["apptainer", "exec", *flags, f"--pwd={workdir}", *container.args, container.image]
        return replace(step, command=[*outer, *command])
    if container.kind == "oci":
        return replace(step, command=command, flags=[*step.flags, f"--container={bundle}", *container.args])
    flags = [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"]
    flags += [f"--container-workdir={workdir}", *container.args]
    return replace(step, command=command, flags=[*step.flags, *flags])


def write_bundle(container: Container, used: Sequence[Path], folder: Path) -> Path | None:
    """Write a copy of the image's bundle with our mounts, as srun accepts no mounts for OCI containers.

    ``folder`` must be shared with the nodes. Returns ``None`` for containers of another kind.
    """
    if container.image is None or container.kind != "oci":
        return None
    found = _specification(container.image)
    binds = []
    for mount in _mounts(container, used):
        source, destination = _without_flag(mount).split(":")
        options = ["rbind", "ro" if mount.endswith(":ro") else "rw"]
        binds.append({"destination": destination, "source": source, "type": "none", "options": options})
    root = {**found["root"], "path": str(Path(container.image, found["root"]["path"]).absolute())}
    process = {**found.get("process", {}), "cwd": container.workdir or str(Path.cwd())}
    written = {**found, "root": root, "process": process, "mounts": [*found.get("mounts", []), *binds]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rootfs").symlink_to(root["path"])  # Slurm 22.05 looks here, ignoring the specification
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    return folder


def _specification(image: str) -> dict[str, Any]:
    """Return the ``config.json`` of an OCI bundle; by the runtime specification 1.0 it contains the root's path."""
    found = json.loads(Path(image, "config.json").read_text())
    if not isinstance(found, dict) or not isinstance((found.get("root") or {}).get("path"), str):
        raise ValueError("it names no root")
    return found


def _mounts(container: Container, used: Iterable[Path]) -> list[str]:
    """Return the mounts as ``HOST:CONTAINER`` or ``HOST:CONTAINER:ro``."""
    typed = []
    for mount in container.mounts:
        source, _, target = _without_flag(mount).partition(":")
        outside = str(Path(source).expanduser())
        typed.append(f"{outside}:{target or outside}{':ro' * mount.endswith(':ro')}")
    installed = [f"{PACKAGE}:{_INSTALLED}"] if _is_installed() else []
    return [*(f"{path}:{path}" for path in used), *installed, *typed]


def _without_flag(mount: str) -> str:
    return mount.removesuffix(":ro")


def _is_installed() -> bool:
    """Return whether ptdbench is installed, rather than run from a checkout, which has ``train.py`` beside it."""
    return not PACKAGE.with_name("train.py").exists()


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the folders that are not inside others."""
    found = sorted(set(paths))
    return [path for path in found if not any(other in path.parents for other in found)]
