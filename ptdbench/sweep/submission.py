"""Submission of runs to SLURM as job arrays: the script is first tested with SLURM, then submitted unchanged."""

from __future__ import annotations

import math
import os
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from submitit.core.utils import DelayedSubmission, JobPaths

from ptdbench import search_path, terminal
from ptdbench.launch import forced_exit, local, slurm
from ptdbench.launch.slurm import JobSteps, SlurmError
from ptdbench.launch.world import discover
from ptdbench.planning.micro_batch import needs_search
from ptdbench.problems import ConfigError, Problem, as_typed, differing, require
from ptdbench.records import failure, ledger, record, store
from ptdbench.records.effects import leaves
from ptdbench.setup.config import Slurm
from ptdbench.setup.hydra_options import OPTIONS
from ptdbench.sweep import container, resources, status
from ptdbench.sweep.agenda import Opened
from ptdbench.sweep.requests import Request, world_of
from ptdbench.sweep.resources import Output, Shape, Step
from ptdbench.terminal import echo, plural

T = TypeVar("T")

#: The id of a job, for use in its script, as squeue prints it.
_JOB = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"


def arrays(requests: Sequence[Request]) -> list[list[list[int]]]:
    """Group runs into arrays of jobs; refused runs are in no job.

    Returns:
        For each array its jobs, and for each job the indices of its runs in ``requests``: one run, or with
        ``sweep.same_nodes`` all runs of a block of repeats. Jobs of an array have the same shape and all other sbatch
        options in common.

    Raises:
        ConfigError: Runs of one job request different resources, or a job with several runs would be requeued.
    """
    alike: dict[tuple[str, tuple[bool, ...]], list[list[int]]] = {}
    for job in _jobs(requests):
        given = _given([requests[place] for place in job])
        alike.setdefault((given, tuple(needs_search(requests[place].config) for place in job)), []).append(job)
    return list(alike.values())


