"""Which runs of a command line are carried out, and their records, which are there before they begin."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ptdbench.launch.world import discover
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import failure, lease, objective, record, store
from ptdbench.records.files import appear, write_json
from ptdbench.setup import blocks, reshaping
from ptdbench.setup.compose import Composed, without_hydra
from ptdbench.sweep import requests
from ptdbench.sweep.outlook import Outlook
from ptdbench.sweep.requests import Request
from ptdbench.sweep.settling import Settling
from ptdbench.terminal import say


class NoObjective(Exception):
    """A run of a search that came to nothing."""


@dataclass(frozen=True)
class Opened:
    """A run whose record is open, to be carried out.

    Attributes:
        number: Its number in the sweep.
        request: What was asked for.
        overrides: What was typed for it.
        subdirectory: Its directory, below the sweep's.
    """

    number: int
    request: Request
    overrides: list[str]
    subdirectory: str

    @property
    def arguments(self) -> tuple[list[str], str, int]:
        """What the job is called with."""
        return self.overrides, self.subdirectory, self.number


@dataclass(frozen=True)
class Agenda:
    """The runs of a command line, and which of them are to be carried out.

    Attributes:
        requests: In the order in which Hydra will ask for them.
        only: The directory of the one run that is meant, below the sweep's; ``None`` for all.
        queued: Directories of runs whose jobs are still in the queue: they are left to these.
        searches: Whether Hydra's sweeper chooses the runs as it goes: the requests are added then.
        whole: Their configurations, see :attr:`ptdbench.setup.compose.Composed.whole`.
        settling: Says after which block of repeats no further one is needed; ``None``: all requests are carried out.
    """

    requests: list[Request] = field(default_factory=list)
    only: str | None = None
    queued: frozenset[str] = frozenset()
    searches: bool = False
    whole: Sequence[bytes] = ()
    settling: Settling | None = None

    @staticmethod
    def of(
        composed: Composed, found: Sequence[Request], only: str | None, queued: frozenset[str] = frozenset()
    ) -> Agenda:
        """The agenda of a command line.

        Args:
            composed: What it asks for.
            found: Its runs, without their repeats.
            only: See the attribute.
            queued: See the attribute.
        """
        if composed.searches:
            return Agenda(only=only, queued=queued, searches=True)
        repeat = found[0].config.repeat
        order = blocks.order(len(found), repeat)
        whole = [composed.whole[number] for number, _ in order]
        settling = Settling(repeat) if repeat.runs == "auto" and repeat.block is None else None
        return Agenda([found[number].in_block(block) for number, block in order], only, queued, False, whole, settling)

    @property
    def is_open(self) -> bool:
        """Whether it depends on results which runs are carried out: nobody knows beforehand how many there are."""
        return self.searches or self.settling is not None

    @cached_property
    def outlook(self) -> Outlook:
        """What is known of the runs that this process carries out itself."""
        return Outlook(self.requests, is_whole=not self.is_open)

    def batches(self, size: int | None) -> list[list[list[str]]]:
        """What is typed for each run, in the batches that Hydra's basic sweeper hands to its launcher.

        Args:
            size: Runs of a batch at most, ``hydra.sweeper.max_batch_size``; ``None``: no limit. A block is in one
                batch where it is looked at after each block, and where the runs of a block share a job.
        """
        runs = [list(request.overrides) for request in self.requests]
        of_block = sum(request.block == self.requests[0].block for request in self.requests)
        if self.settling:
            size = of_block
        elif size and self.requests[0].config.sweep.same_nodes:
            size = max(1, size // of_block) * of_block
        return [runs[start : start + (size or len(runs))] for start in range(0, len(runs), size or len(runs))]

    def is_settled(self, sweep_directory: Path, number: int) -> bool:
        """Whether the runs from this number on need not be carried out: enough is known of all."""
        if self.settling is None or self.only is not None:  # the one that is meant goes on whatever is known
            return False
        return self.settling(sweep_directory, self.requests[number].block or 0)

    def add(self, number: int, composed: Callable[[], DictConfig], overrides: Sequence[str]) -> None:
        """Note a run that the sweeper has just chosen, if it is one of a search.

        Args:
            number: Its number in the sweep.
            composed: Composes its configuration.
            overrides: What the sweeper chose, and what was typed for all.

        Raises:
            ConfigError: It cannot be composed, or the cluster has not what it asks for.
        """
        if not self.searches:
            return
        assert number == len(self.requests)
        try:
            job = without_hydra(composed())
        except (HydraException, OmegaConfBaseException) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError([Problem("command line", " ".join(overrides), reason)]) from None
        self.requests.append(requests.of_search(job, overrides))

    def outcome(self, directory: Path, overrides: Sequence[str]) -> JobReturn:
        """What the sweeper is told of a run: in a search the objective of its record, or why it has none.

        The basic sweeper is told nothing that it would raise: how a run went is in its record.
        """
        if not self.searches:
            return JobReturn(overrides, status=JobStatus.COMPLETED, _return_value=None)
        written = store.load_record(directory)
        wanted = written["config"]["objective"]
        if (value := objective.value(written, wanted)) is not None:
            return JobReturn(overrides, status=JobStatus.COMPLETED, _return_value=value)
        error = NoObjective(f"{directory.name}: {written['status']}, so that it has no {wanted}")
        return JobReturn(overrides, status=JobStatus.FAILED, _return_value=error)

    def directory(self, sweep_directory: Path, template: str, number: int) -> Path:
        """The directory of a run, from the template of such names."""
        return sweep_directory / self.requests[number].subdirectory(template, number)

    def open(self, sweep_directory: Path, template: str, number: int, overrides: Sequence[str]) -> Opened | None:
        """Open the record of a run; ``None`` for a run that is not to be carried out.

        Runs that are ok are left as they are, and so are those of which an earlier start still goes on, or which would
        go on in another shape. One that is refused gets its row. Of several ranks one writes.

        Raises:
            ConfigError: An earlier start of the run still goes on, or it would go on in another shape, and this process
                is a rank of several.
            OSError: The record cannot be written.
        """
        request = self.requests[number]
        directory = self.directory(sweep_directory, template, number)
        name = str(directory.relative_to(sweep_directory))
        if self._is_left_out(name, directory, request):
            return None
        world = discover(os.environ)
        try:
            if world is None or world.rank == 0:
                if request.summary:
                    reshaping.require_same(directory, request.summary, request.config.general.reshape)
                self._write(sweep_directory, directory, request, overrides)
        except ConfigError as refused:
            if world:  # the other ranks have not asked
                raise
            say(f"{refused}; skipped", sys.stderr)
            return None
        return None if request.refused else Opened(number, request, list(overrides), name)

    def to_do(self, sweep_directory: Path, template: str, numbers: Iterable[int]) -> list[int]:
        """Which of these runs will be carried out, unless a start of them still goes on."""
        found = []
        for number in numbers:
            directory, request = self.directory(sweep_directory, template, number), self.requests[number]
            name = str(directory.relative_to(sweep_directory))
            if not request.refused and not self._is_left_out(name, directory, request):
                found.append(number)
        return found

    def _is_left_out(self, name: str, directory: Path, request: Request) -> bool:
        if name in self.queued or self.only not in (None, name) or (request.refused and request.block):
            return True  # what is refused is so in each block, and one row says it
        return (directory / store.RECORD).exists() and record.is_done(directory, request.config.resolved)

    def _write(self, sweep_directory: Path, directory: Path, request: Request, overrides: Sequence[str]) -> None:
        draft = record.begin(request.config.resolved, directory, {}, overrides)
        if request.refused:
            draft = record.failed(draft, failure.describe(request.refused, rank=-1))
        again, earlier = (directory / store.RECORD).exists(), store.earlier_record(directory)
        if not appear(directory, lambda folder, _: write_json(folder / store.RECORD, draft)):
            lease.open_record(directory, draft)
        trained = ((earlier or {}).get("config") or {}).get("model")
        if other := isinstance(trained, Mapping) and record.other_model(trained, draft["config"]["model"]):
            say(f"{directory.name}: was done with another model, {other}; done again", sys.stderr)
        had_ended = again and not (earlier and record.is_open(earlier))
        if request.refused or had_ended:  # done once more: its earlier result counts no longer
            store.append_result(sweep_directory, draft)
