"""Stacks of a process that native code ended: by SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL."""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

#: The signals in faulthandler's words.
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",  # before Python 3.12
    "Illegal instruction": "SIGILL",
}

_STDERR = 2

#: For each file that is kept, whether stacks went to stderr before.
_before: list[bool] = []


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Meanwhile a signal by which native code ends this process leaves its stacks in a file.

    The signal comes too late to create the file: it is there from the start, and removed if nothing has happened.
    Stacks that went to stderr before, as torchrun asks for, go there again afterwards, and in a forked child.
    Where the file cannot be created nothing changes.
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
    _before.append(faulthandler.is_enabled())
    faulthandler.enable(file)
    try:
        yield
    finally:
        _restore()
        file.close()
        discard_empty(path)


def _restore() -> None:
    if not _before:
        return
    if _before.pop():
        faulthandler.enable(_STDERR)
    else:
        faulthandler.disable()


os.register_at_fork(after_in_child=_restore)  # a worker that a rank has forked is not the rank


def discard_empty(path: Path) -> None:
    """Remove a file in which nothing was written, and the two folders that it lies in where nothing else does."""
    with suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()
            path.parent.rmdir()
            path.parent.parent.rmdir()


@dataclass(frozen=True)
class Crash:
    """A crash of a process in native code."""

    signal: str  #: The name of the signal.
    #: The stack of the thread that it hit, innermost call first; of all threads if that one was not Python's.
    stack: str
    #: File, line and function of each call of that thread, innermost first; else of the main thread.
    calls: list[tuple[str, int, str]]


def read(text: str) -> Crash | None:
    """Parse a file of :func:`kept`; ``None`` if nothing has happened."""
    said = re.match(r"Fatal Python error: (.*)", text)
    if said is None:
        return None
    head, *threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text.partition("\nExtension modules:")[0])
    hit = [thread for thread in threads if thread.startswith("Current")] or threads
    calls = re.findall(r'(?m)^  File "(.*)", line (\d+) in (.*)$', hit[-1] if hit else "")
    return Crash(
        _SIGNALS.get(said[1], said[1]),
        f"{head}{''.join(hit)}".rstrip() + "\n",
        [(file, int(line), function) for file, line, function in calls],
    )
