"""Hydra's submitit launchers, extended: each job of a sweep gets the shape that its own config asks for.

The launchers of the plugin submit one array of one shape and run every job on it, or start all jobs of a sweep on this
machine at once. These submit one array for each shape, or start one job after the other. Hydra finds them under
the plugin's own names, ``hydra/launcher=submitit_slurm`` and ``submitit_local`` (see :func:`install`).
"""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import submitit
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher import submitit_launcher as plugin
from omegaconf import DictConfig, open_dict
from submitit.core.utils import FailedJobError, FailedSubmissionError

from ptdbench.launch import leaving, local, resources, slurm
from ptdbench.launch.slurm import SlurmError
from ptdbench.launch.world import discover
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import failure, record, store
from ptdbench.sweep import ledger, watch
from ptdbench.sweep.requests import Request

#: What a person sets for SLURM's commands; all other variables of SLURM describe a job that this is not.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_")


def install(requests: Sequence[Request]) -> None:
    """Put these launchers in the place of the plugin's.

    Args:
        requests: The runs of the command line, in the order in which Hydra will ask for them.
    """
    known = Plugins.instance().class_name_to_class
    for ours, theirs in ((SlurmLauncher, plugin.SlurmLauncher), (LocalLauncher, plugin.LocalLauncher)):
        known[f"{theirs.__module__}.{theirs.__qualname__}"] = ours
        ours.requests = requests


