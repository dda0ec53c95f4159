"""Records on disk: one ``record.json`` in a run's directory, one line of ``results.jsonl`` in its sweep's.

How they are written, :mod:`ptdbench.records.files` says.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ptdbench.problems import ConfigError, Problem
from ptdbench.records import schema
from ptdbench.records.files import appear, strict, write_json
from ptdbench.terminal import say

RECORD = "record.json"
RESULTS = "results.jsonl"
LOCK = ".lock"

#: What a sweep's directory is known by.
OF_SWEEPS = (RESULTS, "sweep.json", "multirun.yaml")


class Damaged(ValueError):
    """A file that does not hold what was written to it; the message names it and says in one line what is wrong."""


def write_record(directory: Path, record: Mapping[str, Any]) -> Path:
    """Write a run's record, atomically and through to the disk; an older one is replaced.

    Returns:
        The path of the record.
    """
    path = directory / RECORD
    write_json(path, record)
    return path


def load_record(directory: Path) -> dict[str, Any]:
    """The record of the run in ``directory``.

    Raises:
        FileNotFoundError: The run has left none.
        Damaged: It is not what a run writes.
    """
    path = directory / RECORD
    try:
        return schema.record(path.read_bytes())
    except (ValueError, IsADirectoryError) as error:
        raise Damaged(f"{path} is damaged: {getattr(error, 'strerror', None) or error}") from None


def earlier_record(directory: Path) -> dict[str, Any] | None:
    """The record that an earlier start of the run has left, for one who is about to write another.

    A damaged one counts for nothing, and is kept as ``record.json.damaged``.
    """
    try:
        return load_record(directory)
    except FileNotFoundError:
        return None
    except Damaged as damage:
        names = (directory / name for name in _numbered(f"{RECORD}.damaged"))
        aside = next(path for path in names if not os.path.lexists(path))
        (directory / RECORD).rename(aside)
        say(f"{damage}; it is kept as {aside.name}, and the run is repeated", sys.stderr)
        return None


def append_result(sweep_directory: Path, record: Mapping[str, Any]) -> None:
    """Add a record to the results of a sweep, whose runs may end at the same time in several processes.

    The line goes out in one write under a lock. What a killed writer left of a line is removed first: its run
    still has its own record.

    Raises:
        OSError: The line could not be written; the file is as it was before.
    """
    line = (json.dumps(strict(record), allow_nan=False) + "\n").encode()
    descriptor = os.open(sweep_directory / RESULTS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):  # some cluster file systems have no locks; one appending write is the best there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        end = _cut_torn_line(descriptor)
        if os.write(descriptor, line) != len(line):
            os.ftruncate(descriptor, end)
            raise OSError(f"no room for a result in {sweep_directory / RESULTS}")
    finally:
        os.close(descriptor)  # which also gives the lock back


def read_results(sweep_directory: Path, tell: Callable[[str], object] = lambda _: None) -> list[dict[str, Any]]:
    """The records of a sweep in the order in which its runs ended.

    Where a run has several, as one that was interrupted and went on, the last one counts.

    Args:
        sweep_directory: The sweep's directory.
        tell: Is given a sentence for each line that is damaged and so passed over. What a killed writer left of the
            last line is none: its run has a record of its own.
    """
    path = sweep_directory / RESULTS
    if not path.exists():
        return []
    records: dict[str, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = schema.record(line)
        except ValueError as error:
            if line.strip() and number < len(lines):
                tell(f"{path}: line {number} is damaged and skipped: {error}")
        else:
            records[below(sweep_directory, record["directory"])] = record
    return list(records.values())


def below(sweep_directory: Path, path: str) -> str:
    """A run's directory as it is below its sweep's, which may have been moved since.

    ``outputs/<sweep>/toy/ddp`` becomes ``toy/ddp``.
    """
    parts, sweep = Path(path).parts, sweep_directory.resolve().name
    depth = parts[::-1].index(sweep) if sweep in parts else 1
    return str(Path(*parts[len(parts) - depth :]))


def _require_unused(directory: Path, option: str) -> None:
    """Raise a ConfigError if a directory that ``option`` names holds results: nothing finished is overwritten."""
    of_sweep = any((directory / name).exists() for name in OF_SWEEPS) or any(directory.glob(f"*/{RECORD}"))
    if of_sweep or (directory / RECORD).exists():
        remedy = f"try {'sweep.resume' if of_sweep else 'resume'}={directory} to continue it, or another directory"
        raise ConfigError([Problem(option, directory, "it already holds results", remedy)])


def occupy(directory: Path, option: str, fill: Callable[[Path, Path], None], again: bool) -> None:
    """Take a directory until this process ends, and write its first files.

    Args:
        directory: It may exist already, and hold other things.
        option: The option that it came from, for the message.
        fill: As for :func:`claim_directory`.
        again: Whether results that are there already are gone on with; else they are a reason to refuse.

    Raises:
        ConfigError: Another process is writing there, nobody may, or it already holds results.
    """
    try:
        is_new = appear(directory, fill)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # closed when the process ends
    except OSError as error:
        raise _unwritable(directory, option, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        rule = "another process is writing its results there"
        raise ConfigError([Problem(option, directory, rule, "wait for it, or give another directory")]) from None
    except OSError:  # some cluster file systems have no locks
        os.close(descriptor)
    if not is_new:
        if not again:
            _require_unused(directory, option)
        try:
            fill(directory, directory)
        except OSError as error:
            raise _unwritable(directory, option, error) from None


def claim_directory(parent: Path, name: str, option: str, fill: Callable[[Path, Path], None]) -> Path:
    """Make a directory that no other process has been given: ``name``, else ``name-2``, ``name-3``, ...

    It appears with its first files in it: whoever is killed at any moment leaves no directory of which nobody knows
    what it is.

    Args:
        parent: Where to make it; made where it is missing.
        name: Wished name. What would need quoting in a shell or in an override becomes ``-``.
        option: The option that ``parent`` came from, for the message.
        fill: Called with a folder to write the first files into, at least one, and the name that it will have.

    Raises:
        ConfigError: Nothing can be made there.
    """
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.")[:200] or "run"
    try:
        return next(path for numbered in _numbered(stem) if appear(path := parent / numbered, fill))
    except OSError as error:
        raise _unwritable(parent, option, error) from None


def _unwritable(directory: Path, option: str, error: OSError) -> ConfigError:
    rule = f"nothing can be written there ({error.strerror})"
    return ConfigError([Problem(option, directory, rule, "give one that you may write to")])


def _cut_torn_line(descriptor: int) -> int:
    """Cut off what follows the last line end, and return the length that is left."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    end = os.pread(descriptor, size, 0).rfind(b"\n") + 1
    os.ftruncate(descriptor, end)
    return end


def _numbered(stem: str) -> itertools.chain[str]:
    return itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
