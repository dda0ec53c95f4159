"""The agenda of a command line: which runs to execute, their directories, and their records."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.files import create_atomically, write_json
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records import failure, ownership, record, store
from ptdbench.records.effects import options_affecting
from ptdbench.records.run_record import RunRecord, typed
from ptdbench.records.schema import Draft, Written
from ptdbench.report.display import Heading
from ptdbench.report.labels import titles
from ptdbench.setup import hydra_side, run_spec
from ptdbench.setup.compose import Composed
from ptdbench.setup.runs import Run
from ptdbench.sweep.blocks import StoppingRule
from ptdbench.terminal import echo


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
            drafts = [typed(draft(run, Path())) for run in distinct.values()]
            self._titles = dict(zip(distinct, titles(drafts), strict=True))
        later = sum(following > number for following in self.to_come)
        return Heading(
            self._titles[run.alternative],
            number + 1,
            len(self._runs) if self._is_whole else None,
            later * fmean(self._seconds.values()) if later and self._seconds else None,
        )


def draft(run: Run, directory: Path) -> Draft:
    """Return the record of a run before its start, with its summary and the variables of its environment."""
    written = record.begin(run.config.resolved, directory, {}, run.overrides)
    written |= {"variables": dict(run.environment), **(run.summary or {})}
    return record.failed(written, failure.describe(run.refused, rank=-1)) if run.refused else written


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
        if composed.searches:
            return Agenda(directory, only=only, queued=queued, searches=True)
        repeat = composed.configs[0].repeat
        stopping = StoppingRule(repeat) if repeat.runs == "auto" and repeat.block is None else None
        return Agenda(directory, [*runs], only, queued, composed.is_sweep, stopping=stopping)

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
            hydra_side.write_files(run, self.place(run), self.directory if self.is_sweep else None)
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
        return self._is_done(run)

    def _is_done(self, run: Run) -> bool:
        """Return whether a run is ok, or has failed in a search, whose sweeper would otherwise draw other values."""
        is_there = (self.place(run) / store.RECORD).exists()
        return is_there and record.is_done(self.place(run), run.config.resolved, or_failed=self.searches)

    def _write(self, run: Run) -> None:
        directory = self.place(run)
        written = draft(run, directory)
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
