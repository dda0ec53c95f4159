"""Hydra's launchers, extended: a run is its record first, and each job gets the shape that its own config asks for.

Hydra's launchers make a run's directory before anybody knows what came of it, run each job of an array in one shape, or
start all jobs of a sweep on this machine at once. These open the record of a run together with its directory, submit
one array for each shape, and start one job after the other. Hydra finds them under its own names,
``hydra/launcher=basic``, ``submitit_local`` and ``submitit_slurm`` (see :func:`install`).
"""

from __future__ import annotations

import os
import secrets
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import submitit
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher import submitit_launcher as plugin
from omegaconf import DictConfig, open_dict
from submitit.core.utils import DelayedSubmission

from ptdbench.launch import leaving, local, slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.launch.world import discover
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import failure, ledger, record, store
from ptdbench.setup.compose import of_sweep
from ptdbench.sweep import submission, watch
from ptdbench.sweep.agenda import Agenda, Opened
from ptdbench.terminal import say


def install(agenda: Agenda) -> None:
    """Put these in the place of Hydra's and the plugin's, to carry out ``agenda``."""
    known = Plugins.instance().class_name_to_class
    # It would compose every job just to see whether it can be, which compose_all has seen. Not a subclass: Hydra loads
    # the module of this class twice, and the subclass of one would call the other.
    sweeper = known["hydra._internal.core_plugins.basic_sweeper.BasicSweeper"]
    sweeper.validate_batch_is_legal = lambda *_: None  # type: ignore[attr-defined]
    if not agenda.searches:
        sweeper.split_arguments = staticmethod(lambda _, size: agenda.batches(size))  # type: ignore[attr-defined]
    theirs: dict[str, type[OneAfterTheOther | _Launcher]] = {
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher": OneAfterTheOther,
        f"{plugin.__name__}.SlurmLauncher": SlurmLauncher,
        f"{plugin.__name__}.LocalLauncher": LocalLauncher,
    }
    for name, ours in theirs.items():
        known[name] = ours
        ours.agenda = agenda


class OneAfterTheOther(Launcher):
    """Runs the jobs of a sweep in this process, each after its record was opened."""

    agenda: ClassVar[Agenda] = Agenda()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what Hydra hands over."""
        self._hydra_context, self._function, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Carry out a batch of jobs; how each went is in its record."""
        setup_globals()
        sweep_directory, template = _place(self._config)
        if self.agenda.is_settled(sweep_directory, initial_job_idx):
            return []
        outcomes = []
        if not self.agenda.searches:
            numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
            self.agenda.outlook.expect(self.agenda.to_do(sweep_directory, template, numbers))
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            composed = partial(self._composed, number, overrides)
            self.agenda.add(number, composed, overrides)
            if self.agenda.open(sweep_directory, template, number, overrides):
                job = composed()
                with open_dict(job.hydra):
                    job.hydra.job.id = job.hydra.job.num = number
                _carry_out(self._hydra_context, self._function, job)
            outcomes.append(self.agenda.outcome(self.agenda.directory(sweep_directory, template, number), overrides))
        return outcomes

    def _composed(self, number: int, overrides: Sequence[str]) -> DictConfig:
        if self.agenda.searches:
            return _composed(self._hydra_context, self._config, overrides)
        return of_sweep(self.agenda.whole[number], self._config, self.agenda.requests[number].block)


