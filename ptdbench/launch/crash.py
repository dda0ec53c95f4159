"""Stacks of a process that crashed in native code: by SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL."""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

#: The signals, by faulthandler's names for them.
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",  # before Python 3.12
    "Illegal instruction": "SIGILL",
}

_STDERR = 2


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Within the context, write the stacks of a crash in native code to a file.

    A signal handler cannot create the file: it exists from the start, and is removed if there was no crash. Afterwards,
    and in a forked child, stacks go to stderr. If the file cannot be created, nothing changes.
    """
    file = None
    with suppress(OSError):
        for _ in range(10):
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another rank has removed the folder, with its own file
                file = path.open("w")
                break
    if file is None:
        yield
        return
    faulthandler.enable(file)
    try:
        yield
    finally:
        _to_stderr()
        file.close()
        discard_empty(path)


def _to_stderr() -> None:
    if faulthandler.is_enabled():
        faulthandler.enable(_STDERR)


os.register_at_fork(after_in_child=_to_stderr)  # a worker process forked by a rank is not the rank


def discard_empty(path: Path) -> None:
    """Remove a file if it is empty, and its two parent folders if they contain nothing else."""
    with suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()
            path.parent.rmdir()
            path.parent.parent.rmdir()


@dataclass(frozen=True)
class Crash:
    """A crash of a process in native code."""

    signal: str  #: The name of the signal.
    #: The stack of the crashed thread, innermost call first; of all threads if that was not a Python thread.
    stack: str
    #: File, line and function of each call of that thread, innermost first; otherwise of the main thread.
    calls: list[tuple[str, int, str]]


def read(text: str) -> Crash | None:
    """Parse a file written by :func:`kept`; ``None`` if there was no crash."""
    error = re.match(r"Fatal Python error: (.*)", text)
    if error is None:
        return None
    head, *threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text.partition("\nExtension modules:")[0])
    crashed = [thread for thread in threads if thread.startswith("Current")] or threads
    calls = re.findall(r'(?m)^  File "(.*)", line (\d+) in (.*)$', crashed[-1] if crashed else "")
    stack = f"{head}{''.join(crashed)}".rstrip() + "\n"
    return Crash(_SIGNALS.get(error[1], error[1]), stack, [(file, int(line), name) for file, line, name in calls])
