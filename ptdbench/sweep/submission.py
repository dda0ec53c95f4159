"""From runs to scripts for sbatch: SLURM is asked beforehand about the very text that it is given later."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths

from ptdbench.launch import slurm
from ptdbench.problems import ConfigError, Problem, as_typed, require
from ptdbench.setup.config import Slurm
from ptdbench.setup.hydra_launcher import OPTIONS
from ptdbench.sweep import resources
from ptdbench.sweep.requests import Request
from ptdbench.sweep.resources import Output, Step
from ptdbench.terminal import plural


def arrays(requests: Sequence[Request]) -> list[list[list[int]]]:
    """The arrays of jobs that carry out the runs.

    Args:
        requests: The runs; those that are refused are in no job.

    Returns:
        For each array its jobs, and for each job the places of its runs in ``requests``: one, or with
        ``sweep.same_nodes`` all of a block of repeats. Jobs of an array have the same nodes, the same ranks, and all
        else that sbatch is given.

    Raises:
        ConfigError: Runs of one job ask for different things, or it would be requeued.
    """
    alike: dict[tuple[str, int], list[list[int]]] = {}
    for job in _jobs(requests):
        given = _given([requests[place] for place in job])
        alike.setdefault((given, len(job)), []).append(job)
    return list(alike.values())


def _jobs(requests: Sequence[Request]) -> Iterable[list[int]]:
    """Which runs each job carries out."""
    found: dict[tuple[str, int | None], list[int]] = {}
    for place, request in enumerate(requests):
        if not request.refused:
            job = ("block", request.block) if request.config.sweep.same_nodes else ("run", place)
            found.setdefault(job, []).append(place)
    return found.values()


def _given(job: Sequence[Request]) -> str:
    """What sbatch is given for the runs of a job."""
    found = set()
    for request in job:
        cluster, shape = request.cluster, request.shape
        assert shape is not None
        asked = (shape, resources.flags(cluster, shape, ""), resources.setup_lines(cluster, shape))
        found.add(repr((asked, cluster.srun_args, cluster.log)))
    if len(found) > 1:
        raise ConfigError(list(_differences(job)))
    if len(job) > 1 and (requeue := job[0].cluster.requeue):
        rule = "with sweep.same_nodes=true a job has several runs, and would begin again with the first one"
        remedy = "omit one of them, and sweep.resume goes on with what is missing"
        require(Problem("cluster.requeue", requeue, rule, remedy))
    return found.pop()


def _differences(job: Sequence[Request]) -> Iterator[Problem]:
    """What the runs of a job ask for differently."""
    remedy = "give one value, or start a sweep for each"
    for option in fields(Slurm):
        values = dict.fromkeys(as_typed(getattr(request.cluster, option.name)) for request in job)
        if len(values) > 1:
            rule = "with sweep.same_nodes=true all runs are in one job, which has one value"
            yield Problem(f"cluster.{option.name}", ",".join(values), rule, remedy)
    shapes = dict.fromkeys(request.shape for request in job if request.shape)
    if len(shapes) > 1:
        named = ", ".join(f"{shape} with {plural(shape.gpus_per_node, 'GPU')} a node" for shape in shapes)
        rule = f"one job has one shape, and these runs have several: {named}"
        yield Problem("sweep.same_nodes", as_typed(True), rule, "start a sweep for each")


def script(array: Sequence[Sequence[Request]], name: str, folder: Path, options: Mapping[str, Any]) -> str:
    """The script of the jobs of one array.

    Args:
        array: Its jobs, each with its runs; all have the same number of them.
        name: Its name in the queue.
        folder: Folder of the output, ``%j`` in it being a job's id.
        options: The launcher's own options; see :data:`ptdbench.setup.hydra_launcher.OPTIONS`.
    """
    first, *_ = array[0]
    cluster, shape = first.cluster, first.shape
    assert shape is not None
    parallel, delay = (int(options.get(option) or default) for option, default in OPTIONS.items())
    flags: dict[str, str | int] = {"open_mode": "append", "signal": f"USR2@{min(delay, 6 * cluster.time_minutes)}"}
    if len(array) > 1:
        flags["array"] = f"0-{len(array) - 1}%{min(parallel, len(array))}"
    out, errors = (path.replace("%t", "0") for path in _outputs(folder, len(array)))
    setup = [f"export PYTHONPATH={_python_path()}", "export SUBMITIT_EXECUTOR=slurm"]
    output = Output(job=out, flags={**flags, "error": errors}, setup=setup)
    steps = [_step(of_run, len(array)) for of_run in folders(folder, len(array[0]))]
    return resources.script(cluster, shape, name, steps, output)


def _step(folder: Path, jobs: int) -> Step:
    """One run in every task of its job."""
    out, errors = _outputs(folder, jobs)
    command = [sys.executable, "-u", "-m", "submitit.core._submit", str(folder)]
    return Step(command, ["--unbuffered", f"--output={out}", f"--error={errors}"])


def _outputs(folder: Path, jobs: int) -> tuple[str, str]:
    """The files of a task's output and errors, as SLURM's patterns; an element of an array has no ``%j`` of its own."""
    paths = JobPaths(folder)
    out, errors = (str(path).replace("%j", "%A_%a" if jobs > 1 else "%j") for path in (paths.stdout, paths.stderr))
    return out, errors


def folder(request: Request, sweep_directory: Path) -> Path:
    """Folder of the output of a run's job, with ``%j`` for its id."""
    return Path(request.cluster.log or sweep_directory / "logs" / "%j").expanduser().absolute()