@dataclass(frozen=True)
class Task:
    """What a job runs: one run of the sweep, in every task of the job.

    Attributes:
        hydra_context: Hydra's loader of configurations.
        config: The sweep's configuration.
        function: The ``@hydra.main`` function.
        singletons: Hydra's global state.
        environment: Variables of the submitting process that the job must see; ``None`` for one it must not.
        typed: ``sys.argv`` of the submitting process: what the job says of how to go on names the same program.
    """

    hydra_context: HydraContext
    config: DictConfig
    function: TaskFunction
    singletons: Mapping[type, Any]
    environment: Mapping[str, str | None]
    typed: Sequence[str]

    def __call__(self, overrides: Sequence[str], subdirectory: str, number: int) -> None:
        """Run it; ends the process with an exit status other than 0 where the run failed."""
        for name, value in self.environment.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        sys.argv[:] = self.typed
        local.stop_on_signals()  # submitit's own handlers ignore SIGTERM, and requeue without being asked
        Singleton.set_state(dict(self.singletons))
        setup_globals()
        composed = _composed(self.hydra_context, self.config, overrides)
        world = discover(os.environ)
        with open_dict(composed.hydra):
            composed.hydra.job.id = submitit.JobEnvironment().job_id
            composed.hydra.job.num = number
            composed.hydra.sweep.subdir = subdirectory
            if world and world.rank > 0:  # all ranks share the directory, and one writes into it
                composed.hydra.output_subdir = None
        try:
            _carry_out(self.hydra_context, self.function, composed)
        finally:
            leaving.soon()


class _Launcher(plugin.BaseSubmititLauncher):
    """What submitit's launchers have in common."""

    agenda: ClassVar[Agenda] = Agenda()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Carry out a batch of jobs; how each went is in its record."""
        assert self.config is not None
        assert self.hydra_context is not None
        sweep_directory, template = _place(self.config)
        if self.agenda.is_settled(sweep_directory, initial_job_idx):
            return []
        batch = list(enumerate(job_overrides, start=initial_job_idx))
        for number, overrides in batch:
            self.agenda.add(number, partial(_composed, self.hydra_context, self.config, overrides), overrides)
        opened = [self.agenda.open(sweep_directory, template, number, overrides) for number, overrides in batch]
        self._run(sweep_directory, [job for job in opened if job])
        directories = [self.agenda.directory(sweep_directory, template, number) for number, _ in batch]
        return [self.agenda.outcome(*one) for one in zip(directories, job_overrides, strict=True)]

    @abstractmethod
    def _run(self, sweep_directory: Path, jobs: Sequence[Opened]) -> None:
        """Carry out the jobs that were not refused."""

    def _task(self, environment: Mapping[str, str | None]) -> Task:
        assert self.hydra_context is not None
        assert self.config is not None
        assert self.task_function is not None
        return Task(self.hydra_context, self.config, self.task_function, Singleton.get_state(), environment, sys.argv)


class SlurmLauncher(_Launcher):
    """Submits one array of jobs for each shape; nothing stays in the queue unless all were taken."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._told: set[str] = set()  # of which runs all has been shown, where batches follow each other

    def _run(self, sweep_directory: Path, jobs: Sequence[Opened]) -> None:
        arrays = [
            [[jobs[place] for place in places] for places in array]
            for array in submission.arrays([job.request for job in jobs])
        ]
        names = [f"ptdbench-{_label(array)}-{secrets.token_hex(4)}" for array in arrays]
        submitted: list[ledger.Job] = []
        try:
            for name, array in zip(names, arrays, strict=True):
                with local.deferred():  # a signal in the middle of it would leave jobs that nobody knows
                    submitted += self._submit(sweep_directory, name, array)
        except BaseException as error:
            _take_back(names)
            _write_off(sweep_directory, jobs, error)
            if isinstance(error, SlurmError):
                rule = f"nothing was submitted: {str(error).strip().splitlines()[-1]}"
                raise ConfigError([Problem("cluster", jobs[0].request.cluster.name, rule)]) from None
            raise
        if submitted:
            watch.announce(sweep_directory, sorted(submitted, key=lambda job: job.number))
        if self.agenda.is_open and (submitted or self.agenda.queued - self._told):  # what comes next depends on them
            self._told = watch.follow(sweep_directory, self._told)

    def _submit(self, sweep_directory: Path, name: str, array: Sequence[Sequence[Opened]]) -> list[ledger.Job]:
        """Submit the jobs of an array, each with its runs; they are noted down before and after."""
        requests = [[run.request for run in job] for job in array]
        folder = submission.folder(requests[0][0], sweep_directory)
        text = submission.script(requests, name, folder, self.params)
        noted = [
            ledger.Job(
                number=run.number,
                name=name,
                element=element if len(array) > 1 else None,
                id=None,
                label=run.request.label,
                shape=str(run.request.shape),
                overrides=list(run.request.overrides),
                directory=run.subdirectory,
                log=str(log),
                step=step if len(job) > 1 else None,
            )
            for element, job in enumerate(array)
            for step, (run, log) in enumerate(zip(job, submission.folders(folder, len(job)), strict=True))
        ]

        def note(ids: list[str]) -> None:
            noted[:] = [ledger.with_id(run, ids[run.element or 0]) for run in noted]
            ledger.add(sweep_directory, noted)

        ledger.add(sweep_directory, noted)
        task = self._task({})
        calls = [[DelayedSubmission(task, *run.arguments) for run in job] for job in array]
        submission.submit(text, name, calls, folder, note)
        return noted


