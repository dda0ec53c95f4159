"""Records on disk: one ``record.json`` in a run's directory, one line of ``results.jsonl`` in its sweep's.

Whoever is killed while writing leaves the old file or the new one, never half of one. What is written is
strict JSON: JSON has no NaN and no infinity, so a number that is not finite becomes ``null`` (the status and
the error of the record say what happened), and a value of another type becomes its text.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ptdbench.problems import ConfigError, Problem
from ptdbench.records import schema
from ptdbench.terminal import say

RECORD = "record.json"
RESULTS = "results.jsonl"
LOCK = ".lock"


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
        return schema.parse(path.read_bytes(), schema.Record)
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
        say(f"{damage}; it is kept as {aside.name}, and the run is done again", sys.stderr)
        return None


def append_result(sweep_directory: Path, record: Mapping[str, Any]) -> None:
    """Add a record to the results of a sweep, whose runs may end at the same time in several processes.

    The line goes out in one write under a lock. What a killed writer left of a line is removed first: its run
    still has its own record.

    Raises:
        OSError: The line could not be written; the file is as it was before.
    """
    line = (json.dumps(_strict(record), allow_nan=False) + "\n").encode()
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
            record = schema.parse(line, schema.Record)
        except ValueError as error:
            if line.strip() and number < len(lines):
                tell(f"{path}: line {number} is damaged and passed over: {error}")
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


def is_done(directory: Path, fingerprint: str) -> bool:
    """Whether a run of this fingerprint has been ok in ``directory``."""
    try:
        record = load_record(directory)
    except (FileNotFoundError, Damaged):
        return False
    return record["status"] == "ok" and record["fingerprint"] == fingerprint


def require_unused(directory: Path, option: str) -> None:
    """Raise a ConfigError if a directory that ``option`` names holds results: nothing finished is overwritten."""
    if any((directory / name).exists() for name in (RECORD, RESULTS)):
        kind = "sweep.resume" if (directory / RESULTS).exists() else "resume"
        remedy = f"would do: {kind}={directory} to go on with it, or another directory"
        raise ConfigError([Problem(option, directory, "there are results already", remedy)])


def occupy(directory: Path, option: str) -> None:
    """Take a directory until this process ends.

    Raises:
        ConfigError: Another process is writing there, or nobody may.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
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


def claim_directory(parent: Path, name: str, option: str = "hydra.run.dir") -> Path:
    """Make a directory that no other process has been given: ``name``, else ``name-2``, ``name-3``, ...

    Args:
        parent: Where to make it; made where it is missing.
        name: Wished name. What would need quoting in a shell or in an override becomes ``-``.
        option: The option that ``parent`` came from, for the message.

    Raises:
        ConfigError: Nothing can be made there.
    """
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.")[:200] or "run"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return next(filter(_claim, (parent / numbered for numbered in _numbered(stem))))
    except OSError as error:
        raise _unwritable(parent, option, error) from None


def _unwritable(directory: Path, option: str, error: OSError) -> ConfigError:
    rule = f"no directory can be made there ({error.strerror})"
    return ConfigError([Problem(option, directory, rule, "give one that you may write to")])


def write_json(path: Path, value: object) -> None:
    """Write strict JSON (see the module) so that ``path`` holds all of it or what it held before.

    Raises:
        OSError: It could not be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # ranks of several hosts may write
    try:
        with temporary.open("w") as file:
            json.dump(_strict(value), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _strict(value: Any) -> Any:
    """The same value in types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "tolist"):  # numpy scalars and arrays, tensors
        return _strict(value.tolist())
    return str(value)


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


def _claim(path: Path) -> bool:
    """Whether this call made the directory; ``mkdir`` lets only one of several callers succeed."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True
