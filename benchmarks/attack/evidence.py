"""What a victim has left on the disk, read by ``json`` and NumPy alone: the product's own readers may be at fault."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

RECORD, RESULTS, SERIES = "record.json", "results.jsonl", "series.npy"

#: Hidden names that are no leftovers: Hydra's folder, the lock of a directory, a file of each of torch's checkpoints.
_EXPECTED = (".hydra", ".lock", ".metadata")


def run_directories(folder: Path, is_sweep: bool) -> list[Path]:
    """Every directory of a run below ``outputs``, but for those with a hidden name."""
    found = directories(folder)
    if is_sweep:
        found = [path for sweep in found for path in sweep.glob("[0-9]*_*")]
    return sorted(path for path in found if path.is_dir() and not path.name.startswith("."))


def directories(folder: Path) -> list[Path]:
    """What a person finds below ``outputs``: one run or one sweep, or nothing."""
    found = folder.glob("outputs/*")
    return sorted(path for path in found if not path.name.startswith(".") and not path.is_symlink())  # the newest


def load(path: Path) -> Any:
    """A file of strict JSON.

    Raises:
        ValueError: It is none.
        OSError: It cannot be read.
    """
    return _strict(path.read_bytes())


def invalid(directory: Path) -> str:
    """What is wrong with the record of a run; nothing for a valid one."""
    try:
        record = load(directory / RECORD)
    except OSError as error:
        return f"{directory}: no record ({error.strerror})"
    except ValueError as error:
        return f"{directory}: the record is no JSON ({error})"
    if isinstance(record, dict) and isinstance(record.get("status"), str) and isinstance(record.get("config"), dict):
        return ""
    return f"{directory}: the record has no status or no config"


def finished(folder: Path, is_sweep: bool) -> dict[Path, bytes]:
    """The bytes of the record of every run that was ok."""
    found = {}
    for directory in run_directories(folder, is_sweep):
        if (record := record_of(directory)) and record["status"] == "ok":
            found[directory] = (directory / RECORD).read_bytes()
    return found


#: Fields that the end of a run changes, after its steps are safe in a record that is ok.
_OF_THE_END = ("environment", "nodes", "remarks")


def changed(directory: Path, before: bytes) -> bool:
    """Whether something is not as it was in the record of a run that was ok; the profiling pass may add to it."""
    was, now = _strict(before), record_of(directory)
    return any(value is not None and now.get(name) != value for name, value in was.items() if name not in _OF_THE_END)


def record_of(directory: Path) -> dict[str, Any]:
    """The record of a run; empty where it has no valid one."""
    return {} if invalid(directory) else load(directory / RECORD)


def losses(directory: Path) -> list[float]:
    """The losses of a run's steps; none where its series are missing or end in the middle of a block."""
    path = directory / SERIES
    found: list[float] = []
    try:
        with path.open("rb") as file:
            while file.tell() < path.stat().st_size:
                found += np.load(file, allow_pickle=False)["loss"].tolist()
    except (OSError, ValueError):
        return []
    return found


def is_open(record: Mapping[str, Any]) -> bool:
    """Whether a record says that the run has not ended."""
    return (record.get("error") or {}).get("type") == "Unfinished"


def results(sweep: Path) -> dict[str, dict[str, Any]]:
    """The last line of each run in a sweep's results, by the name of its directory; no lines that do not parse."""
    found = {}
    for line in _lines(sweep):
        try:
            record = _strict(line)
            found[Path(record["directory"]).name] = record
        except (ValueError, KeyError, TypeError):
            continue
    return found


def half_written(folder: Path) -> Iterator[str]:
    """Files and checkpoints that bear their final name and are not whole.

    A last line of results without its end is none: it is dropped when the next one is written, as README says.
    """
    for path in _visible(folder / "outputs"):
        if path.name == RECORD:
            continue  # counted by itself
        if path.suffix == ".json":
            try:
                load(path)
            except ValueError as error:
                yield f"{path}: {error}"
        elif path.suffix == ".yaml" and not path.stat().st_size:
            yield f"{path}: empty"
        elif path.name == RESULTS:
            lines = _lines(path.parent)
            yield from (f"{path}: line {number} does not parse" for number in _bad(lines))
        elif path.name == "manifest.json":
            yield from _broken(path.parent)


def leftovers(folder: Path) -> list[str]:
    """Names of temporary files and directories that lie about: hidden ones, and checkpoints without a final name."""
    names = [path.name for path in (folder / "outputs").rglob("*")]
    return sorted(
        name
        for name in names
        if (name.startswith(".") and name not in _EXPECTED) or name.endswith((".partial", ".deleted"))
    )


def _visible(top: Path) -> Iterator[Path]:
    """Files below ``top`` whose path has no temporary part."""
    for path in sorted(top.rglob("*")):
        parts = path.relative_to(top).parts
        temporary = any(part.startswith(".") and part not in _EXPECTED for part in parts)
        if path.is_file() and not temporary and not any(part.endswith((".partial", ".deleted")) for part in parts):
            yield path


def _broken(checkpoint: Path) -> Iterator[str]:
    """Files of a checkpoint that are not what its manifest says."""
    for name, stamp in load(checkpoint / "manifest.json")["files"].items():
        path = checkpoint / name
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != stamp["sha256"]:
            yield f"{path}: does not match its checksum"


def _lines(sweep: Path) -> list[bytes]:
    """The complete lines of a sweep's results."""
    path = sweep / RESULTS
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _bad(lines: list[bytes]) -> Iterator[int]:
    for number, line in enumerate(lines, start=1):
        try:
            _strict(line)
        except ValueError:
            yield number


def _strict(text: bytes) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)
