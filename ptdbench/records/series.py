"""The series of a run: ``series.npy`` in its directory, with a row of numbers for every step.

The file is a sequence of blocks, each an array written by :func:`numpy.save` and so self-describing: after a resume
elsewhere a block may have another number of ranks. Row ``i`` of all blocks together is step ``i``. An incomplete last
block, left by a killed writer, is ignored by readers and truncated by the next writer.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ptdbench.files import opened

NAME = "series.npy"

#: Columns of one number per step; NaN if unknown.
NUMBERS = ("loss", "learning_rate", "gradient_norm", "wait_seconds", "memory_bytes")


def unknown(steps: int, ranks: int = 1) -> np.ndarray:
    """Return ``[steps]`` rows of NaN, to be filled in.

    The columns are those of :data:`NUMBERS`, and ``step_seconds`` with ``[ranks]`` in each row; all are float64.
    """
    return np.full(steps, np.nan, _dtype(ranks))


def append(path: Path, rows: np.ndarray) -> None:
    """Append a block to a file of complete blocks, and sync it; on OSError the file is left unchanged."""
    with path.open("ab") as file:
        end = file.tell()
        try:
            np.save(file, rows, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise


def keep(path: Path, steps: int) -> int:
    """Truncate a file to its first ``steps`` steps; return how many of them it has."""
    kept = 0
    with path.open("a+b") as file:
        file.seek(0)
        while kept < steps:
            start, block = file.tell(), _read(file)
            if block is None or kept + len(block) > steps:
                file.seek(start)
                break
            kept += len(block)
        file.truncate()
        if kept < steps and block is not None:  # the block that extends beyond them
            np.save(file, block[: steps - kept], allow_pickle=False)
            kept = steps
    return kept


def copy(source: Path, target: Path, steps: int) -> int:
    """Write the first ``steps`` steps of one file into another; return how many of them there are."""
    write(target, blocks(source))
    return keep(target, steps)


def write(path: Path, content: Iterable[np.ndarray]) -> None:
    """Replace a file with these blocks."""
    with path.open("wb") as file:
        for rows in content:
            np.save(file, rows, allow_pickle=False)


def blocks(path: Path) -> Iterator[np.ndarray]:
    """Yield the blocks of a file, holding one in memory at a time; none if the file is missing."""
    if not path.is_file():
        return
    with opened(path) as file:
        while (block := _read(file)) is not None:
            yield block


def column(content: Iterable[np.ndarray], name: str) -> np.ndarray:
    """Return a column of all blocks: ``[steps]``, or ``[steps, ranks]`` for ``step_seconds``.

    ``slowest_seconds`` are the seconds of each step's slowest rank. Ranks absent from a step are NaN.
    """
    is_slowest = name == "slowest_seconds"
    parts = [np.fmax.reduce(rows["step_seconds"], axis=1) if is_slowest else rows[name] for rows in content]
    if name == "step_seconds":
        ranks = max((part.shape[1] for part in parts), default=0)
        parts = [np.pad(part, ((0, 0), (0, ranks - part.shape[1])), constant_values=np.nan) for part in parts]
        return np.concatenate([np.empty((0, ranks)), *parts])
    return np.concatenate([np.empty(0), *parts])


def _dtype(ranks: int) -> np.dtype:
    return np.dtype([*((name, "<f8") for name in NUMBERS), ("step_seconds", "<f8", (ranks,))])


def _read(file: BinaryIO) -> np.ndarray | None:
    """Return the block that begins here; ``None`` if it is incomplete."""
    try:
        rows = np.load(file, allow_pickle=False)
        ranks = rows.dtype["step_seconds"].shape[0]
        return rows if rows.ndim == 1 and ranks and rows.dtype == _dtype(ranks) else None
    except Exception:  # many types for arbitrary bytes
        return None
