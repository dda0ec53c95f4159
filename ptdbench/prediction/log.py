"""Logs of a few steps on virtual GPUs: what each process had its GPU do, in the order of its calls.

A process of a ``virtual=`` run, and of any program under ``ptdbench virtual``, writes its log into the folder that the
variable ``PTDBENCH_VIRTUAL_LOG`` names.

**Format, version 1.** ``RANK.names`` is a text: a line of JSON, the facts about the process (:attr:`Log.facts`), then a
name on each line. ``RANK.log`` begins with the 8 bytes ``ptdlog``, version, and size of a record, followed by the
records (:data:`RECORD`, little-endian). A killed process may leave part of a record. :meth:`Log.save` writes both as
one compressed file of numpy's, with an array for each field.

Fields of a record:

- ``kind``: one of :class:`Kind`.
- ``flags``: of :class:`Flag`.
- ``thread``: the number of the calling thread, from 1; its order and the others' is the order of the records.
- ``stream``: the stream of the work, or that records an event or waits.
- ``name``: the place in :attr:`Log.names`; 0 is no name.
- ``gap``: microseconds of processor time of the thread since its last record, on this machine; for information only.
- ``bytes``: read and written by a kernel; copied; set; of a message the larger of a rank's input and output.
- ``object``: the number of the event, or of the communicator: the same on all of its ranks, if all run.
- ``grid``, ``block``: blocks in three dimensions, and threads of a block.
- ``dims``: of a product, the sizes m, n, k and batch in cuBLAS's order of columns first, and cuBLASLt's epilogue; of an
  attention, batch, heads, queries, width of a head, keys, heads of keys, and products: 2 forward, 5 backward; of a
  convolution, the sizes of its input and its weights, the last two of five multiplied; of a message, the communicator's
  ranks, this process's rank in it, the root or peer, and the number of transfers that it carries out.
- ``sequence``: the number of a collective in its communicator, or of a transfer among those between two ranks in one
  direction; from 0. Messages with the same ``object`` and ``sequence`` belong together.
- ``operators``: operators and autograd nodes that torch has begun since the last record, in any thread, nested ones
  included.
- ``device``: the number of the GPU.
- ``dtype``, ``result``: places in :data:`DTYPES`: of the operands, and of what is written.
- ``layout``: of a product, 2 if the first operand is transposed, plus 1 if the second one is.
- ``operation``: of a message, a place in :data:`OPERATIONS`.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

#: The version of the format.
VERSION = 1

#: A record; see above.
RECORD = np.dtype(
    [
        *(("kind", "S1"), ("flags", "u1"), ("thread", "<u2"), ("stream", "<u4"), ("name", "<u4"), ("gap", "<f4")),
        *(("bytes", "<u8"), ("object", "<u8"), ("grid", "<u4", 3), ("block", "<u4"), ("dims", "<i4", 8)),
        *(("sequence", "<u4"), ("operators", "<u2"), ("device", "<u2")),
        *(("dtype", "u1"), ("result", "u1"), ("layout", "u1"), ("operation", "u1"), ("reserved", "<u4")),
    ]
)

#: dtypes by their numbers in a record.
DTYPES = (
    *("", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"),
    *("float8", "float8_e5m2", "tf32"),
)

#: Operations of messages by their numbers in a record, as torch calls them.
OPERATIONS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "recv")

_HEAD = b"ptdlog" + bytes([VERSION, RECORD.itemsize])


class Kind(bytes, enum.Enum):
    """What a record is about."""

    KERNEL = b"K"  #: Work on a stream.
    COPY = b"C"  #: Likewise; its name is ``HtoD``, ``DtoH``, ``DtoD`` or ``HtoH``.
    SET = b"S"  #: Likewise: memory is set.
    MESSAGE = b"N"  #: Likewise: a collective, or the transfers before it.
    TRANSFER = b"T"  #: A send or receive that the next message of its stream carries out.
    EVENT = b"E"  #: An event is recorded on a stream.
    WAIT = b"W"  #: A stream waits for an event.
    HOST_WAITS_STREAM = b"Y"  #: The host waits for a stream.
    HOST_WAITS_EVENT = b"Z"
    HOST_WAITS_DEVICE = b"D"
    MARK = b"M"  #: The beginning of a step, or the end of the last one; its name is ``step``.


class Flag(enum.IntFlag):
    """What else is known of work."""

    GUESSED = 1  #: Its bytes are a guess.
    CAUSAL = 2  #: An attention computes half of the pairs of queries and keys.
    ACCUMULATES = 4  #: A product is added to what the result holds.


class Unreadable(ValueError):
    """A log that is damaged, or of another version."""


@dataclass(frozen=True)
class Log:
    """The log of one process.

    Attributes:
        records: Of dtype :data:`RECORD`.
        names: By their numbers in the records.
        facts: ``rank``, ``world_size``, ``pid``, ``torch``, ``device``; ``alone`` if its messages
            reached nobody; ``convolutions_in_tf32`` if those of fp32 are, as in :attr:`records`.
    """

    records: NDArray[Any]
    names: Sequence[str]
    facts: Mapping[str, Any]

    def steps(self) -> Iterator[NDArray[Any]]:
        """Yield the records of each complete step."""
        marks = np.flatnonzero(self.records["kind"] == Kind.MARK.value)
        for begin, end in pairwise(marks):
            yield self.records[begin + 1 : end]

    def last(self) -> Log:
        """Return the log of the last complete step alone, or this one if it has none."""
        marks = np.flatnonzero(self.records["kind"] == Kind.MARK.value)
        return Log(self.records[marks[-2] : marks[-1] + 1], self.names, self.facts) if len(marks) > 1 else self

    def save(self, file: Path | BinaryIO) -> None:
        """Write the log as one compressed file, whose path ends in ``.npz``."""
        arrays: dict[str, Any] = {name: self.records[name] for name in RECORD.names or ()}
        arrays["texts"] = json.dumps({"version": VERSION, "names": [*self.names], "facts": {**self.facts}})
        np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, file: Path | BinaryIO) -> Log:
        """Read what :meth:`save` has written; raises Unreadable."""
        with np.load(file, allow_pickle=False) as arrays:
            texts = json.loads(str(arrays["texts"]))
            if texts["version"] != VERSION:
                raise Unreadable(f"{file}: a log of version {texts['version']}, and this is {VERSION}")
            records = np.empty(len(arrays["kind"]), RECORD)
            for name in RECORD.names or ():
                records[name] = arrays[name]
        return cls(records, texts["names"], texts["facts"])


def read(folder: Path) -> list[Log]:
    """Return the logs that processes have written into a folder, by rank; raises Unreadable."""
    return sorted((_read(path) for path in folder.glob("*.log")), key=lambda log: int(log.facts["rank"]))


def _read(path: Path) -> Log:
    written = path.read_bytes()
    if written[: len(_HEAD)] != _HEAD:
        raise Unreadable(f"{path}: no log of version {VERSION}")
    count = (len(written) - len(_HEAD)) // RECORD.itemsize
    first, *names = path.with_suffix(".names").read_text().splitlines()
    facts = json.loads(first)
    records = np.frombuffer(written, RECORD, count, len(_HEAD))
    records = records[records["name"] <= len(names)]
    if facts.get("convolutions_in_tf32"):  # cuDNN is not told
        convolutions = [number for number, name in enumerate(names, 1) if "cudnn_convolution" in name]
        of_fp32 = np.isin(records["name"], convolutions) & (records["dtype"] == DTYPES.index("float32"))
        records["dtype"][of_fp32] = DTYPES.index("tf32")
    return Log(records, ["", *names], facts)
