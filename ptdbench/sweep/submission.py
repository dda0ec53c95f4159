"""Submission of runs to SLURM as job arrays: the script is first tested with SLURM, then submitted unchanged."""

import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ptdbench import search_path, terminal
from ptdbench.grouping import grouped
from ptdbench.launch import local, slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.planning.tries import needs_search
from ptdbench.problems import ConfigError, Problem, as_typed, differing, require
from ptdbench.records import failure, ledger, store
from ptdbench.records.effects import leaves
from ptdbench.records.run_record import NOT_SUBMITTED
from ptdbench.setup.config import Slurm
from ptdbench.setup.hydra_interface import LAUNCHER_OPTIONS
from ptdbench.setup.runs import Run, Shape
from ptdbench.sweep import resources, status
from ptdbench.sweep.resources import Step, in_container, mounted_folders, outermost
from ptdbench.terminal import echo, plural

#: Name of a rank's log, without ``.out`` or ``.err``, with SLURM's patterns for the ids of job and task.
LOG = "%j_%t_log"

#: The id of a job, for use in its script, as squeue prints it.
_JOB = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"


def arrays(runs: Sequence[Run]) -> list[list[list[Run]]]:
    """Group runs into arrays of jobs; refused runs are in no job.

    Returns:
        For each array its jobs, and for each job its runs: one, or with ``sweep.same_nodes`` all of a block of repeats.
        Jobs of an array have the same shape and all other sbatch options in common.

    Raises:
        ConfigError: Runs of one job request different resources, or a job with several runs would be requeued.
    """
    jobs = grouped(
        (("block", run.block) if run.config.sweep.same_nodes else run.number, run) for run in runs if not run.refused
    )
    alike = grouped(((_request(job), *(needs_search(run.config) for run in job)), job) for job in jobs.values())
    return list(alike.values())


def _request(job: Sequence[Run]) -> str:
    """Return everything that sbatch is given for the runs of a job, as text to compare."""
    texts = set()
    for run in job:
        cluster, shape = run.cluster, run.shape
        assert shape is not None
        lines = (shape, resources.flags(cluster, shape, ""), resources.setup_lines(cluster, shape))
        texts.add(repr((lines, cluster.srun_args, cluster.container)))
    if len(texts) > 1:
        raise ConfigError(list(_differences(job)))
    if len(job) > 1 and (requeue := job[0].cluster.requeue):
        rule = "with sweep.same_nodes=true a job has several runs, and would begin again with the first one"
        remedy = "omit one of them, and sweep.resume executes what is missing"
        require(Problem("cluster.requeue", requeue, rule, remedy))
    return texts.pop()


def _differences(job: Sequence[Run]) -> Iterator[Problem]:
    rule = "with sweep.same_nodes=true all runs are in one job, which has one value"
    clusters = [dict(leaves(run.config.resolved["cluster"], "cluster.")) for run in job]
    yield from differing(clusters, rule, "give one value, or start a sweep for each")
    shapes = dict.fromkeys(run.shape for run in job if run.shape)
    if len(shapes) > 1:
        named = ", ".join(f"{shape} with {plural(shape.gpus_per_node, 'GPU')} a node" for shape in shapes)
        rule = f"one job has one shape, and these runs have several: {named}"
        yield Problem("sweep.same_nodes", as_typed(True), rule, "start a sweep for each")


