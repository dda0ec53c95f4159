"""The runs of a command line: the agenda, which says which to execute and opens their records, and its execution.

They are executed in this process, or by SLURM. They are known in advance, or one of Hydra's sweepers chooses them by
the results of earlier ones.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins import ptdbench_launcher
from ptdbench.checkpoints import checkpoint_dir
from ptdbench.files import create_atomically, write_json
from ptdbench.problems import ConfigError, Problem, first_line, require
from ptdbench.records import failure, ownership, record, store
from ptdbench.records.effects import options_affecting
from ptdbench.records.run_record import RunRecord, typed
from ptdbench.records.schema import Draft, Written
from ptdbench.report.display import Heading, headed
from ptdbench.report.labels import titles
from ptdbench.report.remarks import reason
from ptdbench.run import launched
from ptdbench.setup import hydra_interface, run_spec
from ptdbench.setup import runs as setup_runs
from ptdbench.setup.commandline import LAUNCHER, SWEEPER, as_written, quoted
from ptdbench.setup.compose import Composed
from ptdbench.setup.runs import Run
from ptdbench.sweep import requests
from ptdbench.sweep.blocks import StoppingRule
from ptdbench.terminal import echo


@dataclass(frozen=True)
class Agenda:
    """The runs of a command line, and which of them to execute; a single run is a sweep of one without a ledger."""

    directory: Path  #: The sweep's directory, or that of a single run.
    runs: list[Run] = field(default_factory=list)  #: The runs, in the order of execution.
    only: str | None = None  #: The directory, below the sweep's, of the only run to execute; ``None`` for all runs.
    #: Directories of runs whose jobs are still in the queue, which execute them.
    queued: frozenset[str] = frozenset()
    is_sweep: bool = True  #: Whether it is more than a single run.
    searches: bool = False  #: Whether Hydra's sweeper chooses runs by results: they are then added one by one.
    #: Decides after which block of repeats to stop; ``None`` if all runs are executed.
    stopping: StoppingRule | None = None
    skipped: list[str] = field(default_factory=list)  #: Runs that could not be executed in their directories.
    refused: list[Run] = field(default_factory=list)  #: Runs whose refusal was recorded.

    @staticmethod
    def of(
        composed: Composed, runs: Sequence[Run], directory: Path, only: str | None, queued: frozenset[str] = frozenset()
    ) -> Agenda:
        """Return the agenda of a command line."""
        repeat, searches = composed.configs[0].repeat, composed.searches
        stopping = StoppingRule(repeat) if repeat.runs == "auto" and repeat.block is None else None
        return Agenda(directory, [] if searches else [*runs], only, queued, composed.is_sweep, searches, stopping)

    @property
    def is_open(self) -> bool:
        """Whether results decide which runs are executed, so that their number is not known in advance."""
        return self.searches or self.stopping is not None

    @cached_property
    def eta(self) -> SweepEta:
        """The estimates for the runs that this process executes itself."""
        return SweepEta(self.runs, is_whole=not self.is_open)

    def batches(self) -> list[range]:
        """Return the numbers of the runs to execute in each batch: all, or a block if results are examined after it."""
        count = len(self.runs)
        size = sum(run.block == self.runs[0].block for run in self.runs) if self.stopping else count
        return [range(start, start + size) for start in range(0, count, size)]

    def is_settled(self, number: int) -> bool:
        """Return whether the runs from this number on are unnecessary, as enough is known about all configurations."""
        if self.stopping is None or self.only is not None:  # a single requested run is always executed
            return False
        return self.stopping(self.directory, self.runs[number].block or 0)

    def place(self, run: Run) -> Path:
        """Return the directory of a run."""
        return self.directory / run.subdirectory

    def open(self, number: int) -> Run | None:
        """Write the record of a run and Hydra's files, and return the run; ``None`` if it must not be executed.

        Runs that are done, in the queue or not requested are skipped, in a search also those that failed. Runs that
        another process executes, or that have checkpoints of other options, are skipped with a message.

        Raises:
            ConfigError: The run is one of a search or a single one, and it cannot be executed in its directory.
            OSError: The record cannot be written.
        """
        run = self.runs[number]
        if self.is_sweep and self._is_left_out(run):
            return None
        try:
            if run.summary:
                run_spec.require_same_shape(self.place(run), run.summary, run.config.general.reshape)
            self._write(run)
            hydra_interface.write_files(run, self.place(run), self.directory if self.is_sweep else None)
        except ConfigError as held:
            if self.searches or not self.is_sweep:  # the next runs depend on this one
                raise
            echo(f"{held}; skipped", sys.stderr)
            self.skipped.append(run.subdirectory)
            return None
        if run.refused:
            self.refused.append(run)
            return None
        return run

    def to_do(self, numbers: Iterable[int]) -> list[int]:
        """Return which of these runs will be executed, unless an earlier start of them is still in progress."""
        return [number for number in numbers if not (self.runs[number].refused or self._is_left_out(self.runs[number]))]

    def _is_left_out(self, run: Run) -> bool:
        if run.subdirectory in self.queued or self.only not in (None, run.subdirectory) or (run.refused and run.block):
            return True  # a refusal is the same in every block: one row is enough
        directory = self.place(run)
        # In a search a failed run is done, too: its sweeper would otherwise draw other values.
        return (directory / store.RECORD).exists() and record.is_done(directory, run.config.resolved, self.searches)

    def _write(self, run: Run) -> None:
        directory = self.place(run)
        written = _draft(run, directory)
        earlier = store.load_or_set_aside(directory)
        if earlier and self.is_sweep:
            self._compare(directory, earlier, written)
        if not create_atomically(directory, lambda folder, _: write_json(folder / store.RECORD, written)):
            ownership.open_record(directory, written)

    def _compare(self, directory: Path, earlier: RunRecord, draft: Written) -> None:
        """Report that a run was done with other options.

        Raises ConfigError if it would resume from their checkpoint, or replace a result that a search went by.
        """
        was, now = earlier.config, record.configuration(draft)
        if (other := record.work_difference(was, now)) is None:
            return
        if self.searches and not earlier.is_interrupted:
            rule = f"was done with other options, {other}, and the sweeper chooses other values now"
            require(Problem("directory", directory, rule, "start another search"))
        shape = options_affecting("shape")  # the checkpoint's own shape is compared separately
        if checkpoint_dir.latest_manifest(directory) and not record.same_where_both(was, now, shape):
            rule = f"has checkpoints of other options, {other}"
            require(Problem("directory", directory, rule, "remove them, or start another sweep"))
        if earlier.status == "ok" or earlier.steps:
            echo(f"{directory.name}: was done with other options, {other}; done again", sys.stderr)


class SweepEta:
    """The headings of a sweep's runs, with the remaining time estimated by the mean duration of successful runs.

    In a search, the runs are those chosen so far, and more will follow (``is_whole`` is false).
    """

    def __init__(self, runs: Sequence[Run], is_whole: bool = True) -> None:
        self._runs, self._is_whole = runs, is_whole
        self.to_come: Sequence[int] = ()  #: The runs that will be executed.
        self._seconds: dict[int, float] = {}
        self._titles: dict[int, str] = {}

    def ended(self, number: int, seconds: float, record: RunRecord) -> None:
        """Note the duration and the record of a run."""
        if record.status == "ok":
            self._seconds[number] = seconds

    def heading(self, number: int) -> Heading:
        """Return the heading of a run's display, with its place in the sweep."""
        run = self._runs[number]
        if run.alternative not in self._titles:  # a search adds some
            distinct = {run.alternative: run for run in self._runs}  # shared by repeats
            drafts = [typed(_draft(run, Path())) for run in distinct.values()]
            self._titles = dict(zip(distinct, titles(drafts), strict=True))
        later = sum(following > number for following in self.to_come)
        return Heading(
            self._titles[run.alternative],
            number + 1,
            len(self._runs) if self._is_whole else None,
            later * fmean(self._seconds.values()) if later and self._seconds else None,
        )


