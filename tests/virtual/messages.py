"""Two ranks that call NCCL without torch, in forks of one process: prints what rank 1 got, as JSON."""

import ctypes
import json
import os
import struct
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

nccl = ctypes.CDLL(None)

#: NCCL's types that Python packs, by their number, and its operations.
FORMATS = {
    "int8": (0, "b"), "uint8": (1, "B"), "int32": (2, "i"), "uint32": (3, "I"), "int64": (4, "q"), "uint64": (5, "Q"),
    "float16": (6, "e"), "float32": (7, "f"), "float64": (8, "d"),
}  # fmt: skip
OPERATIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
MIB = 1 << 20


class Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class Rank:
    """One rank's communicator and a buffer to send from and one to receive into."""

    def __init__(self, rank: int, of: Id) -> None:
        self.rank, self.comm = rank, c_void_p()
        nccl.cudaSetDevice(rank)
        self.send, self.receive = (self.allocate(2 * MIB) for _ in range(2))
        assert nccl.ncclCommInitRank(byref(self.comm), 2, of, rank) == 0

    @staticmethod
    def allocate(size: int) -> int:
        address = c_void_p()
        assert nccl.cudaMalloc(byref(address), c_size_t(size)) == 0
        return int(address.value or 0)

    def put(self, kind: str, numbers: Sequence[float]) -> None:
        data = struct.pack(f"{len(numbers)}{kind}", *numbers)
        ctypes.memset(self.receive, 0xFF, 2 * MIB)
        ctypes.memmove(self.send, data, len(data))

    def got(self, kind: str, count: int) -> list[float]:
        return list(struct.unpack(f"{count}{kind}", ctypes.string_at(self.receive, count * struct.calcsize(kind))))

    def call(self, name: str, *arguments: Any) -> int:
        buffers = c_void_p(self.send), c_void_p(self.receive)
        return int(getattr(nccl, name)(*buffers, *arguments, self.comm, c_void_p(0)))


def reductions(rank: Rank) -> dict[str, list[float]]:
    """Of [1, 2, 5] and [3, 2, 1], by type and operation."""
    results = {}
    for name, (number, kind) in FORMATS.items():
        for operation, code in OPERATIONS.items():
            rank.put(kind, [3, 2, 1] if rank.rank else [1, 2, 5])
            assert rank.call("ncclAllReduce", c_size_t(3), number, code) == 0
            results[f"{name} {operation}"] = rank.got(kind, 3)
    return results


def formats(rank: Rank) -> dict[str, list[float]]:
    """The sums of 1.5 and 0.25 in formats that Python does not pack, as bits: bfloat16 and both of 8 bits."""
    bits = {"bfloat16": (9, "H", (0x3FC0, 0x3E80)), "e4m3": (10, "B", (0x3C, 0x28)), "e5m2": (11, "B", (0x3E, 0x34))}
    results = {}
    for name, (number, kind, numbers) in bits.items():
        rank.put(kind, [numbers[rank.rank]])
        assert rank.call("ncclAllReduce", c_size_t(1), number, 0) == 0
        results[name] = rank.got(kind, 1)
    return results


def collectives(rank: Rank) -> dict[str, list[float]]:
    """What each collective brings rank 1; rank r sends 10 r, 10 r + 1, ..."""
    numbers = [10 * rank.rank + i for i in range(4)]
    results: dict[str, list[float]] = {}

    def call(name: str, count: int, read: int, *arguments: int) -> None:
        rank.put("i", numbers)
        assert rank.call(name, c_size_t(count), *arguments) == 0
        results[name] = rank.got("i", read)

    call("ncclAllGather", 2, 4, 2)
    call("ncclBroadcast", 2, 2, 2, 0)
    call("ncclReduceScatter", 2, 2, 2, 0)
    call("ncclAlltoAll", 2, 4, 2)
    call("ncclReduce", 2, 2, 2, 0, 1)
    return results


