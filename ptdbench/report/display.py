"""The progress of a run: one live line on a terminal, or an occasional line in a file or a pipe.

Rank 0 shows it under any launcher. The run's thread stores the state and another thread shows it, so that the display
continues while the run compiles or waits for other ranks.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from ptdbench.records.run_record import RunRecord
from ptdbench.report import labels
from ptdbench.report.text import cropped
from ptdbench.terminal import clear_line, echo, plain, redraws
from ptdbench.units import duration_text, span_text, three_digits


@dataclass(frozen=True)
class Heading:
    """The name of a run in its display."""

    title: str  #: A short name; in a sweep, one that distinguishes it from the others.
    number: int | None = None  #: Its number in the sweep, from 1; ``None`` outside a sweep.
    total: int | None = None  #: Number of runs of the sweep; ``None`` if not yet known.
    #: Estimated duration of the runs after it; ``None`` if there are none, or none has ended yet.
    later_seconds: float | None = None

    def __str__(self) -> str:
        """``[2/8] gpt_tiny pdp gpipe b16``."""
        if self.number is None:
            return self.title
        return f"[{self.number}{f'/{self.total}' if self.total else ''}] {self.title}"


_HEADINGS: list[Heading] = []


@contextmanager
def headed(heading: Heading) -> Iterator[None]:
    """Within the context, show the runs that this process starts under this heading."""
    _HEADINGS.append(heading)
    try:
        yield
    finally:
        _HEADINGS.pop()


def heading(record: RunRecord) -> Heading:
    """Return the heading of the run that this process starts: by default, the name of the run with this record."""
    return _HEADINGS[-1] if _HEADINGS else Heading(labels.name(record))


#: Columns left free on the right: a terminal shows Ctrl-C as ^C, and the line would wrap.
_ECHO = 3


def _plain_streams() -> None:
    """Print directly in a forked process, such as a data worker: the live line is not drawn there."""
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


os.register_at_fork(after_in_child=_plain_streams)


class _Console(Console):
    """A console that does not hide the cursor: a rank that is killed could not restore it."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


REDRAW_SECONDS = 0.5  # on a terminal, in place
_LINE_SECONDS = 10.0  # in a file or a pipe, where every line stays
_FIRST_SECONDS = 0.5  # until the first figures, in either case

#: Seconds without a step after which a file or a pipe gets a line, then once a minute; the first only names the phase.
_NOTES = (2.0, 10.0, 30.0, 60.0)

#: A step is late after these seconds and after this multiple of the mean of the steps before it.
_LATE_SECONDS, _LATE_TIMES = 10.0, 2.0

#: Columns of a terminal's line that are reserved for the bar and its padding.
_BAR = 8


