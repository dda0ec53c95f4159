"""The agenda of a command line: which runs to execute, their directories, and their records."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.files import create_atomically, write_json
from ptdbench.launch.world import discover
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records import failure, ownership, record, store
from ptdbench.records.effects import options_affecting
from ptdbench.records.schema import Written
from ptdbench.report.display import Heading
from ptdbench.report.labels import titles
from ptdbench.setup import hydra_output, run_spec
from ptdbench.setup.compose import Composed
from ptdbench.sweep import blocks
from ptdbench.sweep.blocks import StoppingRule
from ptdbench.sweep.requests import Request
from ptdbench.terminal import echo

#: Prefix of the key by which ranks agree on opening a run.
OPENED = "opened"


class SweepEta:
    """The headings of a sweep's runs, with the remaining time estimated by the mean duration of successful runs.

    In a search, the requests are the runs so far, and more will follow (``is_whole`` is false).
    """

    def __init__(self, requests: Sequence[Request], is_whole: bool = True) -> None:
        self._requests, self._is_whole = requests, is_whole
        self.to_come: Sequence[int] = ()  #: The runs that will be executed.
        self._seconds: dict[int, float] = {}
        self._titles: list[str] = []

    def ended(self, number: int, seconds: float, written: Written) -> None:
        """Note the duration and the record of a run."""
        if written["status"] == "ok":
            self._seconds[number] = seconds

    def heading(self, number: int) -> Heading:
        """Return the heading of a run's display, with its place in the sweep."""
        if len(self._titles) < len(self._requests):  # a search has added some
            distinct = {id(request.whole): request for request in self._requests}  # shared by repeats
            drafts = [
                record.begin(request.config.resolved, Path(), {}, request.overrides)
                | dict(request.summary.fields if request.summary else {})
                for request in distinct.values()
            ]
            called = dict(zip(distinct, titles(drafts), strict=True))
            self._titles = [called[id(request.whole)] for request in self._requests]
        later = sum(one > number for one in self.to_come)
        return Heading(
            self._titles[number],
            number + 1,
            len(self._requests) if self._is_whole else None,
            later * fmean(self._seconds.values()) if later and self._seconds else None,
        )


@dataclass(frozen=True)
class Opened:
    """A run whose record is open, ready to be executed."""

    number: int  #: Its number in the sweep.
    request: Request  #: Its request.
    subdirectory: str  #: Its directory, below the sweep's.