def multiplied(rank: Rank) -> list[float]:
    """A sum of numbers that each rank multiplies before, as FSDP asks for."""
    operation, factor = c_int(), ctypes.c_float(0.5)
    assert nccl.ncclRedOpCreatePreMulSum(byref(operation), byref(factor), 7, 1, rank.comm) == 0
    rank.put("f", [2 + 4 * rank.rank])
    assert rank.call("ncclAllReduce", c_size_t(1), 7, operation.value) == 0
    assert nccl.ncclRedOpDestroy(operation.value, rank.comm) == 0
    return rank.got("f", 1)


def transfers(rank: Rank) -> list[float]:
    """Seventy messages each way in one group, more than are kept under way: the last that rank 1 got."""
    nccl.ncclGroupStart()
    rank.put("i", [rank.rank + 5] * 70)
    for i in range(70):
        nccl.ncclSend(c_void_p(rank.send + 4 * i), c_size_t(1), 2, 1 - rank.rank, rank.comm, c_void_p(0))
    for i in range(70):
        nccl.ncclRecv(c_void_p(rank.receive + 4 * i), c_size_t(1), 2, 1 - rank.rank, rank.comm, c_void_p(0))
    assert nccl.ncclGroupEnd() == 0
    return rank.got("i", 70)[-1:]


def large(rank: Rank) -> bool:
    rank.put("i", [7] * 10)
    assert rank.call("ncclAllReduce", c_size_t(MIB // 4), 2, 0) == 0
    return ctypes.string_at(rank.receive, MIB) == bytes(MIB)


def objects(rank: Rank) -> list[list[int]]:
    """Which values a rank gets, by a collective and by a message, of those that programs copied to their GPUs."""
    data, size = bytes([rank.rank + 1]) * MIB, c_size_t(MIB)
    assert nccl.cudaMemcpy(c_void_p(rank.send), data, size, 1) == 0
    assert rank.call("ncclAllGather", size, 1) == 0
    results = [sorted({*ctypes.string_at(rank.receive, 2 * MIB)})]
    nccl.ncclGroupStart()
    nccl.ncclSend(c_void_p(rank.send), size, 1, 1 - rank.rank, rank.comm, c_void_p(0))
    nccl.ncclRecv(c_void_p(rank.receive), size, 1, 1 - rank.rank, rank.comm, c_void_p(0))
    assert nccl.ncclGroupEnd() == 0
    return [*results, sorted({*ctypes.string_at(rank.receive, MIB)})]


def split(rank: Rank) -> list[float]:
    """A sum over a communicator made of this one, its ranks in reverse."""
    part, place = c_void_p(), c_int()
    assert nccl.ncclCommSplit(rank.comm, 0, 1 - rank.rank, byref(part), None) == 0
    nccl.ncclCommUserRank(part, byref(place))
    rank.put("i", [rank.rank + 1])
    assert nccl.ncclAllReduce(c_void_p(rank.send), c_void_p(rank.receive), c_size_t(1), 2, 0, part, c_void_p(0)) == 0
    nccl.ncclCommDestroy(part)
    return [place.value, *rank.got("i", 1)]


def mismatch(rank: Rank) -> int:
    return rank.call("ncclAllReduce" if rank.rank else "ncclReduceScatter", c_size_t(3), 2, 0)


def main() -> None:
    """Rank 0 makes the id and passes it through a pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    of = Id()
    if child:
        assert nccl.ncclGetUniqueId(byref(of)) == 0
        os.write(writing, bytes(of))
    else:
        of = Id.from_buffer_copy(os.read(reading, 128))
    rank = Rank(0 if child else 1, of)
    questions = (reductions, formats, collectives, multiplied, transfers, large, objects, split, mismatch)
    answers = {question.__name__: question(rank) for question in questions}
    nccl.ncclCommDestroy(rank.comm)
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    else:
        print(json.dumps(answers))


if __name__ == "__main__":
    main()
