"""The one line that says how a run is doing, and the file that says it to who watches from another machine."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ptdbench.records import schema
from ptdbench.records.files import write_json

PROGRESS = "progress.json"

_REDRAW_SECONDS = 0.5  # on a terminal, in place
_LINE_SECONDS = 10.0  # in a file or a pipe, where every line stays
_FILE_SECONDS = 10.0  # for people who watch a job of a cluster; more often, it shows in make overhead


class Progress:
    """A progress line: redrawn in place on a terminal, now and then a line of its own elsewhere.

    In a loop::

        progress = Progress(steps, "tokens", units_per_step=4096, label="gpt_tiny ddp", now=perf_counter())
        for step in range(steps):
            ...
            if progress.due(now := perf_counter()):
                progress.show(step + 1, loss.item(), now)
        progress.close()

    ``due`` is one comparison, so that what costs something, above all fetching the loss from a GPU, is done for
    the few steps that are shown. ``total_steps`` may change on the way.
    """

    def __init__(
        self,
        total_steps: int,
        unit: str,
        *,
        units_per_step: float,
        label: str,
        now: float,
        stream: TextIO | None = None,
        directory: Path | None = None,
    ) -> None:
        """Start the line; nothing is drawn yet.

        Args:
            total_steps: Steps of the whole run.
            unit: What throughput counts: ``tokens`` or ``samples``.
            units_per_step: How many of them a step makes.
            label: What is running.
            now: The time, in seconds by the clock that :meth:`due` and :meth:`show` are given.
            stream: Where to write; standard error if ``None``.
            directory: Where to keep ``progress.json`` up to date; nowhere if ``None``.
        """
        self.total_steps = total_steps
        self._unit = unit
        self._units_per_step = units_per_step
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._in_place = _is_terminal(self._stream)
        self._interval = _REDRAW_SECONDS if self._in_place else _LINE_SECONDS
        self._file = directory and directory / PROGRESS
        self._file_next = now
        self._next = now + _REDRAW_SECONDS  # the first sign of life comes soon everywhere
        self._shown_step = 0
        self._shown_at = now
        self._drawn = 0

    def due(self, now: float) -> bool:
        """Whether it is time to show something."""
        return now >= self._next

    def show(self, step: int, loss: float | None, now: float, remark: str = "") -> None:
        """Draw the line after ``step`` finished steps; ``loss`` may be unknown on this rank."""
        seconds_per_step = (now - self._shown_at) / max(step - self._shown_step, 1)
        self._shown_step, self._shown_at, self._next = step, now, now + self._interval
        if self._file and (now >= self._file_next or step == self.total_steps):
            self._file_next = now + _FILE_SECONDS
            rate = self._units_per_step / seconds_per_step if seconds_per_step > 0 else None
            known = {"step": step, "steps": self.total_steps, "unit": self._unit, "per_second": rate}
            with suppress(OSError):  # a run does not fail because its progress cannot be written
                write_json(self._file, known, durable=False)
        parts = [self._label, f"step {step}/{self.total_steps}"]
        if seconds_per_step > 0:
            parts.append(f"{self._units_per_step / seconds_per_step:,.0f} {self._unit}/s")
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        if remark:
            parts.append(remark)
        parts.append(f"{_duration((self.total_steps - step) * seconds_per_step)} left")
        self._write("  ".join(parts))

    def close(self) -> None:
        """End the line, so that what is printed next stands on its own."""
        if self._drawn:
            self._write_raw("\n")
            self._drawn = 0

    def _write(self, line: str) -> None:
        if not self._in_place:
            self._write_raw(line + "\n")
            return
        line = line[: _columns(self._stream) - 1]  # a line that wraps cannot be redrawn in place
        self._write_raw("\r" + line.ljust(self._drawn))
        self._drawn = len(line)

    def _write_raw(self, text: str) -> None:
        """Write, or fall silent for good: a run does not fail because nobody watches it any more."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (AttributeError, OSError, ValueError):  # no stream, its reader is gone, it is closed
            self._next = math.inf


def read_progress(directory: Path) -> dict[str, Any] | None:
    """What ``progress.json`` says; ``None`` before the first time, and where it is damaged."""
    try:
        return schema.parse((directory / PROGRESS).read_bytes(), schema.Progress)
    except (OSError, ValueError):
        return None


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _duration(seconds: float) -> str:
    """``75`` becomes ``1:15``, and ``3675`` ``1:01:15``."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
