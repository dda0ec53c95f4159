"""From runs to scripts for sbatch: SLURM is asked beforehand about the very text that it is given later."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths

from ptdbench.launch import slurm
from ptdbench.problems import Problem, require
from ptdbench.setup.hydra_launcher import OPTIONS
from ptdbench.sweep import resources
from ptdbench.sweep.requests import Request
from ptdbench.sweep.resources import Output


def arrays(requests: Sequence[Request]) -> list[list[int]]:
    """The runs that may share an array, by their places in ``requests``; those that are refused are in none.

    They have the same nodes, the same ranks, and all else that sbatch is given.
    """
    alike: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        if not request.refused:
            assert request.shape is not None
            cluster, shape = request.cluster, request.shape
            given = (shape, resources.flags(cluster, shape, ""), resources.setup_lines(cluster, shape))
            alike.setdefault(repr((given, cluster.srun_args, cluster.log)), []).append(place)
    return list(alike.values())


def script(array: Sequence[Request], name: str, folder: Path, options: Mapping[str, Any]) -> str:
    """The script of the jobs of one array.

    Args:
        array: Runs that may share it.
        name: Its name in the queue.
        folder: Folder of the output, ``%j`` in it being a job's id.
        options: The launcher's own options; see :data:`ptdbench.setup.hydra_launcher.OPTIONS`.
    """
    cluster, shape = array[0].cluster, array[0].shape
    assert shape is not None
    parallel, delay = (int(options.get(option) or default) for option, default in OPTIONS.items())
    paths = JobPaths(folder)
    out, errors = (str(path) for path in (paths.stdout, paths.stderr))
    flags: dict[str, str | int] = {"open_mode": "append", "signal": f"USR2@{min(delay, 6 * cluster.time_minutes)}"}
    if len(array) > 1:
        out, errors = (path.replace("%j", "%A_%a") for path in (out, errors))
        flags["array"] = f"0-{len(array) - 1}%{min(parallel, len(array))}"
    flags["error"] = errors.replace("%t", "0")
    output = Output(
        job=out.replace("%t", "0"),
        flags=flags,
        srun=["--unbuffered", f"--output={out}", f"--error={errors}"],
        setup=[f"export PYTHONPATH={_python_path()}", "export SUBMITIT_EXECUTOR=slurm"],
    )
    command = [sys.executable, "-u", "-m", "submitit.core._submit", str(folder)]
    return resources.script(cluster, shape, name, command, output)


def folder(request: Request, sweep_directory: Path) -> Path:
    """Folder of the output of a run's job, with ``%j`` for its id."""
    return Path(request.cluster.log or sweep_directory / "logs" / "%j").expanduser().absolute()


def make_folders(requests: Sequence[Request]) -> None:
    """Make the folders that people have named for the output of jobs.

    Raises:
        ConfigError: One cannot be made.
    """
    found = []
    for log in dict.fromkeys(request.cluster.log for request in requests if request.cluster.log):
        staging = JobPaths.get_first_id_independent_folder(log)
        try:
            staging.mkdir(parents=True, exist_ok=True)
            reason = "" if os.access(staging, os.W_OK) else "you may not write to it"
        except FileExistsError:
            reason = f"{staging} is no folder"
        except OSError as error:
            reason = f"it cannot be made: {error.strerror}"
        if reason:
            found.append(Problem("cluster.log", log, reason, "give a folder that the cluster's nodes share"))
    require(*found)


def submit(
    text: str, name: str, tasks: Sequence[DelayedSubmission], folder: Path, note: Callable[[list[str]], None]
) -> None:
    """Submit the jobs of one array.

    Args:
        text: Its script.
        name: Its name in the queue.
        tasks: What each job runs.
        folder: As for :func:`script`.
        note: Called with the jobs' ids as soon as they are known: ``["123"]``, or ``["123_0", "123_1"]``.

    Raises:
        SlurmError: SLURM did not take it, or did not answer.
        OSError: The folder cannot be written to.
    """
    staging = JobPaths.get_first_id_independent_folder(folder)
    staging.mkdir(parents=True, exist_ok=True)
    pickles = [staging / f"{name}-{number}.pkl" for number in range(len(tasks))]
    try:
        for task, pickle in zip(tasks, pickles, strict=True):
            task.dump(pickle)
        job = slurm.submit(text)
    except BaseException:
        for pickle in pickles:  # made by this very call
            pickle.unlink(missing_ok=True)
        raise
    ids = [f"{job}_{number}" for number in range(len(tasks))] if len(tasks) > 1 else [job]
    note(ids)
    for one, pickle in zip(ids, pickles, strict=True):  # a job waits for its own for a minute
        JobPaths(folder, one).move_temporary_file(pickle, "submitted_pickle")
    JobPaths(folder, ids[0]).submission_file.write_text(text)


def _python_path() -> str:
    """Where a model of the user's own may lie: beside ``train.py`` and in this directory, as when started by hand."""
    script = Path(sys.argv[0]).resolve()
    folders = dict.fromkeys([*([script.parent] if script.name == "train.py" else []), Path.cwd()])
    return f"{':'.join(shlex.quote(str(folder)) for folder in folders)}${{PYTHONPATH:+:$PYTHONPATH}}"
