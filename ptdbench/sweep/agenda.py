"""The agenda of a command line: which runs are carried out, what they are called, and their records."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from ptdbench.files import appear, write_json
from ptdbench.launch.world import discover
from ptdbench.problems import ConfigError
from ptdbench.records import failure, ownership, record, store
from ptdbench.records.schema import Written
from ptdbench.report.display import Heading
from ptdbench.report.labels import titles
from ptdbench.setup import hydra_output, run_spec
from ptdbench.setup.compose import Composed
from ptdbench.sweep import blocks
from ptdbench.sweep.blocks import StoppingRule
from ptdbench.sweep.requests import Request
from ptdbench.terminal import echo

#: What ranks agree on when they open a run.
OPENED = "opened"


class SweepEta:
    """The headings of a sweep's runs, with the time left by the mean duration of those that ended well.

    Of a search there are the runs so far, and others will come (``is_whole`` is false).
    """

    def __init__(self, requests: Sequence[Request], is_whole: bool = True) -> None:
        self._requests, self._is_whole = requests, is_whole
        self._to_come: Sequence[int] = ()
        self._seconds: dict[int, float] = {}
        self._titles: list[str] = []

    def expect(self, numbers: Sequence[int]) -> None:
        """Note the runs that are to be carried out, in ascending order."""
        self._to_come = numbers

    def ended(self, number: int, seconds: float, written: Written) -> None:
        """Note how long a run took, and its record."""
        if written["status"] == "ok":
            self._seconds[number] = seconds

    def heading(self, number: int) -> Heading:
        """Return what the display of a run shows of the sweep."""
        if len(self._titles) < len(self._requests):  # a search has added some
            distinct = {id(request.whole): request for request in self._requests}  # repeats have the same
            drafts = [
                record.begin(request.config.resolved, Path(), {}, request.overrides)
                | dict(request.summary.fields if request.summary else {})
                for request in distinct.values()
            ]
            called = dict(zip(distinct, titles(drafts), strict=True))
            self._titles = [called[id(request.whole)] for request in self._requests]
        later = sum(one > number for one in self._to_come)
        return Heading(
            self._titles[number],
            number + 1,
            len(self._requests) if self._is_whole else None,
            later * fmean(self._seconds.values()) if later and self._seconds else None,
        )


@dataclass(frozen=True)
class Opened:
    """A run whose record is open, to be carried out."""

    number: int  #: Its number in the sweep.
    request: Request  #: What was asked for.
    subdirectory: str  #: Its directory, below the sweep's.


@dataclass(frozen=True)
class Agenda:
    """The runs of a command line, and which of them are to be carried out."""

    directory: Path  #: The sweep's directory.
    requests: list[Request] = field(default_factory=list)  #: In the order in which they are carried out.
    only: str | None = None  #: The directory of the one run that is meant, below the sweep's; ``None`` for all.
    #: Directories of runs whose jobs are still in the queue: they are left to these.
    queued: frozenset[str] = frozenset()
    searches: bool = False  #: Whether Hydra's sweeper chooses the runs as it goes: the requests are added then.
    #: Says after which block of repeats no further one is needed; ``None``: all requests are carried out.
    stopping: StoppingRule | None = None
    _names: dict[int, str] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        composed: Composed,
        found: Sequence[Request],
        directory: Path,
        only: str | None,
        queued: frozenset[str] = frozenset(),
    ) -> Agenda:
        """The agenda of a command line."""
        if composed.searches:
            return Agenda(directory, only=only, queued=queued, searches=True)
        repeat = found[0].config.repeat
        stopping = StoppingRule(repeat) if repeat.runs == "auto" and repeat.block is None else None
        runs = [found[number].in_block(block) for number, block in blocks.order(len(found), repeat)]
        return Agenda(directory, runs, only, queued, False, stopping)

    @property
    def is_open(self) -> bool:
        """Tell whether results decide which runs are carried out: nobody knows beforehand how many there are."""
        return self.searches or self.stopping is not None

    @cached_property
    def eta(self) -> SweepEta:
        """Return what is known of the runs that this process carries out itself."""
        return SweepEta(self.requests, is_whole=not self.is_open)

    def batches(self, size: int | None) -> list[range]:
        """Return the numbers of the runs that are handed over together, at most ``size`` (``None``: any number).

        A block is in one batch where results are looked at after each block, and where the runs of a block share a job.
        """
        count = len(self.requests)
        of_block = sum(request.block == self.requests[0].block for request in self.requests)
        if self.stopping:
            size = of_block
        elif size and self.requests[0].config.sweep.same_nodes:
            size = max(1, size // of_block) * of_block
        return [range(start, min(start + (size or count), count)) for start in range(0, count, size or count)]

    def is_settled(self, number: int) -> bool:
        """Tell whether the runs from this number on need not be carried out: enough is known of all."""
        if self.stopping is None or self.only is not None:  # the one that is meant goes on whatever is known
            return False
        return self.stopping(self.directory, self.requests[number].block or 0)

    def subdirectory(self, number: int) -> str:
        """The directory of a run, below the sweep's."""
        if number not in self._names:
            self._names[number] = str(Path(self.requests[number].subdirectory(number)))
        return self._names[number]

    def open(self, number: int) -> Opened | None:
        """Open the record of a run; ``None`` for a run that is not to be carried out.

        Runs that are ok are left as they are, and so are those of which an earlier start still goes on, or which would
        go on in another shape. One that is refused gets its row. Of several ranks rank 0 looks and writes, and what one
        is refused, as its node has less memory, all are: the others would wait for it.

        Raises:
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
        """Write the first files of a run, and tell whether it is to be carried out."""
        request, directory = replace(run.request, refused=refused), self.directory / run.subdirectory
        if self._is_left_out(run.subdirectory, request):
            if self._is_done(run.subdirectory, request) and run.subdirectory not in self._counted:
                store.append_result(self.directory, store.load_record(directory))  # killed before it could add it
            return False
        try:
            if request.summary:
                run_spec.require_same_shape(directory, request.summary, request.config.general.reshape)
            self._write(directory, request)
            hydra_output.write_files(request.job(self.directory, run.number), directory)
        except ConfigError as held:
            echo(f"{held}; skipped", sys.stderr)
            return False
        return not refused

    def to_do(self, numbers: Iterable[int]) -> list[int]:
        """Return which of these runs will be carried out, unless a start of them still goes on."""
        return [
            number
            for number in numbers
            if not self.requests[number].refused
            and not self._is_left_out(self.subdirectory(number), self.requests[number])
        ]

    def _is_left_out(self, name: str, request: Request) -> bool:
        if name in self.queued or self.only not in (None, name) or (request.refused and request.block):
            return True  # what is refused is so in each block, and one row says it
        return self._is_done(name, request)

    def _is_done(self, name: str, request: Request) -> bool:
        directory = self.directory / name
        return (directory / store.RECORD).exists() and record.is_done(directory, request.config.resolved)

    @cached_property
    def _counted(self) -> set[str]:
        """The runs of which there was an ok result when this began."""
        results = store.read_results(self.directory)
        return {store.below(self.directory, one["directory"]) for one in results if one["status"] == "ok"}

    def _write(self, directory: Path, request: Request) -> None:
        draft = record.begin(request.config.resolved, directory, {}, request.overrides)
        if request.refused:
            draft = record.failed(draft, failure.describe(request.refused, rank=-1))
        again, earlier = (directory / store.RECORD).exists(), store.earlier_record(directory)
        if not appear(directory, lambda folder, _: write_json(folder / store.RECORD, draft)):
            ownership.open_record(directory, draft)
        other = record.other_work(record.configuration(earlier), record.configuration(draft)) if earlier else None
        if earlier and other and (earlier["status"] == "ok" or earlier.get("steps")):
            echo(f"{directory.name}: was done with other options, {other}; done again", sys.stderr)
        had_ended = again and not (earlier and record.is_open(earlier))
        if request.refused or had_ended:  # done once more: its earlier result counts no longer
            store.append_result(self.directory, draft)
