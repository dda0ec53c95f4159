"""What a victim leaves on the disk, read with ``json`` and NumPy, as the product's own readers may have the fault."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RECORD, RESULTS = "record.json", "results.jsonl"

#: Hidden names that are not temporary: Hydra's folder, a directory's lock, and a file of torch's checkpoints.
_EXPECTED = (".hydra", ".lock", ".metadata")

#: Fields that the end of a run changes after its record is ok.
_OF_THE_END = ("environment", "nodes", "remarks")


def directories(folder: Path) -> list[Path]:
    """Return the visible directories below ``outputs``: a run or a sweep, or nothing."""
    visible = folder.glob("outputs/[!.]*")
    return sorted(path for path in visible if not path.is_symlink())  # as latest is


def run_directories(folder: Path, is_sweep: bool) -> list[Path]:
    """Return the visible directories of runs below ``outputs``."""
    paths = directories(folder)
    if is_sweep:
        paths = [path for sweep in paths for path in sweep.glob("[0-9]*_*")]
    return sorted(path for path in paths if path.is_dir())


def strict(text: bytes) -> Any:
    """Read strict JSON; raises ValueError for anything else."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def invalid(directory: Path) -> str:
    """Return what is wrong with the record of a run, or an empty string."""
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
    """Return the record of a run, or an empty one if it is invalid."""
    return {} if invalid(directory) else strict((directory / RECORD).read_bytes())


def finished(folder: Path, is_sweep: bool) -> dict[Path, bytes]:
    """Return the bytes of the record of every run that is ok."""
    ok = [path for path in run_directories(folder, is_sweep) if record_of(path).get("status") == "ok"]
    return {path: (path / RECORD).read_bytes() for path in ok}


def changed(directory: Path, before: bytes) -> bool:
    """Return whether a field of an ok run's record has changed; the profiling pass may add fields."""
    was, now = strict(before), record_of(directory)
    return any(value is not None and now.get(name) != value for name, value in was.items() if name not in _OF_THE_END)


def losses(directory: Path) -> list[float]:
    """Return the losses of a run's steps; none if its series are missing or end in the middle of a block."""
    path, values = directory / "series.npy", list[float]()
    try:
        with path.open("rb") as file:
            while file.tell() < path.stat().st_size:
                values += np.load(file, allow_pickle=False)["loss"].tolist()
    except (OSError, ValueError):
        return []
    return values


def ok_in_results(folder: Path) -> set[str]:
    """Return the directory names of the runs that are ok by their last valid line in the results of a sweep."""
    status = {}
    for sweep in directories(folder):
        for _, record in _lines(sweep / RESULTS):
            if isinstance(record, dict) and "directory" in record:
                status[Path(record["directory"]).name] = record.get("status")
    return {name for name, last in status.items() if last == "ok"}


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each complete line of a sweep's results, and its record or the error in it."""
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], start=1):
        try:
            yield number, strict(line)
        except ValueError as error:
            yield number, error


def half_written(folder: Path) -> Iterator[str]:
    """Yield files, but no records, that have their final names and are incomplete."""
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