@dataclass(frozen=True)
class Agenda:
    """The runs of a command line, and which of them to execute."""

    directory: Path  #: The sweep's directory.
    requests: list[Request] = field(default_factory=list)  #: The requests, in the order of execution.
    only: str | None = None  #: The directory, below the sweep's, of the only run to execute; ``None`` for all runs.
    #: Directories of runs whose jobs are still in the queue, which execute them.
    queued: frozenset[str] = frozenset()
    searches: bool = False  #: Whether Hydra's sweeper chooses runs by results: requests are then added one by one.
    #: Decides after which block of repeats to stop; ``None`` if all requests are executed.
    stopping: StoppingRule | None = None
    skipped: list[str] = field(default_factory=list)  #: Runs that could not be executed in their directories.
    refused: list[Request] = field(default_factory=list)  #: Runs of which only the refusal was recorded.
    _names: dict[int, str] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        composed: Composed,
        found: Sequence[Request],
        directory: Path,
        only: str | None,
        queued: frozenset[str] = frozenset(),
    ) -> Agenda:
        """Return the agenda of a command line."""
        if composed.searches:
            return Agenda(directory, only=only, queued=queued, searches=True)
        repeat = found[0].config.repeat
        stopping = StoppingRule(repeat) if repeat.runs == "auto" and repeat.block is None else None
        runs = [found[number].in_block(block) for number, block in blocks.order(len(found), repeat)]
        return Agenda(directory, runs, only, queued, False, stopping)

    @property
    def is_open(self) -> bool:
        """Whether results decide which runs are executed, so that their number is not known in advance."""
        return self.searches or self.stopping is not None

    @cached_property
    def eta(self) -> SweepEta:
        """The estimates for the runs that this process executes itself."""
        return SweepEta(self.requests, is_whole=not self.is_open)

    def batches(self, size: int | None) -> list[range]:
        """Return the numbers of the runs to execute in each batch, at most ``size`` per batch (``None``: no limit).

        A block is never split over batches if results are examined after each block, or if its runs share a job.
        """
        count = len(self.requests)
        of_block = sum(request.block == self.requests[0].block for request in self.requests)
        if self.stopping:
            size = of_block
        elif size and self.requests[0].config.sweep.same_nodes:
            size = max(1, size // of_block) * of_block
        return [range(start, min(start + (size or count), count)) for start in range(0, count, size or count)]

    def is_settled(self, number: int) -> bool:
        """Return whether the runs from this number on are unnecessary, as enough is known about all configurations."""
        if self.stopping is None or self.only is not None:  # a single requested run is always executed
            return False
        return self.stopping(self.directory, self.requests[number].block or 0)

    def subdirectory(self, number: int) -> str:
        """Return the directory of a run, below the sweep's."""
        if number not in self._names:
            self._names[number] = str(Path(self.requests[number].subdirectory(number)))
        return self._names[number]

    def open(self, number: int) -> Opened | None:
        """Open the record of a run; return ``None`` for a run that must not be executed.

        These are runs that are ok, that an earlier start is still executing, or that would resume in another shape or
        with other options; and in a search those that failed. A refused run gets a row in the results. With several
        ranks, rank 0 looks and writes, and if one rank refuses the run, for example because its node has less memory,
        all do: they would otherwise wait for that rank.

        Raises:
            ConfigError: The run is one of a search, which ends, and it cannot be executed in its directory.
            OSError: The record cannot be written.
        """
        request, name = self.requests[number], self.subdirectory(number)
        world, run = discover(os.environ), Opened(number, request, name)
        if world is None:
            return run if self._begin(run, request.refused) else None
        from ptdbench.launch import rendezvous

        try:
            begun = rendezvous.agree(f"{OPENED} {name}", world, lambda: str(self._begin(run, None)), request.refused)
        except ConfigError as refused:
            if world.rank == 0:
                self._begin(run, refused)
            return None
        return run if begun == str(True) else None

    def _begin(self, run: Opened, refused: ConfigError | None) -> bool:
        """Write the first files of a run, and return whether to execute it."""
        request, directory = replace(run.request, refused=refused), self.directory / run.subdirectory
        if self._is_left_out(run.subdirectory, request):
            if self._is_done(run.subdirectory, request):
                written = store.load_record(directory)
                if (run.subdirectory, written["status"]) not in self._counted:  # the run was killed before this
                    store.append_result(self.directory, written)
            return False
        try:
            if request.summary:
                run_spec.require_same_shape(directory, request.summary, request.config.general.reshape)
            self._write(directory, request)
            hydra_output.write_files(request.job(self.directory, run.number), directory)
        except ConfigError as held:
            if self.searches:  # the next runs depend on this one
                raise
            echo(f"{held}; skipped", sys.stderr)
            self.skipped.append(run.subdirectory)
            return False
        if refused:
            self.refused.append(request)
        return not refused

    def to_do(self, numbers: Iterable[int]) -> list[int]:
        """Return which of these runs will be executed, unless an earlier start of them is still in progress."""
        return [
            number
            for number in numbers
            if not self.requests[number].refused
            and not self._is_left_out(self.subdirectory(number), self.requests[number])
        ]

    def _is_left_out(self, name: str, request: Request) -> bool:
        if name in self.queued or self.only not in (None, name) or (request.refused and request.block):
            return True  # a refusal is the same in every block: one row is enough
        return self._is_done(name, request)

    def _is_done(self, name: str, request: Request) -> bool:
        """Return whether a run is ok, or has failed in a search, whose sweeper would draw other values after it."""
        directory = self.directory / name
        is_there = (directory / store.RECORD).exists()
        return is_there and record.is_done(directory, request.config.resolved, or_failed=self.searches)

    @cached_property
    def _counted(self) -> set[tuple[str, str]]:
        """The runs that already had a result when this process started, each with its status."""
        results = store.read_results(self.directory)
        return {(store.below(self.directory, one["directory"]), one["status"]) for one in results}

    def _write(self, directory: Path, request: Request) -> None:
        draft = record.begin(request.config.resolved, directory, {}, request.overrides)
        if request.summary:  # a workload that does not train has no model, even while its job waits
            draft |= request.summary.fields
        if request.refused:
            draft = record.failed(draft, failure.describe(request.refused, rank=-1))
        again, earlier = (directory / store.RECORD).exists(), store.earlier_record(directory)
        if earlier:
            self._compare(directory, earlier, draft)
        if not create_atomically(directory, lambda folder, _: write_json(folder / store.RECORD, draft)):
            ownership.open_record(directory, draft)
        had_ended = again and not (earlier and record.is_open(earlier))
        if request.refused or had_ended:  # it will be repeated: its earlier result no longer counts
            store.append_result(self.directory, draft)

    def _compare(self, directory: Path, earlier: Written, draft: Written) -> None:
        """Report that a run was done with other options.

        Raises ConfigError if it would resume from their checkpoint, or replace a result that a search went by.
        """
        was, now = record.configuration(earlier), record.configuration(draft)
        if (other := record.work_difference(was, now)) is None:
            return
        if self.searches and not record.is_interrupted(earlier):
            rule = f"was done with other options, {other}, and the sweeper chooses other values now"
            require(Problem("directory", directory, rule, "start another search"))
        shape = options_affecting("shape")  # that of a checkpoint is compared by itself
        if checkpoint_dir.latest_manifest(directory) and not record.same_where_both(was, now, shape):
            rule = f"has checkpoints of other options, {other}"
            require(Problem("directory", directory, rule, "remove them, or start another sweep"))
        if earlier["status"] == "ok" or earlier.get("steps"):
            echo(f"{directory.name}: was done with other options, {other}; done again", sys.stderr)
