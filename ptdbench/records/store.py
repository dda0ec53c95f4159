"""Records on disk: ``record.json`` in a run's directory, and a copy of all in ``results.jsonl`` in its sweep's.

See :mod:`ptdbench.files` for how they are written. Locks use ``fcntl`` directly, not ``filelock``, which leaves a lock
file behind, where here the results themselves are locked; raises the same error for a file system without locks and
for a folder that is not writable; and releases its lock with a Python object, where a directory stays locked until the
process ends.
"""

import fcntl
import itertools
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ptdbench.files import create_atomically, read_bytes, replace_bytes, write_json
from ptdbench.problems import ConfigError, Problem, in_shell
from ptdbench.records.run_record import RunRecord, parse
from ptdbench.records.schema import Draft, Written
from ptdbench.terminal import echo

RECORD = "record.json"
RESULTS = "results.jsonl"

#: The folder, in a run's directory, of the short runs that found its micro-batch, which nobody requested.
TRIES = "tries"

LOCK = ".lock"

#: The link to the newest sweep, beside it.
LATEST = "latest"

#: The descriptors by which this process holds the locks of directories.
_LOCKED: dict[Path, int] = {}

#: The files that identify a sweep's directory.
OF_SWEEPS = (RESULTS, "sweep.json", "multirun.yaml")


def is_sweep(directory: Path) -> bool:
    """Return whether a directory belongs to a sweep as a whole."""
    return any((directory / name).exists() for name in OF_SWEEPS)


def without_runs(directory: Path) -> str:
    """Return why a sweep's directory has no run: the process that claimed it was killed before the first one."""
    return f"{directory}: a sweep or plan none of whose runs has begun; start it again, in another directory"


class Damaged(ValueError):
    """A damaged file; the message names it and says in one line what is wrong."""


def write_record(directory: Path, record: Written, durable: bool = True) -> None:
    """Write or replace a run's record atomically; if ``durable``, sync it to disk."""
    write_json(directory / RECORD, record, durable)


def read_record(directory: Path) -> RunRecord:
    """Read the record of the run in ``directory``; raises FileNotFoundError if there is none, and Damaged."""
    path = directory / RECORD
    try:
        return parse(read_bytes(path))
    except ValueError as error:
        raise Damaged(f"{path} is damaged: {error}") from None
    except OSError as error:
        if not os.path.lexists(path) or path.is_file():  # a file that cannot be read at the moment is not damaged
            raise
        raise Damaged(f"{path} is damaged: {error.strerror}") from None


def load_record(directory: Path) -> Draft:
    """Return the record of a run as it is written, to be changed and written again; see :func:`read_record`."""
    return read_record(directory).written


def load_or_set_aside(directory: Path) -> RunRecord | None:
    """Return the record of an earlier start of the run, if there is one; call this before replacing it.

    A damaged record is ignored, and renamed to ``record.json.damaged``.
    """
    try:
        return read_record(directory)
    except FileNotFoundError:
        return None
    except Damaged as damage:
        names = (directory / name for name in _numbered(f"{RECORD}.damaged"))
        aside = next(path for path in names if not os.path.lexists(path))
        (directory / RECORD).rename(aside)
        echo(f"{damage}; it is kept as {aside.name}, and the run is repeated", sys.stderr)
        return None


def read_runs(folder: Path, tell: Callable[[str], object] = lambda _: None) -> list[RunRecord]:
    """Return the records of the runs at or below a folder, in natural order of their paths.

    Their ``directory`` is where they are now. ``tell`` is called with a message for each that cannot be read, which is
    skipped.
    """
    records = []
    for directory in sorted(run_directories(folder), key=_in_order):
        try:
            records.append(read_record(directory).with_directory(str(directory)))
        except Damaged as damage:
            tell(str(damage))
        except OSError as error:
            tell(f"{directory / RECORD}: cannot be read: {error.strerror}")
    return records


def read_results(sweep_directory: Path, tell: Callable[[str], object] = lambda _: None) -> list[RunRecord]:
    """Return the records of a sweep's runs that have ended; arguments as for :func:`read_runs`."""
    return [run for run in read_runs(sweep_directory, tell) if not run.is_open]


def write_results(sweep_directory: Path, records: Iterable[RunRecord]) -> None:
    """Write records into one file, a line each, for other programs; OSError if that fails."""
    lines = "".join(f"{json.dumps(record.written)}\n" for record in records)
    replace_bytes(sweep_directory / RESULTS, lines.encode())