def run_all(agenda: Agenda, composed: Composed) -> None:
    """Execute runs that are known in advance, batch by batch, until the stopping rule ends a sweep."""
    execute = executor(agenda, composed)
    for numbers in agenda.batches():
        if agenda.is_settled(numbers[0]):
            return
        agenda.eta.to_come = agenda.to_do(numbers)
        execute(_opened(agenda, numbers))


def search(agenda: Agenda, composed: Composed) -> None:
    """Let the sweeper choose runs until it is done: execute each batch, and report the objectives to the sweeper.

    Raises:
        ConfigError: The sweeper failed, or a run that it chose cannot be composed or submitted.
    """
    execute = executor(agenda, composed)
    with composed.source.open():
        loader = GlobalHydra.instance().config_loader()
        handed = [f"{LAUNCHER}={ptdbench_launcher.NAME}", f"hydra.sweep.dir={quoted(str(agenda.directory))}"]
        sweep = composed.sweep(instead=handed)

        def execute_batch(job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
            for words in job_overrides:
                try:
                    whole = loader.load_sweep_config(sweep, list(words))
                except (HydraException, OmegaConfBaseException) as error:
                    rule = first_line(error)
                    raise ConfigError([Problem("command line", " ".join(words), rule)]) from None
                agenda.runs.append(requests.of_search(setup_runs.of_search(composed, whole, words, len(agenda.runs))))
            numbers = range(first, first + len(job_overrides))
            execute(_opened(agenda, numbers))
            return [_outcome(agenda, number) for number in numbers]

        Plugins.instance().register(ptdbench_launcher.HandOver)
        try:
            context = HydraContext(loader, None)  # type: ignore[arg-type]  # Hydra calls no callbacks here
            sweeper = Plugins.instance().instantiate_sweeper(
                config=sweep,
                hydra_context=context,
                task_function=execute_batch,  # type: ignore[arg-type]
            )
            sweeper.sweep(arguments=as_written(sweep.hydra.overrides.task))
        except (ConfigError, OSError):
            raise
        except Exception as error:
            rule = f"ended early: {' '.join(str(error).split())}"
            raise ConfigError([Problem(SWEEPER, composed.sweeper, rule)]) from error


#: Executes runs, each of which is opened when the iterator reaches it.
Executor = Callable[[Iterable[Run]], None]


def executor(agenda: Agenda, composed: Composed) -> Executor:
    """Return the executor that the command line's ``hydra/launcher`` selects."""
    if composed.launcher == "submitit_slurm":
        return _BySlurm(agenda, composed.launcher_options)
    return lambda runs: _in_this_process(agenda, runs)


def _draft(run: Run, directory: Path) -> Draft:
    """Return the record of a run before its start, with its summary and the variables of its environment."""
    written = record.begin(run.config.resolved, directory, {}, run.overrides)
    written |= {"variables": dict(run.environment), **(run.summary or {})}
    return record.failed(written, failure.describe(run.refused, rank=-1)) if run.refused else written


def _opened(agenda: Agenda, numbers: Iterable[int]) -> Iterator[Run]:
    """Open these runs lazily, without those that must not be executed."""
    return (run for number in numbers if (run := agenda.open(number)))


def _in_this_process(agenda: Agenda, runs: Iterable[Run]) -> None:
    """Execute runs in this process, and in the other ranks if a launcher started it.

    Failures are reported at once, as the table comes only after the last run.
    """
    from ptdbench.run import door

    for run in runs:
        directory, started = agenda.place(run), time.monotonic()
        launched.lead(directory)
        if run.number is None:
            door.run(directory)
            continue
        heading = agenda.eta.heading(run.number)
        with headed(heading):
            door.run(directory)
        ended = store.read_record(directory)
        agenda.eta.ended(run.number, time.monotonic() - started, ended)
        if ended.status != "ok":
            echo(f"{heading}: {reason(ended)}", sys.stderr)


class _BySlurm:
    """Submits runs as SLURM jobs; if later runs depend on their results, it follows the jobs until they end."""

    def __init__(self, agenda: Agenda, options: Mapping[str, object]) -> None:
        self._agenda, self._options = agenda, options
        self._shown: set[str] = set()  # runs that have been shown completely

    def __call__(self, runs: Iterable[Run]) -> None:
        from ptdbench.sweep import submission, watch

        submitted = submission.submit(self._agenda.directory, list(runs), self._options)
        if submitted:
            watch.announce(self._agenda.directory, submitted)
        if self._agenda.is_open and (submitted or self._agenda.queued - self._shown):
            self._shown = watch.follow(self._agenda.directory, self._shown)


def _outcome(agenda: Agenda, number: int) -> JobReturn:
    """Return, for the sweeper, the objective in a run's record, or why it has none."""
    words, directory = agenda.runs[number].overrides, agenda.place(agenda.runs[number])
    ended = store.read_record(directory)
    wanted = ended.option("objective", str)
    if (value := record.objective_value(ended, wanted)) is not None:
        return JobReturn(words, status=JobStatus.COMPLETED, _return_value=value)
    error = ValueError(f"{directory.name}: {ended.status}, so that it has no {wanted}")
    return JobReturn(words, status=JobStatus.FAILED, _return_value=error)
