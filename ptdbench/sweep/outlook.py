"""What the runs of a sweep on this machine are called, and how long those to come may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptdbench.records import record
from ptdbench.report.heading import Heading, Rest
from ptdbench.report.labels import titles
from ptdbench.sweep.requests import Request


@dataclass(frozen=True)
class _Ended:
    """A run that ended well, and the seconds from its start to its end."""

    seconds: float
    record: Mapping[str, Any]


class Outlook:
    """What is known of a sweep's runs and of how long they take.

    Args:
        requests: Its runs; of a search those so far.
        is_whole: Whether there will be no others.
    """

    def __init__(self, requests: Sequence[Request], is_whole: bool = True) -> None:
        self._requests = requests
        self._is_whole = is_whole
        self._ended: dict[int, _Ended] = {}
        self._waiting: list[int] = []
        self._titles: list[str] = []

    def expect(self, numbers: Sequence[int]) -> None:
        """These runs are to be carried out, in this order."""
        self._waiting = list(numbers)

    def ended(self, number: int, seconds: float, written: Mapping[str, Any]) -> None:
        """Note how long a run took, and its record."""
        if written["status"] == "ok":
            self._ended[number] = _Ended(seconds, written)

    def heading(self, number: int) -> Heading:
        """What the display of the run of this number shows of the sweep."""
        if len(self._titles) < len(self._requests):  # a search has added some
            distinct = {id(request.composed): request for request in self._requests}  # repeats have the same
            called = dict(zip(distinct, titles([_draft(request) for request in distinct.values()]), strict=True))
            self._titles = [called[id(request.composed)] for request in self._requests]
        return Heading(
            self._titles[number],
            number + 1,
            len(self._requests) if self._is_whole else None,
            self._rest(number),
            self._flops_per_second(number),
        )

    def _rest(self, number: int) -> Rest | None:
        later = self._waiting[self._waiting.index(number) + 1 :] if number in self._waiting else []
        if not later:
            return None
        by_flops = all(_flops(self._requests[one]) for one in [*self._ended, number, *later])

        def work(one: int) -> float:
            return (_flops(self._requests[one]) or 1.0) if by_flops else 1.0

        return Rest(
            seconds=sum(run.seconds for run in self._ended.values()),
            work=sum(work(one) * _share_done(run.record) for one, run in self._ended.items()),
            own=work(number),
            waiting=[
                (work(one), summary.seconds if (summary := self._requests[one].summary) else None) for one in later
            ],
        )

    def _flops_per_second(self, number: int) -> float | None:
        """Of the last run that ended well of the same model and precision."""
        mine = self._requests[number].config.resolved
        for run in reversed(self._ended.values()):
            theirs = run.record["config"]
            if all(theirs[option] == mine[option] for option in ("model", "precision")):
                return (run.record.get("metrics") or {}).get("model_flops_per_second")
        return None


def _draft(request: Request) -> dict[str, Any]:
    """What the run's record will begin with."""
    draft = record.begin(request.config.resolved, Path(), {}, request.overrides)
    return draft | dict(request.summary.fields if request.summary else {})


def _flops(request: Request) -> float | None:
    """FLOPs of all steps of a run."""
    summary = request.summary
    return summary.flops_per_step * summary.steps if summary and summary.flops_per_step and summary.steps else None


def _limit(request: Request) -> float | None:
    """Seconds that the steps of a run may take."""
    return request.summary.seconds if request.summary else None


def _share_done(written: Mapping[str, Any]) -> float:
    """How much of its steps a run has done: ``train.max_minutes`` may have cut it short."""
    steps = written.get("steps")
    return steps / written["config"]["train"]["steps"] if steps else 1.0