def _label(array: Sequence[Sequence[Opened]]) -> str:
    """What the queue shows of an array."""
    first, *others = (run for job in array for run in job)
    return "sweep" if others else store.file_name(first.request.label)  # which may be any text


def _take_back(names: Sequence[str]) -> None:
    """End what SLURM may have taken, by name: it may have taken an array without being able to say so."""
    try:
        if canceled := slurm.cancel_named(names):
            say(f"canceled what SLURM had taken already: {' '.join(canceled)}", sys.stderr)
    except SlurmError as error:
        how = f"look with squeue --name={','.join(names)}"
        say(f"SLURM may have jobs of this command: {error}; {how}", sys.stderr)


def _write_off(sweep_directory: Path, jobs: Sequence[Opened], error: BaseException) -> None:
    """Let the records of runs whose submission was given up say so."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    cause = failure.of_launcher("NotSubmitted", f"nothing was submitted: {words[-1]}")
    for job in jobs:
        directory = sweep_directory / job.subdirectory
        with suppress(OSError, store.Damaged):  # where the disk is full the records stay open, which is no lie
            done = record.failed(store.load_record(directory), cause)
            store.write_record(directory, done)
            store.append_result(sweep_directory, done)


class LocalLauncher(_Launcher):
    """Runs one job after the other, each in a process of its own that starts its ranks itself."""

    def _run(self, sweep_directory: Path, jobs: Sequence[Opened]) -> None:
        # submitit hides every GPU that it was not asked for.
        task = self._task({"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")})
        executor = submitit.AutoExecutor(folder=str(sweep_directory / "logs" / "%j"), cluster="local")
        executor.update_parameters(timeout_min=_YEAR_MINUTES, tasks_per_node=1, gpus_per_node=0)
        for job in jobs:
            say(f"{job.number} {job.request.label}: started", sys.stderr)
            submitted = executor.submit(task, *job.arguments)
            try:
                submitted.wait()
            except BaseException:
                submitted.cancel()
                submitted.wait()
                raise
            finally:
                watch.settle(sweep_directory, job.subdirectory, str(submitted.paths.stderr))


_YEAR_MINUTES = 60 * 24 * 365


def _carry_out(context: HydraContext, function: TaskFunction, composed: DictConfig) -> None:
    """Let Hydra run one job of a sweep in this process; raises what the job raised."""
    done = run_job(
        hydra_context=context,
        task_function=function,
        config=composed,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    _ = done.return_value  # raises what Hydra has caught


def _place(config: DictConfig) -> tuple[Path, str]:
    """The sweep's directory, and the template of the names of its runs' directories."""
    return Path(config.hydra.sweep.dir), config.hydra.sweep._get_node("subdir")._value()


def _composed(context: HydraContext, config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a job, as Hydra composes it when it runs the job."""
    return context.config_loader.load_sweep_config(config, list(overrides))