def folders(folder: Path, runs: int) -> list[Path]:
    """Folders of the output of each run of a job: the job's own, where it has only one."""
    return [folder] if runs == 1 else [folder / str(number) for number in range(runs)]


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
    text: str, name: str, jobs: Sequence[Sequence[DelayedSubmission]], folder: Path, note: Callable[[list[str]], None]
) -> None:
    """Submit the jobs of one array.

    Args:
        text: Its script.
        name: Its name in the queue.
        jobs: What each job runs, one after the other.
        folder: As for :func:`script`.
        note: Called with the jobs' ids as soon as they are known: ``["123"]``, or ``["123_0", "123_1"]``.

    Raises:
        SlurmError: SLURM did not take it, or did not answer.
        OSError: The folder cannot be written to.
    """
    staging = JobPaths.get_first_id_independent_folder(folder)
    staging.mkdir(parents=True, exist_ok=True)
    staged = [
        [(staging / f"{name}-{number}-{run}.pkl", task) for run, task in enumerate(job)]
        for number, job in enumerate(jobs)
    ]
    pickles = list(chain.from_iterable(staged))
    try:
        for pickle, task in pickles:
            task.dump(pickle)
        identity = slurm.submit(text)
    except BaseException:
        for pickle, _ in pickles:  # made by this very call
            pickle.unlink(missing_ok=True)
        raise
    ids = [f"{identity}_{number}" for number in range(len(jobs))] if len(jobs) > 1 else [identity]
    note(ids)
    for one, job in zip(ids, staged, strict=True):  # each run waits for its own for a minute
        for of_run, (pickle, _) in zip(folders(folder, len(job)), job, strict=True):
            JobPaths(of_run, one).move_temporary_file(pickle, "submitted_pickle")
    JobPaths(folder, ids[0]).submission_file.write_text(text)


def _python_path() -> str:
    """Where a model of the user's own may lie: beside ``train.py`` and in this directory, as when started by hand."""
    script = Path(sys.argv[0]).resolve()
    folders = dict.fromkeys([*([script.parent] if script.name == "train.py" else []), Path.cwd()])
    return f"{':'.join(shlex.quote(str(folder)) for folder in folders)}${{PYTHONPATH:+:$PYTHONPATH}}"
