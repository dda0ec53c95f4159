"""What the runs of a sweep on this machine are called, and how long those to come may take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ptdbench.records import record
from ptdbench.records.schema import Written
from ptdbench.report.heading import Heading
from ptdbench.report.labels import titles
from ptdbench.sweep.requests import Request


class Outlook:
    """The headings of a sweep's runs, with the time left by the mean duration of those that ended well.

    Args:
        requests: Its runs; of a search those so far.
        is_whole: Whether there will be no others.
    """

    def __init__(self, requests: Sequence[Request], is_whole: bool = True) -> None:
        self._requests = requests
        self._is_whole = is_whole
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
            called = dict(zip(distinct, titles([_draft(request) for request in distinct.values()]), strict=True))
            self._titles = [called[id(request.whole)] for request in self._requests]
        later = sum(one > number for one in self._to_come)
        return Heading(
            self._titles[number],
            number + 1,
            len(self._requests) if self._is_whole else None,
            later * fmean(self._seconds.values()) if later and self._seconds else None,
        )


def _draft(request: Request) -> dict[str, Any]:
    """What the run's record will begin with."""
    draft = record.begin(request.config.resolved, Path(), {}, request.overrides)
    return draft | dict(request.summary.fields if request.summary else {})
