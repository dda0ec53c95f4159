"""The live line of a run on a terminal, by rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

#: Columns that are left to the right: a terminal shows Ctrl-C as ^C, and the line would wrap.
_ECHO = 3


def _plain_streams() -> None:
    """In a forked process, such as one that makes samples: print past the live line, which is not drawn there."""
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


os.register_at_fork(after_in_child=_plain_streams)


class _Console(Console):
    """A console that leaves the cursor alone: a rank that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


@dataclass(frozen=True)
class Line:
    """A live line: text, a bar, and text.

    Attributes:
        left: Before the bar: which run it is and what it does.
        right: After the bar.
        done: Steps of the bar.
        total: All of its steps; ``None`` where it only moves.
    """

    left: str
    right: str
    done: int = 0
    total: int | None = None


class Live(Progress):
    """One line, which stays below what is printed meanwhile and is gone when it stops.

    Args:
        stream: The terminal.
        line: What to draw in so many columns; asked for each time it is drawn.
    """

    def __init__(self, stream: TextIO, line: Callable[[int], Line]) -> None:
        self._line = line
        words = Column(no_wrap=True)
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=words),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}", markup=False, table_column=words.copy()),
            console=_Console(file=stream, force_terminal=True, highlight=False, emoji=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),  # what a model of the user's own prints, too
            expand=True,
        )
        self.add_task("", total=None, figures="")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by rich for what it draws."""
        if not self.task_ids:  # rich asks before there is anything
            return
        line = self._line(self._width)
        self.update(self.task_ids[0], description=line.left, total=line.total, completed=line.done, figures=line.right)
        yield Constrain(self.make_tasks_table(self.tasks), self._width)

    @property
    def _width(self) -> int:
        return max(1, self.console.width - _ECHO)
