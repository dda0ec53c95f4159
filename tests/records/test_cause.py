"""Who is to blame for a failed run, from reports alone, and the status that follows."""

import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ptdbench.records.failure import Failure, describe, describe_exits, is_of_gpu, root_cause, status_of
from ptdbench.records.schema import Error

# As torch 2.15 words them when the peer of a gloo collective, of the store, or of an NCCL one is gone.
CLOSED = (
    "[third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:53953. "
    "This is typically caused by a remote worker crashing."
)
GLOO_RESET = "[gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:59569: Connection reset by peer."
GLOO_TIMEOUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
STORE_CLOSED = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
STORE_TIMEOUT = "wait timeout after 3000ms, keys: /default_pg/0//nokey"
NCCL_REMOTE = (
    "NCCL error in: NCCLUtils.cpp:275, remote process exited or there was a network error, NCCL version 2\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)
NCCL_MEMORY = "ncclUnhandledCudaError: Cuda failure 2 'out of memory'"


def report(rank: int, at: float, kind: str = "RuntimeError", message: str = CLOSED) -> Failure:
    return Failure(rank, kind, message, f"Traceback of rank {rank}", at, "host")


def stopped(rank: int, at: float, *unheard: int) -> Failure:
    return replace(report(rank, at, "Stopped", "stopped by SIGTERM"), unheard=list(unheard))


def raised(rank: int, at: float) -> Failure:
    return report(rank, at, "ValueError", "bad input")


def exited(rank: int, at: float, exit_code: int) -> Failure:
    return replace(describe_exits({rank: exit_code}, 0)[0], time=at)


CONSEQUENCES = [
    ("RuntimeError", CLOSED), ("RuntimeError", GLOO_RESET), ("RuntimeError", GLOO_TIMEOUT),
    ("RuntimeError", "Socket closed"), ("RuntimeError", "writev [127.0.0.1]:3: Broken pipe"),
    ("DistNetworkError", STORE_CLOSED), ("DistStoreError", STORE_TIMEOUT), ("DistBackendError", NCCL_REMOTE),
    ("Stopped", "stopped by SIGTERM"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message"), CONSEQUENCES)
@pytest.mark.parametrize("cause", [raised(2, 5.0), exited(2, 5.0, -signal.SIGKILL)], ids=["exception", "kill"])
def test_a_cause_wins_over_what_its_peers_saw_earlier(cause, kind, message):
    assert root_cause([report(0, 1.0, kind, message), report(1, 2.0, kind, message), cause], 3) is cause


ALONE = "rank {} was stopped by SIGTERM, which its peers did not receive"


@pytest.mark.parametrize(("reports", "size", "rank", "status", "begins"), [
    # Exceptions, exits and lost peers.
    ([raised(1, 1.0), raised(0, 2.0)], 2, 1, "failed", "bad input"),
    ([report(0, 1.0), raised(1, 2.0), exited(0, 3.0, 1), exited(1, 3.0, 1)], 2, 1, "failed", "bad input"),
    ([exited(1, 1.0, 1), raised(1, 2.0)], 2, 1, "failed", "bad input"),  # by the clock of another machine
    ([report(0, 1.0), report(1, 2.0, "DistBackendError", NCCL_MEMORY)], 2, 1, "oom", NCCL_MEMORY),
    ([report(0, 2.0), report(1, 1.0)], 2, 1, "failed", CLOSED),
    ([report(0, 2.0), report(2, 1.0)], 4, 1, "failed", f"ranks 1, 3 left no report; rank 2 then saw: {CLOSED}"),
    ([report(0, 2.0, message=GLOO_TIMEOUT)], 2, 1, "timeout", "rank 1 left no report; rank 0 then saw: "),
    # The launcher's own SIGTERM.
    ([exited(0, 1.0, -signal.SIGTERM), raised(1, 2.0)], 2, 1, "failed", "bad input"),
    ([exited(0, 2.0, -signal.SIGTERM), report(1, 1.0)], 2, 1, "failed", CLOSED),
    # All were stopped, in whatever order, and whatever some of them lost then.
    ([stopped(0, 1.0), stopped(1, 2.0)], 2, 0, "preempted", "stopped by"),
    ([stopped(0, 1.0), report(1, 2.0)], 3, 0, "preempted", "stopped by"),
    # Stopped before they all had met: nobody can know.
    ([stopped(0, 1.0)], 2, 0, "preempted", "stopped by"),
    # One was stopped, and its peers worked on until it left; whether the launcher stopped them or they lost it.
    ([stopped(1, 1.0, 0), report(0, 3.5)], 2, 1, "failed", ALONE.format(1)),
    ([stopped(3, 1.0, 0, 1, 2), stopped(0, 3.5), report(1, 3.4), stopped(2, 3.6)], 4, 3, "failed", ALONE.format(3)),
    # By the clocks of other machines they did so before.
    ([stopped(1, 9.0, 0), stopped(0, 3.5)], 2, 1, "failed", ALONE.format(1)),
    # One died, and the launcher stopped its peers because of it; or they lost it; or both.
    ([stopped(0, 1.0, 1)], 2, 1, "failed", "rank 1 left no report; rank 0 then saw: stopped by SIGTERM"),
    ([stopped(0, 1.0, 3), report(1, 1.1), stopped(2, 0.9, 3)], 4, 3, "failed", "rank 3 left no report; rank 2"),
    ([report(1, 0.5), stopped(0, 1.0, 3), stopped(2, 0.9, 3)], 4, 3, "failed", "rank 3 left no report; rank 1"),
    # An error of one's own is the cause, however late it is told.
    ([stopped(0, 1.0, 1), raised(1, 5.0)], 2, 1, "failed", "bad input"),
])  # fmt: skip
def test_where_each_rank_reports_what_it_knows(reports, size, rank, status, begins):
    for ordered in (reports, reports[::-1]):
        cause = root_cause(ordered, size)
        assert (cause.rank, status_of(cause)) == (rank, status)
        assert cause.message.startswith(begins)
        assert cause.traceback or cause.exit_code is not None  # of a silent rank that of its witness


@pytest.mark.parametrize(("exit_codes", "reports", "rank", "status", "message"), [
    ({1: -signal.SIGTERM}, [], 1, "failed", ALONE.format(1)),
    ({0: -signal.SIGTERM, 1: -signal.SIGTERM}, [], 0, "preempted", "stopped by SIGTERM"),
    ({0: -signal.SIGTERM, 1: -signal.SIGINT}, [], 0, "failed", ALONE.format(0)),
    ({0: -signal.SIGTERM, 1: 1}, [report(1, 1.0)], 0, "failed", ALONE.format(0)),
    ({0: -signal.SIGTERM, 1: 1}, [raised(1, 1.0)], 1, "failed", "bad input"),
    ({0: 0, 1: 1}, [report(1, 1.0)], 0, "failed", f"rank 0 left no report; rank 1 then saw: {CLOSED}"),
    ({0: 0, 1: 7}, [], 1, "failed", "ended with exit status 7 and without a report"),
])  # fmt: skip
def test_where_the_parent_saw_how_ranks_ended(exit_codes, reports, rank, status, message):
    later = [replace(failure, time=time.time()) for failure in describe_exits(exit_codes, 2)]
    cause = root_cause([*reports, *later], 2)
    assert (cause.rank, status_of(cause), cause.message) == (rank, status, message)


class Stopped(Exception):
    pass


@pytest.mark.parametrize(("error", "status"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "oom"),
    (MemoryError(), "oom"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "oom"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), "oom"),
    (FloatingPointError("loss is nan at step 3"), "diverged"),
    (TimeoutError("no step for 600 s"), "timeout"),
    (RuntimeError(GLOO_TIMEOUT), "timeout"),
    (dist.DistStoreError(STORE_TIMEOUT), "timeout"),
    (Stopped("stopped by SIGTERM"), "preempted"),
    (KeyboardInterrupt(), "preempted"),
    (ValueError("bad input"), "failed"),
])  # fmt: skip
def test_status_of_an_exception(error, status):
    assert status_of(describe(error, rank=0)) == status


def test_a_real_lack_of_memory_and_that_of_the_kernel_are_told():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert status_of(describe(caught.value, rank=0)) == "oom"
    (found,) = describe_exits({0: -signal.SIGKILL}, 1, oom_kills=1)
    assert status_of(found) == "oom"
    assert not is_of_gpu(Error(**found.as_error()))


@pytest.mark.parametrize(("error", "expected"), [
    (torch.OutOfMemoryError("Tried to allocate 2.00 GiB."), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
    (dist.DistBackendError("NCCL error: unhandled cuda error, out of memory"), True),
    (MemoryError(), False),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2"), False),
])  # fmt: skip
def test_whose_memory_has_run_out(error, expected):
    found = describe(error, rank=0)
    assert status_of(found) == "oom"
    assert is_of_gpu(Error(**found.as_error())) == expected


@pytest.mark.parametrize(("exit_code", "status", "words"), [
    (-signal.SIGKILL, "failed", "killed by SIGKILL (the kernel's out-of-memory killer sends this too)"),
    (-signal.SIGFPE, "failed", "killed by SIGFPE"),
    *((-one, "preempted", f"stopped by {one.name}") for one in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)),
    (-999, "failed", "killed by signal 999"),
    (1, "failed", "ended with exit status 1"),
])  # fmt: skip
def test_status_of_an_exit(exit_code, status, words):
    (failure,) = describe_exits({3: exit_code}, 0)
    assert (failure.rank, failure.exit_code, status_of(failure)) == (3, exit_code, status)
    assert words in failure.message