@dataclass(frozen=True)
class Array:
    """Jobs with the same resources, submitted by one script."""

    jobs: Sequence[Sequence[Run]]  #: The runs of each job, equally many in all of them.
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
        return self.staging / "%j"

    @property
    def folders(self) -> list[Path]:
        """Folders for the output of each run of a job: the job's own folder if it has only one run."""
        runs = len(self.jobs[0])
        return [self.output] if runs == 1 else [self.output / str(number) for number in range(runs)]

    @property
    def staging(self) -> Path:
        """The common parent folder of all jobs' output."""
        return (self.sweep / "logs").absolute()

    @cached_property
    def used(self) -> list[Path]:
        """The folders of this machine that the runs use, to be mounted in their container."""
        runs = chain.from_iterable(self.jobs)
        return outermost(path for run in runs for path in mounted_folders(run.config, self.sweep))

    def script(self, options: Mapping[str, Any]) -> str:
        """Return the script; ``options`` are the launcher's own, those of :data:`LAUNCHER_OPTIONS`."""
        count, cluster = len(self.jobs), self.cluster
        chosen = {name: value for name, value in options.items() if value is not None}
        parallel, delay = (int(chosen.get(name, default)) for name, default in LAUNCHER_OPTIONS.items())
        flags: dict[str, str | int] = {"output": self._by_pattern(self.staging / ledger.LOG_OF_SLURM)}
        flags |= {"open_mode": "append", "signal": f"USR2@{min(delay, 6 * cluster.time_minutes)}"}
        if count > 1:
            flags["array"] = f"0-{count - 1}%{min(parallel, count)}"
        # The script creates the folders for its output, and moves its own output there: SLURM creates no folders, and
        # this process learns the job's id only when the job may already have started.
        made = " ".join(_in_script(str(folder)) for folder in self.folders)
        out, errors = (_in_script(f"{self.output / LOG}.{kind}".replace("%t", "0")) for kind in ("out", "err"))
        # What was typed here, and the search path of a user's model.
        variables = {**terminal.as_variable(sys.argv), **search_path.inherited()}
        places = ((self.sweep / run.subdirectory).absolute() for job in self.jobs for run in job)
        setup = [
            "unset SLURM_JWT",  # it may have expired by the time the job starts: srun would be refused
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            f"ptdbench_runs=({shlex.join(map(str, places))})",  # of one job after the other
            f'ptdbench_job="{_JOB}"',
            f"mkdir -p {made} && exec >> {out} 2>> {errors}",
        ]
        steps = [self._run(number, folder) for number, folder in enumerate(self.folders)]
        after = []
        if cluster.requeue and cluster.container.image:
            request = f"{shlex.quote(str(self.sweep.absolute()))}/{slurm.REQUEUE}$SLURM_JOB_ID"
            after.append(f'if rm {request} 2> /dev/null; then scontrol requeue "{_JOB}"; fi')
        return resources.script(cluster, self._shape, self.name, steps, flags, setup, after)

    def _run(self, number: int, folder: Path) -> Step:
        """Return the step that executes a run of a job; if needed, the script first searches its micro-batch."""
        place = f"${{SLURM_ARRAY_TASK_ID:-0}} * {len(self.jobs[0])} + {number}"
        step = self._step(folder, f'"${{ptdbench_runs[{place}]}}"')
        if not needs_search(self.jobs[0][number].config):
            return step
        shape, tries = self._shape, shlex.join(resources.srun(self.cluster, self._step(folder)))
        options = [f"--shape={shape.nodes}x{shape.ranks_per_node}x{shape.gpus_per_node}", f"--tries={tries}"]
        return replace(step, before=[sys.executable, "-u", *search_path.module("ptdbench"), "run", *options])

    def _step(self, folder: Path, directory: str = "") -> Step:
        """Return the step of a run in every task of a job, in its container and with its output in a folder."""
        out, errors = (self._by_pattern(folder / f"{LOG}.{kind}") for kind in ("out", "err"))
        command = [sys.executable, "-u", *search_path.module("ptdbench"), "run"]
        flags = ["--unbuffered", "--open-mode=append", f"--output={out}", f"--error={errors}"]
        return in_container(Step(command, flags, operand=directory), self.cluster.container, self._shape, self.used)

    def _by_pattern(self, path: Path) -> str:
        """Return a path with SLURM's patterns: in an array, ``%j`` does not name the element."""
        return str(path).replace("%j", "%A_%a") if len(self.jobs) > 1 else str(path)


def _in_script(path: str) -> str:
    """Quote a path for a script, with a variable in place of ``%j``."""
    return '"$ptdbench_job"'.join(part and shlex.quote(part) for part in path.split("%j"))


def check_path(sweep_directory: Path) -> None:
    """Raise ConfigError for the directory of a sweep whose path SLURM would read as a pattern, or as lines."""
    path = str(sweep_directory.resolve())
    if "%" in path or "\\" in path or terminal.has_controls(path):
        rule = r"%, \ and line breaks in the path of a job's output mean something else to SLURM"
        require(Problem("hydra.sweep.dir", path, rule, "give one without them"))