@dataclass(frozen=True)
class Task:
    """What a job runs: one run of the sweep, in every task of the job.

    Attributes:
        hydra_context: Hydra's loader of configurations.
        config: The sweep's configuration.
        function: The ``@hydra.main`` function.
        singletons: Hydra's global state.
        environment: Variables of the submitting process that the job must see; ``None`` for one it must not.
    """

    hydra_context: HydraContext
    config: DictConfig
    function: TaskFunction
    singletons: Mapping[type, Any]
    environment: Mapping[str, str | None]

    def __call__(self, overrides: Sequence[str], subdirectory: str, number: int) -> None:
        """Run it; ends the process with an exit status other than 0 where the run failed."""
        for name, value in self.environment.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        local.stop_on_signals()  # submitit's own handlers let SIGTERM pass unheard, and requeue without being asked
        Singleton.set_state(dict(self.singletons))
        setup_globals()
        composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        world = discover(os.environ)
        with open_dict(composed.hydra):
            composed.hydra.job.id = submitit.JobEnvironment().job_id
            composed.hydra.job.num = number
            composed.hydra.sweep.subdir = subdirectory
            if world and world.rank > 0:  # all ranks share the directory, and one writes into it
                composed.hydra.output_subdir = None
        try:
            done = run_job(
                hydra_context=self.hydra_context,
                task_function=self.function,
                config=composed,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            _ = done.return_value  # raises what Hydra has caught
        finally:
            leaving.soon()


class _Launcher(plugin.BaseSubmititLauncher):
    """What both have in common."""

    requests: ClassVar[Sequence[Request]] = ()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Carry out a batch of jobs; how each went is in its record."""
        assert self.config is not None
        sweep_directory = Path(self.config.hydra.sweep.dir)
        sweep_directory.mkdir(parents=True, exist_ok=True)
        template = self.config.hydra.sweep._get_node("subdir")._value()
        jobs = []
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            request = self.requests[number]
            name = request.subdirectory(template, number)
            directory = sweep_directory / name
            if store.is_done(directory, record.fingerprint(request.config.resolved)):
                continue  # the sweep goes on, and this run of it was ok
            directory.mkdir(parents=True, exist_ok=True)
            draft = record.begin(request.config.resolved, directory, {})
            if request.refused:
                draft = record.failed(draft, failure.describe(request.refused, rank=-1))
                store.append_result(sweep_directory, draft)
            elif (directory / store.RECORD).exists():  # done once more: its earlier result counts no longer
                store.append_result(sweep_directory, draft)
            store.write_record(directory, draft)
            if not request.refused:
                jobs.append(_Job(number, request, list(overrides), name))
        self._run(sweep_directory, jobs)
        return [_silent() for _ in job_overrides]

    @abstractmethod
    def _run(self, sweep_directory: Path, jobs: Sequence[_Job]) -> None:
        """Carry out the jobs that were not refused."""

    def _task(self, environment: Mapping[str, str | None]) -> Task:
        assert self.hydra_context is not None
        assert self.config is not None
        assert self.task_function is not None
        return Task(self.hydra_context, self.config, self.task_function, Singleton.get_state(), environment)


@dataclass(frozen=True)
class _Job:
    number: int
    request: Request
    overrides: list[str]
    subdirectory: str

    @property
    def arguments(self) -> tuple[list[str], str, int]:
        return self.overrides, self.subdirectory, self.number


class SlurmLauncher(_Launcher):
    """Submits one array for each shape, and follows the jobs unless ``cluster.submit=detach``."""

    def _run(self, sweep_directory: Path, jobs: Sequence[_Job]) -> None:
        submitted: list[ledger.Job] = []
        try:
            for array in _by_shape(jobs):
                submitted += self._submit(sweep_directory, array)
        except (SlurmError, FailedJobError, FailedSubmissionError) as error:
            slurm.cancel(job.id for job in submitted)
            print(_not_submitted(jobs[0], error), file=sys.stderr)
            raise SystemExit(1) from None  # Hydra would show a traceback of any other exception
        submitted.sort(key=lambda job: job.number)
        ledger.write(sweep_directory, submitted)
        watch.announce(sweep_directory, submitted)
        if submitted and jobs[0].request.cluster.submit == "wait":
            watch.follow(sweep_directory)

    def _submit(self, sweep_directory: Path, array: Sequence[_Job]) -> list[ledger.Job]:
        """Submit the jobs of one shape."""
        request = array[0].request
        cluster, shape = request.cluster, request.shape
        assert shape is not None
        log = cluster.log or str(sweep_directory / "logs" / "%j")
        executor = submitit.AutoExecutor(folder=log, cluster="slurm", slurm_max_num_timeout=0)
        flags = resources.flags(cluster, shape, f"ptdbench-{request.label}" if len(array) == 1 else "ptdbench")
        executor.update_parameters(
            nodes=shape.nodes,
            tasks_per_node=shape.ranks_per_node,
            timeout_min=cluster.time_minutes,
            slurm_setup=[f"export PYTHONPATH={_python_path()}", *resources.setup_lines(cluster, shape)],
            slurm_srun_args=["--kill-on-bad-exit=1", *cluster.srun_args],
            slurm_additional_parameters=flags,
            slurm_array_parallelism=self.params.get("array_parallelism", 256),
            slurm_signal_delay_s=min(self.params.get("signal_delay_s", 120), 6 * cluster.time_minutes),
            slurm_wckey=None,
        )
        task = self._task({})
        with _own_environment():
            jobs = executor.map_array(task, *zip(*(job.arguments for job in array), strict=True))
        return [
            ledger.Job(
                number=job.number,
                id=submitted.job_id,
                label=job.request.label,
                shape=str(shape),
                overrides=list(job.request.overrides),
                directory=job.subdirectory,
                log=str(submitted.paths.folder),
            )
            for job, submitted in zip(array, jobs, strict=True)
        ]


class LocalLauncher(_Launcher):
    """Runs one job after the other, each in a process of its own that starts its ranks itself."""

    def _run(self, sweep_directory: Path, jobs: Sequence[_Job]) -> None:
        # submitit hides every GPU that it was not asked for.
        task = self._task({"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")})
        executor = submitit.AutoExecutor(folder=str(sweep_directory / "logs" / "%j"), cluster="local")
        executor.update_parameters(timeout_min=_YEAR_MINUTES, tasks_per_node=1, gpus_per_node=0)
        for job in jobs:
            print(f"{job.number} {job.request.label}: started", file=sys.stderr)
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


def _by_shape(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """The jobs that may share an array: same nodes, same ranks, same everything that sbatch is told."""
    arrays: dict[str, list[_Job]] = {}
    for job in jobs:
        assert job.request.shape is not None
        cluster, shape = job.request.cluster, job.request.shape
        told = (shape, resources.flags(cluster, shape, ""), resources.setup_lines(cluster, shape), cluster.srun_args)
        arrays.setdefault(repr((*told, cluster.log)), []).append(job)
    yield from arrays.values()


@contextmanager
def _own_environment() -> Iterator[None]:
    """Without what would tell the job that it is another one: it inherits what the submitting shell exports."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    with submitit.helpers.clean_env():
        os.environ.update(kept)
        yield


def _python_path() -> str:
    """Where a model of the user's own may lie: beside ``train.py``, as when it is started by hand."""
    here = str(Path(sys.argv[0]).resolve().parent)
    return f"'{here}'${{PYTHONPATH:+:$PYTHONPATH}}"


def _not_submitted(job: _Job, error: Exception) -> ConfigError:
    words = str(error).strip().splitlines()
    return ConfigError([Problem("cluster", job.request.cluster.name, f"nothing was submitted: {words[-1]}")])


def _silent() -> JobReturn:
    """What Hydra is told of a job: that there is nothing to raise here."""
    return JobReturn(status=JobStatus.COMPLETED, _return_value=None)