class Display:
    """Shows what a run does, from when the context is entered.

    In a phase (``building``) it shows the phase and its duration. Between two steps :meth:`step` is called, which only
    stores two numbers, and :meth:`show` if :meth:`due`.

    Args:
        heading: The name of the run; ``None`` for a rank that shows nothing.
        stays: Whether a line stays on a terminal when the display ends.
        stream: Where to write; standard error if ``None``.
        clock: A clock in seconds; the ``now`` of all methods is a time of this clock.
    """

    def __init__(
        self,
        heading: Heading | None = None,
        *,
        stays: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total_steps = 0  #: Steps of the whole run; may change during the run.
        self.remark = ""  #: Text to show beside the loss.
        self.devices: tuple[int, str] = (1, "rank")  #: ``(8, "GPU")``: throughput is also shown for each of several.
        #: The last step whose loss is on record, counted from 1, and that loss: the mean over all replicas.
        self.loss: tuple[int, float] | None = None
        self._heading, self._stays, self._clock = heading, stays, clock
        self._stream = sys.stderr if stream is None else stream
        self._phase: str | None = "starting"  # None: steps are running
        self._began = self._moved_at = clock()
        self._noted = 0.0  # the idle time of the last line without a step
        self._done, self._unit = 0, "steps"
        self._units_per_step: float | None = 1.0
        self._base: int | None = None  # the first step of this start
        self._first_seconds = self._later_seconds = 0.0
        self._rate: float | None = None
        self._ends: float | None = None
        self._shown_step, self._shown_at, self._next = 0, self._began, math.inf
        self._wake, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="display")
        in_place = heading is not None and redraws(self._stream)
        self._live = self._made_live() if in_place else None

    def __enter__(self) -> Display:
        if self._live:
            clear_line(self._stream)  # the hint of the process that started this one
            with suppress(OSError, ValueError):
                self._live.start(refresh=True)
        if self._heading:
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
            if error is None and self._stays:
                self._write(self._last_words(self._clock()))

    def phase(self, name: str | None) -> None:
        """Begin a phase, named in a word or two; ``None``: the next steps."""
        self._phase, self._noted, self._moved_at = name, 0.0, self._clock()
        self._wake.set()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Return a context for a phase between two steps, whose time counts for neither."""
        before = self._phase
        self.phase(name)
        try:
            yield
        finally:
            self.phase(before)
            self._shown_step, self._shown_at = self._done, self._clock()

    def begin_steps(
        self, done: int, total: int, unit: str, units_per_step: float | None, name: str = "first step"
    ) -> None:
        """Begin the first step of this start, after ``done`` steps of earlier ones; ``name``: the phase until its end.

        Throughput counts units, ``tokens`` or ``samples``; with ``units_per_step=None`` it is not shown.
        """
        self.total_steps = total
        self._done, self._unit, self._units_per_step = done, unit, units_per_step
        self.phase(name)

    def step(self, done: int, now: float) -> None:
        """Note the end of a step, number ``done`` of the run."""
        took = now - self._moved_at
        self._done, self._moved_at, self._noted = done, now, 0.0
        if self._base is not None:
            self._later_seconds += took
        else:  # the first step, which does not predict the following ones
            self._base, self._phase, self._first_seconds = done, None, took
            self._shown_step, self._shown_at, self._next = done, now, now + _FIRST_SECONDS

    def due(self, now: float) -> bool:
        """Return whether it is time for :meth:`show`."""
        return now >= self._next

    def show(self, now: float) -> float | None:
        """Show the steps so far, except after the last one, which :meth:`conclude` does.

        Returns:
            Tokens or samples per second since the last call; ``None`` after the first step.
        """
        self._rate = self._ends = None
        if self._done > self._shown_step:
            seconds = (now - self._shown_at) / (self._done - self._shown_step)
            self._rate = self._units_per_step / seconds if seconds > 0 and self._units_per_step else None
            self._ends = now + (self.total_steps - self._done) * seconds
        self._shown_step, self._shown_at = self._done, now
        self._next = now + (REDRAW_SECONDS if self._live else _LINE_SECONDS)
        if self._done < self.total_steps:
            self._write_steps(now)
        return self._rate

    def conclude(self, rate: float | None) -> None:
        """Show the run's throughput as recorded, without its warm-up, in place of that since the last call."""
        now = self._clock()
        self._rate, self._ends = rate, now if self._done == self.total_steps else None  # it was stopped
        self._write_steps(now)

    def _write_steps(self, now: float) -> None:
        if self._heading and not self._live:
            self._write(self._whole(now))

    def _whole(self, now: float, end: str = "") -> str:
        """Return the line of a step that stays, with as many figures as fit; all in a file, as in ``status``."""
        head, width = f"{self._heading}  {self._steps()}", shutil.get_terminal_size((0, 0)).columns
        room = width - len(head) - len(end) - 4 if width else sys.maxsize
        return "  ".join(filter(None, [head, _fitting(self._figures(now), room), end]))

    def _made_live(self) -> Live:
        """Return the line that stays below printed output, computed each time it is drawn, until it is stopped."""
        console = _Console(file=self._stream, force_terminal=True, highlight=False, emoji=False)
        return Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),  # including what a user's model prints
            get_renderable=lambda: self._row(max(1, console.width - _ECHO)),
        )

    def _row(self, width: int) -> RenderableType:
        left, right = self.line(width, self._clock())
        row = Table.grid(Column(no_wrap=True), Column(), Column(no_wrap=True), padding=(0, 1), expand=True)
        row.add_row(Text(left), ProgressBar(self.total_steps or None, self._done), Text(right))
        return Constrain(row, width)

    def line(self, width: int, now: float) -> tuple[str, str]:
        """Return the texts of the live line before and after its bar, in at most ``width`` columns."""
        heading = cropped(plain(str(self._heading)), max(12, width - 40))
        idle, phase = now - self._moved_at, self._phase
        if phase is not None:
            left, right = f"{heading} · {phase}… {duration_text(int(idle))}", ""
        else:
            left = f"{heading}  {self._steps()}"
            room = width - cell_len(left) - _BAR
            right = cropped(plain(self._late_step(idle) or _fitting(self._figures(now), room)), room)
        return left, right

    def tick(self, now: float) -> None:
        """Report long phases and late steps if nothing is redrawn; called periodically by the display's thread."""
        idle, phase = now - self._moved_at, self._phase
        reached = max(note for note in (0.0, *_NOTES, 60.0 * (idle // 60)) if note <= idle)
        if reached <= self._noted:
            return
        if phase is None:
            note = f"  {late}" if (late := self._late_step(idle)) else ""
        else:
            note = f" · {phase}…" if reached == _NOTES[0] else f": {phase}, {span_text(idle)} so far"
        if note:
            self._noted = reached
            self._write(f"{self._heading}{note}")

    def _watch(self) -> None:
        while not self._over:
            try:
                if self._live:
                    self._live.refresh()
                else:
                    self.tick(self._clock())
            except (OSError, ValueError):  # a run must not fail because its output stream is gone
                return
            self._wake.wait(REDRAW_SECONDS)
            self._wake.clear()

    def _late_step(self, idle: float) -> str:
        """``step 12: 12 s, before 1 s each`` for a step that is late, else an empty text."""
        later = self._done - (self._done if self._base is None else self._base)  # steps after the first one
        mean = self._later_seconds / later if later else None
        if idle < max(_LATE_SECONDS, _LATE_TIMES * (mean or 0.0)):
            return ""
        pace = f"before {span_text(mean)} each" if mean else f"the first one took {span_text(self._first_seconds)}"
        return f"step {self._done + 1}: {span_text(idle)}, {pace}"

    def _steps(self) -> str:
        return f"step {self._done}/{self.total_steps}"

    def _figures(self, now: float) -> dict[str, str]:
        texts = {}
        if (rate := self._rate) is not None:
            count, device = self.devices
            texts["rate"] = f"{three_digits(rate)} {self._unit}/s"
            texts |= {"each": f"({three_digits(rate / count)} a {device})"} if count > 1 else {}
        if self.loss:
            step, loss = self.loss
            texts["loss"] = f"loss {loss:.4f}" + (f" (step {step})" if step < self._done else "")
        if self.remark:
            texts["remark"] = self.remark
        if (ends := self._ends) is not None:
            left = max(0.0, ends - now)
            texts["left"] = f"{duration_text(left)} left"
            if self._heading and self._heading.later_seconds:
                texts["sweep"] = f"(sweep {duration_text(left + self._heading.later_seconds)})"
        return texts

    def _last_words(self, now: float) -> str:
        """Return the line that stays on a terminal after the run; empty for a run without steps outside a sweep."""
        assert self._heading
        took = f"in {duration_text(now - self._began)}"
        if self._base is None:
            return f"{self._heading}  {took}" if self._heading.number else ""
        self._ends = None
        return self._whole(now, took)

    def _write(self, line: str) -> None:
        if line and self._stream:
            with suppress(ValueError):  # the stream is closed
                echo(line, self._stream)


def _fitting(figures: dict[str, str], room: int) -> str:
    for least in ("remark", "each", "loss", "sweep", "rate"):
        if len("  ".join(figures.values())) > room:
            figures.pop(least, None)
    return "  ".join(figures.values())