def _in_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts ``2_toy`` before ``10_toy``."""
    parts = re.split(r"0*(\d+)", str(path))
    return [(len(part), part) if part.isdecimal() else (-1, part) for part in parts]


def run_directories(folder: Path) -> list[Path]:
    """Return the directories at or below a folder that contain a record, sorted.

    Short runs that try a micro-batch are left out. Directories that vanish during the search, such as an old checkpoint
    or one being created, are skipped, which :meth:`pathlib.Path.rglob` does only since Python 3.13.
    """
    directories = []
    for place, folders, files in os.walk(folder):
        if RECORD in (*folders, *files):
            directories.append(Path(place))
        folders[:] = [name for name in folders if name != TRIES]
    return sorted(directories)


def occupy(directory: Path, option: str, fill: Callable[[Path, Path], None], again: bool) -> None:
    """Lock a directory, which may contain other files, until this process ends, and write its first files.

    Args:
        directory: The directory, created if it is missing.
        option: The option that named the directory, for messages.
        fill: As for :func:`claim_directory`.
        again: Whether to accept existing results, which will be continued.

    Raises:
        ConfigError: Another process is writing there, it is not writable, or it holds results.
    """
    with _writable(directory, option):
        is_new = create_atomically(directory, fill)
    lock(directory, option)
    if not is_new:
        resume = "sweep.resume" if is_sweep(directory) else "resume" if (directory / RECORD).exists() else None
        if not again and (resume or any(directory.glob(f"*/{RECORD}"))):
            remedy = f"try {in_shell(resume, directory)} to continue it, or another directory" if resume else ""
            raise ConfigError(
                [Problem(option, directory, "it already holds results", remedy or "give another directory")]
            )
        with _writable(directory, option):
            fill(directory, directory)


def lock(directory: Path, option: str) -> None:
    """Lock a directory until :func:`unlock` or the end of this process; ``option`` named it, for the message.

    Raises:
        ConfigError: Another process is writing there, or it is not writable.
    """
    with _writable(directory, option):
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    if not try_lock(descriptor):
        os.close(descriptor)
        rule = "another process is writing its results there"
        raise ConfigError([Problem(option, directory, rule, "wait for it, or give another directory")])
    _LOCKED[directory.resolve()] = descriptor


def unlock(directory: Path) -> None:
    """Release the lock of a directory that this process has locked."""
    os.close(_LOCKED.pop(directory.resolve()))


def unlock_all() -> None:
    """Release the locks of all directories that this process has locked."""
    for directory in [*_LOCKED]:
        unlock(directory)


def try_lock(descriptor: int, mode: int = fcntl.LOCK_EX) -> bool:
    """Try to take a lock; return ``True`` also if the file system has no locks, as on some clusters."""
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_locked(directory: Path) -> bool:
    """Return whether a running process has locked a directory, as far as can be seen from here."""
    with suppress(OSError):  # it was never locked
        descriptor = os.open(directory / LOCK, os.O_RDONLY)
        try:
            return not try_lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)
    return False


def claim_directory(parent: Path, name: str, option: str, fill: Callable[[Path, Path], None]) -> Path:
    """Create a new directory for this process: ``name``, or else ``name-2``, ``name-3``, ...

    It appears together with its first files, so that a killed process never leaves an unidentified directory.

    Args:
        parent: The folder to create it in, itself created if missing.
        name: The preferred name.
        option: The option that named the directory, for messages.
        fill: Called with a folder to write at least one file into, and the path that this folder will have.

    Raises:
        ConfigError: The parent is not writable.
    """
    stem = file_name(name).strip("-.") or "run"
    with _writable(parent, option):
        return next(path for numbered in _numbered(stem) if create_atomically(path := parent / numbered, fill))


def file_name(text: object) -> str:
    """Turn any text into a directory name: characters that need quoting in a shell or an override become ``-``."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", str(text))[:120]


def point_latest(directory: Path) -> None:
    """Point the link ``latest`` beside a sweep's directory to it; of sweeps that begin together, the last one wins.

    There is no link on file systems without links. Anything else of that name is left alone.
    """
    link = directory.with_name(LATEST)
    if os.path.lexists(link) and not link.is_symlink():
        return
    fresh = link.with_name(f".{LATEST}.{secrets.token_hex(4)}.tmp")
    with suppress(OSError):
        fresh.symlink_to(directory.name)
        fresh.replace(link)
        return
    with suppress(OSError):
        fresh.unlink()


@contextmanager
def _writable(directory: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        rule = f"nothing can be written there ({error.strerror})"
        raise ConfigError([Problem(option, directory, rule, "give one that you may write to")]) from None


def _numbered(stem: str) -> itertools.chain[str]:
    return itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