def submit(directory: Path, runs: Sequence[Run], options: Mapping[str, Any]) -> list[ledger.Job]:
    """Submit the arrays of jobs; if SLURM refuses one, all are cancelled.

    Returns:
        The runs with their jobs, in the order of their numbers.

    Raises:
        ConfigError: SLURM refused them; their records say so.
        OSError: The folder for their output cannot be written to.
    """
    arrays_ = [Array(jobs, f"ptdbench-{_label(jobs)}-{secrets.token_hex(4)}", directory) for jobs in arrays(runs)]
    submitted: list[ledger.Job] = []
    try:
        for array in arrays_:
            with local.deferred():  # a signal during submission would leave unknown jobs
                submitted += _submit(array, options)
    except BaseException as error:
        with local.deferred():  # a second signal would leave jobs that are not cancelled
            echo("canceling what was submitted…", sys.stderr)
            _take_back([array.name for array in arrays_])
            _write_off(directory, runs, error)
        if isinstance(error, SlurmError):
            rule = f"nothing was submitted: {str(error).strip().splitlines()[-1]}"
            raise ConfigError([Problem("cluster", runs[0].cluster.name, rule)]) from None
        raise
    return sorted(submitted, key=lambda job: job.number)


def _submit(array: Array, options: Mapping[str, Any]) -> list[ledger.Job]:
    """Submit the jobs of an array; the ledger records them before and after."""
    text = array.script(options)
    jobs = list(_to_note(array))
    ledger.add(array.sweep, jobs)
    array.staging.mkdir(parents=True, exist_ok=True)
    identity = slurm.submit(text)
    ids = [identity if job.element is None else f"{identity}_{job.element}" for job in jobs]
    jobs = list(map(ledger.with_id, jobs, ids))
    ledger.add(array.sweep, jobs)
    script = Path(str(array.output).replace("%j", ids[0])) / f"{identity}_submission.sh"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    return jobs


def _to_note(array: Array) -> Iterator[ledger.Job]:
    cluster = None
    with suppress(SlurmError, ValueError):  # with several clusters, it is unknown which one takes the jobs
        (cluster,) = slurm.clusters()
    for element, job in enumerate(array.jobs):
        for step, (run, log) in enumerate(zip(job, array.folders, strict=True)):
            assert run.number is not None  # a job is a sweep's
            yield ledger.Job(
                number=run.number,
                name=array.name,
                element=element if len(array.jobs) > 1 else None,
                id=None,
                shape=str(run.shape),
                directory=run.subdirectory,
                log=str(log),
                step=step if len(job) > 1 else None,
                cluster=cluster,
            )


def _label(jobs: Sequence[Sequence[Run]]) -> str:
    first, *others = (run for job in jobs for run in job)
    return "sweep" if others else store.file_name(first.config.label)  # labels may be any text


def _take_back(names: Sequence[str]) -> None:
    """Cancel jobs by name, as SLURM may have accepted an array without being able to report it."""
    try:
        if canceled := slurm.cancel_named(names):
            echo(f"canceled what SLURM had taken already: {' '.join(canceled)}", sys.stderr)
    except SlurmError as error:
        hint = f"look with squeue --name={','.join(names)}"
        echo(f"SLURM may have jobs of this command: {error}; {hint}", sys.stderr)


def _write_off(sweep: Path, runs: Sequence[Run], error: BaseException) -> None:
    words = str(error).strip().splitlines() or [type(error).__name__]
    cause = failure.Failure(-1, NOT_SUBMITTED, f"nothing was submitted: {words[-1]}")
    for run in runs:
        with suppress(OSError, store.Damaged):  # on a full disk the records stay open, which is still true
            status.conclude(sweep, run.subdirectory, cause)


def report_refused(runs: Iterable[Run]) -> int:
    """Print why runs are refused; return exit status 0 if none is."""
    refused = [run for run in runs if run.refused]
    for run in refused:
        echo(f"{run.config.label}: {run.refused}", sys.stderr)
    return int(bool(refused))


def show_test_only(runs: Sequence[Run], options: Mapping[str, Any]) -> int:
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


def require_accepted(runs: Sequence[Run], options: Mapping[str, Any]) -> None:
    """Raise a ConfigError with SLURM's message for every array that it would refuse."""
    problems = []
    for array, answer in _answers(runs, options):
        if isinstance(answer, SlurmError):
            first, *_ = array[0]
            count = f" ({len(array)} jobs)" if len(array) > 1 else ""
            rule = f"nothing was submitted, because SLURM refuses {first.shape}{count}: {answer}"
            problems.append(Problem("cluster", first.cluster.name, rule))
    require(*problems)


def _answers(runs: Sequence[Run], options: Mapping[str, Any]) -> Iterator[tuple[list[list[Run]], str | SlurmError]]:
    """Yield each array of jobs with SLURM's answer to its script."""
    for jobs in arrays(runs):
        try:
            answer: str | SlurmError = slurm.test(Array(jobs, "ptdbench", Path()).script(options))
        except SlurmError as error:
            answer = error
        yield jobs, answer
