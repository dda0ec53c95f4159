"""What a victim has left on the disk, read by ``json`` and NumPy alone: the product's own readers may be at fault."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RECORD, RESULTS = "record.json", "results.jsonl"

#: Hidden names that are not temporary: Hydra's folder, the lock of a directory, a file of each of torch's checkpoints.
_EXPECTED = (".hydra", ".lock", ".metadata")

#: Fields that the end of a run changes, after its steps are safe in a record that is ok.
_OF_THE_END = ("environment", "nodes", "remarks")


def directories(folder: Path) -> list[Path]:
    """What a person finds below ``outputs``: one run or one sweep, or nothing."""
    found = folder.glob("outputs/*")
    return sorted(path for path in found if not path.name.startswith(".") and not path.is_symlink())  # the newest


def run_directories(folder: Path, is_sweep: bool) -> list[Path]:
    """Every directory of a run below ``outputs``, but for those with a hidden name."""
    found = directories(folder)
    if is_sweep:
        found = [path for sweep in found for path in sweep.glob("[0-9]*_*")]
    return sorted(path for path in found if path.is_dir() and not path.name.startswith("."))


def strict(text: bytes) -> Any:
    """Read strict JSON; raises ValueError for anything else."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def invalid(directory: Path) -> str:
    """What is wrong with the record of a run; nothing for a valid one."""
    try:
        record = strict((directory / RECORD).read_bytes())
    except OSError as error:
        return f"{directory}: no record ({error.strerror})"
    except ValueError as error:
        return f"{directory}: the record is no JSON ({error})"
    if isinstance(record, dict) and isinstance(record.get("status"), str) and isinstance(record.get("config"), dict):
        return ""
    return f"{directory}: the record has no status or no config"


def record_of(directory: Path) -> dict[str, Any]:
    """The record of a run; empty where it has no valid one."""
    return {} if invalid(directory) else strict((directory / RECORD).read_bytes())


def finished(folder: Path, is_sweep: bool) -> dict[Path, bytes]:
    """The bytes of the record of every run that was ok."""
    ok = [path for path in run_directories(folder, is_sweep) if record_of(path).get("status") == "ok"]
    return {path: (path / RECORD).read_bytes() for path in ok}


def changed(directory: Path, before: bytes) -> bool:
    """Whether something is not as it was in the record of a run that was ok; the profiling pass may add to it."""
    was, now = strict(before), record_of(directory)
    return any(value is not None and now.get(name) != value for name, value in was.items() if name not in _OF_THE_END)


def losses(directory: Path) -> list[float]:
    """The losses of a run's steps; none where its series are missing or end in the middle of a block."""
    path, found = directory / "series.npy", list[float]()
    try:
        with path.open("rb") as file:
            while file.tell() < path.stat().st_size:
                found += np.load(file, allow_pickle=False)["loss"].tolist()
    except (OSError, ValueError):
        return []
    return found


def ok_in_results(folder: Path) -> set[str]:
    """The runs of sweeps whose last line of results that parses says that they were ok, by their directories' names."""
    status = {}
    for sweep in directories(folder):
        for _, record in _lines(sweep / RESULTS):
            if isinstance(record, dict) and "directory" in record:
                status[Path(record["directory"]).name] = record.get("status")
    return {name for name, said in status.items() if said == "ok"}


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The complete lines of a sweep's results with their numbers; of one that does not parse the error.

    A last line without its end is dropped when the next one is written, as README says.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], start=1):
        try:
            yield number, strict(line)
        except ValueError as error:
            yield number, error


def half_written(folder: Path) -> Iterator[str]:
    """Files and checkpoints that bear their final name and are not whole; records are looked at by themselves."""
    for path in sorted(folder.glob("outputs/**/*")):
        if not path.is_file() or any(map(_is_temporary, path.relative_to(folder).parts)):
            continue
        if path.suffix == ".json" and path.name != RECORD:
            try:
                content = strict(path.read_bytes())
            except ValueError as error:
                yield f"{path}: {error}"
                continue
            files = content["files"] if path.name == "manifest.json" else {}
            for name, stamp in files.items():
                part = path.parent / name
                if not part.exists() or hashlib.sha256(part.read_bytes()).hexdigest() != stamp["sha256"]:
                    yield f"{part}: does not match its checksum"
        elif path.suffix == ".yaml" and not path.stat().st_size:
            yield f"{path}: empty"
        elif path.name == RESULTS:
            torn = [number for number, record in _lines(path) if isinstance(record, ValueError)]
            yield from (f"{path}: line {number} does not parse" for number in torn)


def _is_temporary(name: str) -> bool:
    return (name.startswith(".") and name not in _EXPECTED) or name.endswith((".partial", ".deleted"))