def _divided(
    runs: Sequence[T], requests: Sequence[Request], options: Mapping[str, Any]
) -> Iterator[tuple[list[list[T]], Mapping[str, Any]]]:
    """Yield the :func:`arrays` of runs, none longer than SLURM allows, each with options for its script."""
    alike = arrays(requests)
    most = slurm.longest_array() if max(map(len, alike), default=1) > 1 else 1
    for jobs in alike:
        parts, parallel = math.ceil(len(jobs) / most), _own(options)["array_parallelism"]
        if parallel < parts:
            rule = f"{len(jobs)} jobs make {parts} arrays, each with one at once, as MaxArraySize is {most} here"
            require(Problem("hydra.launcher.array_parallelism", parallel, rule, f"try {parts}, or a smaller sweep"))
        size, shared = math.ceil(len(jobs) / parts), {**_own(options), "array_parallelism": parallel // parts}
        for start in range(0, len(jobs), size):
            yield [[runs[place] for place in job] for job in jobs[start : start + size]], shared


def _jobs(requests: Sequence[Request]) -> Iterable[list[int]]:
    found: dict[tuple[str, int | None], list[int]] = {}
    for place, request in enumerate(requests):
        if not request.refused:
            job = ("block", request.block) if request.config.sweep.same_nodes else ("run", place)
            found.setdefault(job, []).append(place)
    return found.values()


def _given(job: Sequence[Request]) -> str:
    """Return everything that sbatch is given for the runs of a job, as text to compare."""
    found = set()
    for request in job:
        cluster, shape = request.cluster, request.shape
        assert shape is not None
        asked = (shape, resources.flags(cluster, shape, ""), resources.setup_lines(cluster, shape))
        found.add(repr((asked, cluster.srun_args, cluster.container, cluster.log)))
    if len(found) > 1:
        raise ConfigError(list(_differences(job)))
    if len(job) > 1 and (requeue := job[0].cluster.requeue):
        rule = "with sweep.same_nodes=true a job has several runs, and would begin again with the first one"
        remedy = "omit one of them, and sweep.resume goes on with what is missing"
        require(Problem("cluster.requeue", requeue, rule, remedy))
    return found.pop()


def _differences(job: Sequence[Request]) -> Iterator[Problem]:
    rule = "with sweep.same_nodes=true all runs are in one job, which has one value"
    clusters = [dict(leaves(request.config.resolved["cluster"], "cluster.")) for request in job]
    yield from differing(clusters, rule, "give one value, or start a sweep for each")
    shapes = dict.fromkeys(request.shape for request in job if request.shape)
    if len(shapes) > 1:
        named = ", ".join(f"{shape} with {plural(shape.gpus_per_node, 'GPU')} a node" for shape in shapes)
        rule = f"one job has one shape, and these runs have several: {named}"
        yield Problem("sweep.same_nodes", as_typed(True), rule, "start a sweep for each")


@dataclass(frozen=True)
class Array:
    """Jobs with the same resources, submitted by one script."""

    jobs: Sequence[Sequence[Request]]  #: The runs of each job, equally many in all of them.
    name: str  #: Its name in the queue.
    sweep: Path  #: The sweep's directory.

    @property
    def cluster(self) -> Slurm:
        """The resources of each of the jobs."""
        return self.jobs[0][0].cluster

    @property
    def _shape(self) -> Shape:
        shape = self.jobs[0][0].shape
        assert shape is not None
        return shape

    @property
    def output(self) -> Path:
        """Folder for the output of a job, with ``%j`` for its id."""
        return Path(self.cluster.log or self.sweep / "logs" / "%j").expanduser().absolute()

    @property
    def folders(self) -> list[Path]:
        """Folders for the output of each run of a job: the job's own folder if it has only one run."""
        runs = len(self.jobs[0])
        return [self.output] if runs == 1 else [self.output / str(number) for number in range(runs)]

    @property
    def staging(self) -> Path:
        """The common parent folder of all jobs' output."""
        return JobPaths.get_first_id_independent_folder(self.output)

    @cached_property
    def used(self) -> list[Path]:
        """The folders of this machine that the runs use, to be mounted in their container."""
        runs = chain.from_iterable(self.jobs)
        return container.outermost(path for run in runs for path in container.folders(run.config, self.sweep))

    def script(self, options: Mapping[str, Any]) -> str:
        """Return the script; ``options`` are the launcher's own, see :data:`ptdbench.setup.hydra_options.OPTIONS`."""
        count, cluster = len(self.jobs), self.cluster
        parallel, delay = _own(options).values()
        flags: dict[str, str | int] = {"open_mode": "append", "signal": f"USR2@{min(delay, 6 * cluster.time_minutes)}"}
        if count > 1:
            flags["array"] = f"0-{count - 1}%{min(parallel, count)}"
        # The token with which the job was submitted may have expired by the time it starts: srun would be refused.
        setup = ["unset SLURM_JWT", *_search_path(), "export SUBMITIT_EXECUTOR=slurm"]
        steps = [self._run(run, folder) for run, folder in zip(self.jobs[0], self.folders, strict=True)]
        after = []
        if cluster.requeue and cluster.container.image:
            asked = f"{shlex.quote(str(self.sweep.absolute()))}/{slurm.REQUEUE}$SLURM_JOB_ID"
            after.append(f'if rm {asked} 2> /dev/null; then scontrol requeue "{_JOB}"; fi')
        log = self._by_pattern(self.staging / ledger.LOG_OF_SLURM)
        output = Output(log, flags, [*setup, *self._enter_folders()], after)
        return resources.script(cluster, self._shape, self.name, steps, output)

    def search(self, run: Request, folder: Path) -> JobSteps | None:
        """Return how a job's script starts ranks that try a micro-batch; ``None`` if none is searched for."""
        if not needs_search(run.config):
            return None
        step = self._step([sys.executable, "-u", *search_path.module("ptdbench"), "run"], folder)
        return JobSteps(world_of(self._shape), self._shape.gpus_per_node, resources.srun(self.cluster, step))

    def _run(self, run: Request, folder: Path) -> Step:
        """Return the step that runs in every task of a job; if needed, the script first searches the micro-batch."""
        command = [sys.executable, "-u", *search_path.module("submitit.core._submit"), str(folder)]
        return replace(self._step(command, folder), before=command if needs_search(run.config) else ())

    def _step(self, command: Sequence[str], folder: Path) -> Step:
        """Return the step of a command in every task of a job, in its container and with its output in a folder."""
        out, errors = map(self._by_pattern, (JobPaths(folder).stdout, JobPaths(folder).stderr))
        step = Step(command, ["--unbuffered", "--open-mode=append", f"--output={out}", f"--error={errors}"])
        return container.enter(step, self.cluster.container, self._shape, self.used)

    def _by_pattern(self, path: Path) -> str:
        """Return a path with SLURM's patterns: in an array, ``%j`` does not name the element."""
        return str(path).replace("%j", "%A_%a") if len(self.jobs) > 1 else str(path)

    def _enter_folders(self) -> list[str]:
        """Return lines that create the folders for a job's output, and redirect the script's own output there.

        SLURM creates no folders, and this process learns the job's id only when the job may already have started.
        """
        paths = JobPaths(self.output)
        out, errors = (_in_script(str(path).replace("%t", "0")) for path in (paths.stdout, paths.stderr))
        made = " ".join(_in_script(str(folder)) for folder in self.folders)
        return [f'ptdbench_job="{_JOB}"', f"mkdir -p {made} && exec >> {out} 2>> {errors}"]


def _own(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the launcher's options other than resources, :data:`ptdbench.setup.hydra_options.OPTIONS`."""
    return {name: int(default if (value := options.get(name)) is None else value) for name, default in OPTIONS.items()}


def _in_script(path: str) -> str:
    """Quote a path for a script, with a variable in place of ``%j``."""
    return '"$ptdbench_job"'.join(part and shlex.quote(part) for part in path.split("%j"))


def check_paths(requests: Sequence[Request], sweep_directory: Path) -> None:
    """Refuse output paths that SLURM or submitit would read as patterns but for ``%j`` in ``cluster.log``, or as lines.

    Raises:
        ConfigError: There are such paths.
    """
    rule = r"%, \ and line breaks in the path of a job's output mean something else to SLURM, but for %j in cluster.log"
    directory, found = sweep_directory.resolve(), []
    for log in dict.fromkeys(request.cluster.log for request in requests):
        path = str(Path(log).expanduser().absolute()).replace("%j", "") if log else str(directory)
        if "%" in path or "\\" in path or terminal.has_controls(path):
            option, value = ("cluster.log", log) if log else ("hydra.sweep.dir", directory)
            found.append(Problem(option, value, rule, "give one without them"))
    require(*found)


def make_folders(requests: Sequence[Request]) -> None:
    """Create the folders that users have named for the output of jobs.

    Raises:
        ConfigError: One of them cannot be created.
    """
    found = []
    for log in dict.fromkeys(request.cluster.log for request in requests if request.cluster.log):
        staging = JobPaths.get_first_id_independent_folder(Path(log).expanduser())
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


def carry_out(directory: str, environment: Mapping[str, str], steps: JobSteps | None = None) -> None:
    """Execute the run of a directory; called in every task of the job.

    Args:
        directory: The run's directory.
        environment: Variables to set for the run.
        steps: How the job's script, which calls this first, starts ranks that try a micro-batch.

    Raises:
        SystemExit: The run failed here.
    """
    local.stop_on_signals()  # first, as submitit's own handlers ignore SIGTERM, and requeue unasked
    os.environ.update(environment)
    search_path.add_current()
    from ptdbench.run import find_micro_batch, run

    try:
        if steps and discover(os.environ) is None:
            if not find_micro_batch(Path(directory), steps):
                raise SystemExit(1)  # the script then starts no ranks
        else:
            run(Path(directory))
    finally:
        forced_exit.exit_soon()


def call_of(sweep: Path, opened: Opened) -> tuple[str, dict[str, str]]:
    """Return the arguments of :func:`carry_out` for a run's job."""
    typed = terminal.as_variable(sys.argv)  # so that the job's messages on how to resume name the same program
    return str(sweep / opened.subdirectory), {**typed, **opened.request.environment}


def submit(directory: Path, jobs: Sequence[Opened], options: Mapping[str, Any]) -> list[ledger.Job]:
    """Submit the arrays of jobs; if SLURM refuses one, all are cancelled.

    Returns:
        The runs with their jobs, in the order of their numbers.

    Raises:
        ConfigError: SLURM refused them; their records say so.
        OSError: The folder for their output cannot be written to.
    """
    found = list(_divided(jobs, [job.request for job in jobs], options))
    names = [f"ptdbench-{_label(array)}-{secrets.token_hex(4)}" for array, _ in found]
    submitted: list[ledger.Job] = []
    try:
        for name, (array, own) in zip(names, found, strict=True):
            with local.deferred():  # a signal during submission would leave unknown jobs
                submitted += _submit(directory, name, array, own)
    except BaseException as error:
        with local.deferred():  # a second signal would leave jobs that are not cancelled
            echo("canceling what was submitted…", sys.stderr)
            _take_back(names)
            _write_off(directory, jobs, error)
        if isinstance(error, SlurmError):
            rule = f"nothing was submitted: {str(error).strip().splitlines()[-1]}"
            raise ConfigError([Problem("cluster", jobs[0].request.cluster.name, rule)]) from None
        raise
    return sorted(submitted, key=lambda job: job.number)


def _submit(
    directory: Path, name: str, runs: Sequence[Sequence[Opened]], options: Mapping[str, Any]
) -> list[ledger.Job]:
    """Submit the jobs of an array, each with its runs; the ledger records them before and after."""
    array = Array([[run.request for run in job] for job in runs], name, directory)
    text = array.script(options)
    noted = list(_to_note(array, runs))
    ledger.add(directory, noted)
    array.staging.mkdir(parents=True, exist_ok=True)
    pickles = [array.staging / f"{name}-{number}.pkl" for number in range(len(noted))]
    try:
        for run, job, pickle in zip(chain.from_iterable(runs), noted, pickles, strict=True):
            steps = array.search(run.request, Path(job.log))
            DelayedSubmission(carry_out, *call_of(directory, run), steps).dump(pickle)
        identity = slurm.submit(text)
    except BaseException:
        for pickle in pickles:  # created by this call
            pickle.unlink(missing_ok=True)
        raise
    ids = [identity if job.element is None else f"{identity}_{job.element}" for job in noted]
    noted = list(map(ledger.with_id, noted, ids))
    ledger.add(directory, noted)
    for one, job, pickle in zip(ids, noted, pickles, strict=True):  # each run waits up to a minute for its pickle
        JobPaths(job.log, one).move_temporary_file(pickle, "submitted_pickle")
    JobPaths(array.output, ids[0]).submission_file.write_text(text)
    return noted


def _to_note(array: Array, runs: Sequence[Sequence[Opened]]) -> Iterator[ledger.Job]:
    """Yield the ledger's entries for the runs of an array before its submission."""
    cluster = None
    with suppress(SlurmError, ValueError):  # with several clusters, it is unknown which one takes the jobs
        (cluster,) = slurm.clusters()
    for element, job in enumerate(runs):
        for step, (run, log) in enumerate(zip(job, array.folders, strict=True)):
            yield ledger.Job(
                number=run.number,
                name=array.name,
                element=element if len(runs) > 1 else None,
                id=None,
                label=run.request.config.label,
                shape=str(run.request.shape),
                overrides=list(run.request.overrides),
                directory=run.subdirectory,
                log=str(log),
                step=step if len(job) > 1 else None,
                cluster=cluster,
            )


def _label(array: Sequence[Sequence[Opened]]) -> str:
    first, *others = (run for job in array for run in job)
    return "sweep" if others else store.file_name(first.request.config.label)  # labels may be any text


def _take_back(names: Sequence[str]) -> None:
    """Cancel jobs by name, as SLURM may have accepted an array without being able to report it."""
    try:
        if canceled := slurm.cancel_named(names):
            echo(f"canceled what SLURM had taken already: {' '.join(canceled)}", sys.stderr)
    except SlurmError as error:
        how = f"look with squeue --name={','.join(names)}"
        echo(f"SLURM may have jobs of this command: {error}; {how}", sys.stderr)


def _write_off(sweep: Path, jobs: Sequence[Opened], error: BaseException) -> None:
    """Record the failed submission in the records of its runs."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    cause = failure.of_launcher(record.NOT_SUBMITTED, f"nothing was submitted: {words[-1]}")
    for job in jobs:
        with suppress(OSError, store.Damaged):  # on a full disk the records stay open, which is still true
            status.conclude(sweep, job.subdirectory, cause)


def _search_path() -> Iterator[str]:
    """Yield lines for the search path of a user's model: beside ``train.py`` and in this directory, as by hand."""
    yield f"export {search_path.FOLDER}={shlex.quote(str(Path.cwd()))}"
    script = Path(sys.argv[0]).resolve()
    if script.name == "train.py":
        yield f"export PYTHONPATH={shlex.quote(str(script.parent))}${{PYTHONPATH:+:$PYTHONPATH}}"


def report_refused(runs: Iterable[Request]) -> int:
    """Print why runs are refused; return exit status 0 if none is."""
    refused = [run for run in runs if run.refused]
    for run in refused:
        echo(f"{run.config.label}: {run.refused}", sys.stderr)
    return int(bool(refused))


def show_test_only(runs: Sequence[Request], options: Mapping[str, Any]) -> int:
    """Test the jobs with SLURM, for ``cluster.submit=test``, and print its answers; nothing is submitted or written.

    ``options`` are as for :meth:`Array.script`. Return exit status 0 if every job would be accepted.
    """
    exit_status = report_refused(runs)
    for array, answer in _answers(runs, options):
        each = f" of {plural(len(array[0]), 'run')}" if len(array[0]) > 1 else ""
        what = f"{array[0][0].shape} ({plural(len(array), 'job')}{each})"
        if isinstance(answer, SlurmError):
            echo(f"{what}: SLURM would refuse it: {answer}", sys.stderr)
            exit_status = 1
        else:
            echo(f"{what}: {answer}")
    return exit_status


def require_accepted(runs: Sequence[Request], options: Mapping[str, Any]) -> None:
    """Raise a ConfigError with SLURM's message for every array that it would refuse."""
    found = []
    for array, answer in _answers(runs, options):
        if isinstance(answer, SlurmError):
            first, *_ = array[0]
            count = f" ({len(array)} jobs)" if len(array) > 1 else ""
            rule = f"nothing was submitted, because SLURM refuses {first.shape}{count}: {answer}"
            found.append(Problem("cluster", first.cluster.name, rule))
    require(*found)


def _answers(
    runs: Sequence[Request], options: Mapping[str, Any]
) -> Iterator[tuple[list[list[Request]], str | SlurmError]]:
    """Yield each array of jobs with SLURM's answer to its script."""
    for jobs, own in _divided(runs, runs, options):
        try:
            answer: str | SlurmError = slurm.test(Array(jobs, "ptdbench", Path()).script(own))
        except SlurmError as error:
            answer = error
        yield jobs, answer
