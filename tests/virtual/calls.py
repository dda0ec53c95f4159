"""The library called by itself, without torch, which takes a second less to start: prints answers as JSON."""

import ctypes
import json
import os
from ctypes import byref, c_float, c_size_t, c_uint, c_void_p
from typing import Any

cuda = ctypes.CDLL(None)
MIB, GIB = 1 << 20, 1 << 30


def pointer(size: int) -> tuple[int, int]:
    address = c_void_p()
    return cuda.cudaMalloc(byref(address), c_size_t(size)), address.value or 0


def free_bytes() -> int:
    free, total = c_size_t(), c_size_t()
    assert cuda.cudaMemGetInfo(byref(free), byref(total)) == 0
    return free.value


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory() -> dict[str, Any]:
    """Pages, the end of memory, and what is read where something else was."""
    start = free_bytes()
    _, small = pointer(1)
    after_one_byte = free_bytes()
    ctypes.memset(small, 7, 1)
    cuda.cudaFree(c_void_p(small))
    _, again = pointer(2 * MIB)
    read_again = ctypes.string_at(again, 1)[0]
    cuda.cudaFree(c_void_p(again))
    full, all_of_it = pointer(start)
    over, _ = pointer(1)
    cuda.cudaFree(c_void_p(all_of_it))
    return {
        "start": start, "page": start - after_one_byte, "same_place": small == again, "read_again": read_again,
        "all_of_it": full, "over": over, "end": free_bytes(), "free_twice": cuda.cudaFree(c_void_p(all_of_it)),
    }  # fmt: skip


def copies() -> dict[str, Any]:
    """Small copies are made, large ones arrive as zeros, and the host is not filled."""
    host = (ctypes.c_ubyte * (2 * MIB))(*([5] * 100))
    _, device = pointer(12 * GIB)
    before = resident()
    cuda.cudaMemcpy(c_void_p(device), host, c_size_t(100), 1)
    small = ctypes.string_at(device, 100) == bytes([5] * 100)
    cuda.cudaMemcpy(c_void_p(device), host, c_size_t(2 * MIB), 1)
    large = ctypes.string_at(device, 100)
    for at in range(0, 12 * GIB, 4 * MIB):  # 3,072 copies of 1 MiB
        cuda.cudaMemcpy(c_void_p(device + at), host, c_size_t(MIB), 1)
    cuda.cudaMemset(c_void_p(device), 1, c_size_t(12 * GIB))
    grown = resident() - before
    cuda.cudaFree(c_void_p(device))
    outside = cuda.cudaMemset(c_void_p(device + 100 * GIB * 1024), 0, c_size_t(10))
    return {"small": small, "large": large == bytes(100), "grown": grown, "outside": outside}


def clocks() -> dict[str, Any]:
    """Milliseconds between two events around two pieces of work, and whether these are done at once."""
    stream, begin, end, milliseconds = c_void_p(), c_void_p(), c_void_p(), c_float()
    _, device = pointer(GIB)
    cuda.cudaStreamCreateWithFlags(byref(stream), 1)
    for event in (begin, end):
        cuda.cudaEventCreate(byref(event))
    never = cuda.cudaEventElapsedTime(byref(milliseconds), begin, end)
    cuda.cudaEventRecord(begin, stream)
    for _ in range(2):
        cuda.cudaMemsetAsync(c_void_p(device), 0, c_size_t(GIB), stream)
    cuda.cudaEventRecord(end, stream)
    queries = [cuda.cudaEventQuery(end), cuda.cudaStreamQuery(stream)]
    cuda.cudaEventElapsedTime(byref(milliseconds), begin, end)
    cuda.cudaFree(c_void_p(device))
    return {"milliseconds": milliseconds.value, "never": never, "queries": queries}


def contexts() -> list[list[int]]:
    """On which devices this process has a context: before it uses one, then two."""

    def states() -> list[int]:
        active = [c_uint(), c_uint()]
        for number, state in enumerate(active):
            cuda.cuDevicePrimaryCtxGetState(number, byref(c_uint()), byref(state))
        return [state.value for state in active]

    cuda.cudaGetDeviceCount(byref(c_uint()))
    at_first = states()
    cuda.cudaFree(c_void_p(pointer(1)[1]))
    used = states()
    cuda.cudaSetDevice(1)
    chosen = states()
    cuda.cudaSetDevice(0)
    return [at_first, used, chosen]


def fork() -> int:
    child = os.fork()
    if child == 0:
        os._exit(cuda.cuInit(0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def names() -> dict[str, Any]:
    management, handle, name = ctypes.CDLL("libnvidia-ml.so.1"), c_void_p(), ctypes.create_string_buffer(96)
    count = c_uint()
    statuses = [
        management.nvmlInit_v2(),
        management.nvmlDeviceGetCount_v2(byref(count)),
        management.nvmlDeviceGetHandleByIndex_v2(1, byref(handle)),
        management.nvmlDeviceGetName(handle, name, 96),
        management.nvmlDeviceGetHandleByIndex_v2(2, byref(c_void_p())),
    ]
    return {"statuses": statuses, "count": count.value, "name": name.value.decode()}


def addresses() -> dict[str, int]:
    """How often an expandable segment of the device finds addresses, and what is said when there are none left."""
    count, status, size, nothing = 0, 0, c_size_t(20 * GIB // 8 * 9), c_size_t(0)
    while status == 0:
        status = cuda.cuMemAddressReserve(byref(c_void_p()), size, nothing, None, nothing)
        count += status == 0
    return {"count": count, "status": status}


if __name__ == "__main__":
    questions = (contexts, memory, copies, clocks, names, fork, addresses)
    answers = {question.__name__: question() for question in questions}
    unanswered = cuda.cudaGraphNodeGetDependencies
    answers["unanswered"] = [unanswered(None), unanswered(None), cuda.cublasDtrsm_v2(0)]
    print(json.dumps(answers))
