"""What a run shows while it goes on: one live line on a terminal, and now and then a line elsewhere.

The process of rank 0 shows it, whoever started the ranks. The run's own thread stores what has happened, and another
one shows it: it can speak while the first one compiles or waits for other ranks.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from ptdbench.report.heading import Heading
from ptdbench.terminal import clear_line, plain, redraws, say

if TYPE_CHECKING:
    from ptdbench.report.live import Live

REDRAW_SECONDS = 0.5  # on a terminal, in place
_LINE_SECONDS = 10.0  # in a file or a pipe, where every line stays
_FIRST_SECONDS = 0.5  # the first sign of the steps comes soon everywhere
_LASTING = 2.0  # a phase that takes so long is a line in a file or a pipe

#: After so many seconds without a step it is said what goes on; later once a minute.
_NOTES = (10.0, 30.0, 60.0)

#: A step is no news before it takes so many times what the steps before it took.
_LATE = 2.0

#: Columns of a terminal's line that are kept for the bar and the spaces beside it.
_BAR = 8


@dataclass(frozen=True)
class Line:
    """A live line: words, a bar, and words.

    Attributes:
        left: Before the bar: which run it is and what it does.
        right: Behind the bar.
        done: Steps of the bar.
        total: All of its steps; ``None`` where it only moves.
    """

    left: str
    right: str
    done: int = 0
    total: int | None = None


@dataclass(frozen=True)
class _Figures:
    """What is known after some step, at :attr:`at`."""

    at: float
    rate: float | None
    left: float | None
    loss: float | None


class Display:
    """Shows what a run does, as soon as it is entered.

    In a phase (``building``) it says so, and after ten seconds how long it has taken. Between two steps
    :meth:`step` is called, which stores two numbers, and if :meth:`due` what costs something, above all fetching the
    loss from a GPU, is done for :meth:`show`.

    Attributes:
        total_steps: Steps of the whole run; may change on the way.
        remark: Text to show beside the loss.

    Args:
        heading: Which run it is; ``None`` for a rank that shows nothing.
        stays: Whether a line stays on a terminal when the display ends.
        stream: Where to write; standard error if ``None``.
        clock: Seconds; the ``now`` of all methods is of this clock.
    """

    def __init__(
        self,
        heading: Heading | None = None,
        *,
        stays: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total_steps = 0
        self.remark = ""
        self._heading = heading
        self._stays = stays
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._live: Live | None = None
        self._in_place = heading is not None and redraws(self._stream)
        self._interval = REDRAW_SECONDS if self._in_place else _LINE_SECONDS
        self._phase: str | None = "starting"  # None: steps are done
        self._announced = False
        self._began = self._phase_at = self._moved_at = clock()
        self._noted = 0.0
        self._done, self._unit, self._units_per_step = 0, "steps", 1.0
        self._expects: Callable[[], str | None] = lambda: None
        self._expected: str | None = None
        self._base: int | None = None  # the first step of this start
        self._first_seconds = self._later_seconds = 0.0
        self._next = math.inf
        self._figures: _Figures | None = None
        self._shown_step, self._shown_at = 0, self._began
        self._wake, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="display")

    @property
    def flops_per_second(self) -> float | None:
        """What all ranks together reached in an earlier run of the same model in this sweep."""
        return self._heading.flops_per_second if self._heading else None

    def __enter__(self) -> Display:
        if self._heading is not None:
            if self._in_place:
                from ptdbench.report.live import Live

                self._live = Live(self._stream, lambda width: self.line(width, self._clock()))
                clear_line(self._stream)  # of the hint of the process that has started this one
                with suppress(OSError, ValueError):
                    self._live.start()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._heading is None:
            return
        self._over = True
        self._wake.set()
        self._thread.join(timeout=5.0)
        if self._live:
            with suppress(OSError, ValueError):
                self._live.stop()
            self._live = None
            if error is None and self._stays:
                self._write(self._last_words(self._clock()))

    def phase(self, name: str | None) -> None:
        """Say what begins now, in a word or two; ``None``: the next steps."""
        self._phase, self._announced, self._noted = name, False, 0.0
        self._phase_at = self._moved_at = self._clock()
        self._wake.set()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Around something between two steps."""
        before = self._phase
        self.phase(name)
        try:
            yield
        finally:
            self.phase(before)

    def begin_steps(
        self,
        done: int,
        total: int,
        unit: str,
        units_per_step: float,
        name: str = "first step",
        expects: Callable[[], str | None] = lambda: None,
    ) -> None:
        """The first step begins.

        Args:
            done: Steps that an earlier start has done.
            total: Steps of the whole run.
            unit: What throughput counts: ``tokens`` or ``samples``.
            units_per_step: How many of them a step makes.
            name: The name of the phase until the first step is done.
            expects: Says how long a step may take (``about 40 s``), if that is known; called once, by another thread.
        """
        self.total_steps = total
        self._done, self._unit, self._units_per_step, self._expects = done, unit, units_per_step, expects
        self.phase(name)

    def step(self, done: int, now: float) -> None:
        """A step is over, the number ``done`` of the run."""
        took = now - self._moved_at
        self._done, self._moved_at, self._noted = done, now, 0.0
        if self._base is not None:
            self._later_seconds += took
        else:  # the first one, which says nothing of those to come
            self._base, self._phase, self._first_seconds = done, None, took
            self._shown_step, self._shown_at, self._next = done, now, now + _FIRST_SECONDS

    def due(self, now: float) -> bool:
        """Whether it is time for :meth:`show`."""
        return now >= self._next

    def show(self, loss: float | None, now: float) -> float | None:
        """Show the steps so far; ``loss`` may be unknown on this rank.

        Returns:
            Tokens or samples a second since the last time; ``None`` after the first step.
        """
        rate = left = None
        if self._done > self._shown_step:
            seconds = (now - self._shown_at) / (self._done - self._shown_step)
            rate = self._units_per_step / seconds if seconds > 0 else None
            left = (self.total_steps - self._done) * seconds
        self._shown_step, self._shown_at, self._next = self._done, now, now + self._interval
        self._figures = _Figures(now, rate, left, loss)
        if self._heading is not None and not self._in_place:
            self._write("  ".join([str(self._heading), self._step_words(), *self._words(now).values()]))
        return rate

    def line(self, width: int, now: float) -> Line:
        """The live line, in so many columns."""
        heading = _cropped(str(self._heading), max(12, width - 40))
        idle, phase = now - self._moved_at, self._phase
        if phase is not None:
            left = f"{heading} · {phase}… {_duration(int(now - self._phase_at))}"
            expected = self._expectation() if idle >= _NOTES[0] else None
            right = f"a step takes {expected}" if expected else ""
        else:
            left = f"{heading}  {self._step_words()}"
            if idle >= self._patience():
                right = f"step {self._done + 1}: {_span(idle)}, {self._pace()}"
            else:
                right = "  ".join(_fitting(self._words(now), width - len(left) - _BAR))
        return Line(left, _cropped(right, width - len(left) - _BAR), self._done, self.total_steps or None)

    def tick(self, now: float) -> None:
        """Say what lasts, where nothing is redrawn; called now and then by another thread than the run's."""
        idle, phase = now - self._moved_at, self._phase
        if self._noted < (reached := self._note_reached(idle)):
            self._noted, self._announced = reached, True
            self._write(f"{self._heading}: {self._note(phase, idle)}")
        elif phase is not None and not self._announced and now - self._phase_at >= _LASTING:
            self._announced = True
            self._write(f"{self._heading} · {phase}…")

    def _watch(self) -> None:
        while not self._over:
            self._wake.wait(self._pause(self._clock()))
            self._wake.clear()
            if self._over:
                return
            try:
                if self._live:
                    self._live.refresh()
                else:
                    self.tick(self._clock())
            except (OSError, ValueError):  # a run does not fail because nobody watches it any more
                return

    def _pause(self, now: float) -> float:
        """Seconds until there may be something to say."""
        if self._in_place:
            return REDRAW_SECONDS
        if self._phase is not None and not self._announced:
            return max(0.1, self._phase_at + _LASTING - now)
        reached = self._note_reached(now - self._moved_at)
        later = next((note for note in _NOTES if note > reached), reached + 60.0)
        return max(0.1, self._moved_at + later - now)

    def _note_reached(self, idle: float) -> float:
        """The last time of those at which it is said what goes on; 0 before the first."""
        if self._phase is None and idle < self._patience():
            return 0.0
        return max([0.0, *(note for note in _NOTES if note <= idle), 60.0 * (idle // 60)])

    def _patience(self) -> float:
        """Seconds after which a step among others is late."""
        return max(_NOTES[0], _LATE * (self._mean() or 0.0))

    def _mean(self) -> float | None:
        """Mean seconds of the steps after the first one."""
        if self._base is None or self._done <= self._base:
            return None
        return self._later_seconds / (self._done - self._base)

    def _note(self, phase: str | None, idle: float) -> str:
        """What has been going on for so long, and how long a step takes, as far as that is known; never a guess."""
        if phase is None:
            return f"step {self._done + 1}/{self.total_steps}, {_span(idle)} so far; {self._pace()}"
        expected = self._expectation()
        known = f"; a step of this model will take {expected} here" if expected else ""
        return f"{phase}, {_span(idle)} so far{known}"

    def _pace(self) -> str:
        mean = self._mean()
        return f"before {_span(mean)} each" if mean else f"the first one took {_span(self._first_seconds)}"

    def _expectation(self) -> str | None:
        """How long the first step may take, while it is done."""
        if self._base is None and self.total_steps and self._expected is None:
            self._expected = self._expects() or ""
        return self._expected if self._base is None else None

    def _step_words(self) -> str:
        return f"step {self._done}/{self.total_steps}"

    def _words(self, now: float) -> dict[str, str]:
        """What is shown behind the step, by what it says."""
        words = {"rate": "", "loss": "", "remark": self.remark, "left": "", "sweep": ""}
        if (known := self._figures) and self._heading:
            if known.rate is not None:
                words["rate"] = f"{known.rate:,.0f} {self._unit}/s"
            if known.loss is not None:
                words["loss"] = f"loss {known.loss:.4f}"
            if known.left is not None:
                left = max(0.0, known.left - (now - known.at))
                words["left"] = f"{_duration(left)} left"
                if self._heading.rest:
                    words["sweep"] = f"(sweep {_duration(self._heading.rest.left(now - self._began, left))})"
        return {name: text for name, text in words.items() if text}

    def _last_words(self, now: float) -> str:
        """What stays on a terminal of a run that has ended; nothing of one that does no steps and stands alone."""
        assert self._heading
        took = f"in {_duration(now - self._began)}"
        if self._base is None:
            return f"{self._heading}  {took}" if self._heading.number else ""
        words = self._words(now)
        if mean := self._mean():
            words["rate"] = f"{self._units_per_step / mean:,.0f} {self._unit}/s"
        kept = [words[name] for name in ("rate", "loss", "remark") if name in words]
        return "  ".join([str(self._heading), self._step_words(), *kept, took])

    def _write(self, line: str) -> None:
        """Write a line; a run does not fail because nobody reads it."""
        if line and self._stream:
            with suppress(ValueError):  # the stream is closed
                say(line, self._stream)


def _fitting(words: dict[str, str], room: int) -> list[str]:
    """As many of the words as there is room for, what matters most first, in their order."""
    kept: set[str] = set()
    for name in ("left", "rate", "sweep", "loss", "remark"):
        needed = sum(len(words[one]) + 2 for one in {*kept, name} if one in words)
        if name in words and needed - 2 <= room:
            kept.add(name)
    return [text for name, text in words.items() if name in kept]


def _cropped(text: str, width: int) -> str:
    text = plain(text)
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…" if width > 0 else ""


def _span(seconds: float) -> str:
    """``0.81 s``, ``12 s``, ``3 min``."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _duration(seconds: float) -> str:
    """``75`` becomes ``1:15``, and ``3675`` ``1:01:15``."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
