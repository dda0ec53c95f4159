import json
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ptdbench
from ptdbench.records.cause import root_cause, status_of
from ptdbench.records.failure import (
    Failure,
    clear,
    crash_file,
    describe,
    describe_exit,
    read_failures,
    reporters,
    write_failure,
)

# As torch 2.15 words them when the peer of a gloo collective, of the store, or of an NCCL one is gone.
GLOO_CLOSED = (
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


def report(rank: int, at: float, kind: str = "RuntimeError", message: str = GLOO_CLOSED) -> Failure:
    return Failure(rank, kind, message, f"Traceback of rank {rank}", at, "host")


def exited(rank: int, at: float, exit_code: int) -> Failure:
    failure = describe_exit(rank, exit_code)
    return Failure(rank, failure.type, failure.message, "", at, "host", exit_code)


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_of_a_message_of_megabytes_the_ends_are_kept():
    found = describe(raised(ValueError(f"begins {'x' * 10**7} ends")), rank=0)
    assert found.message.startswith("begins xxx")
    assert found.message.endswith("xxx ends")
    assert " ... (9,980,012 characters left out) ... " in found.message
    assert len(found.message) < 21_000
    assert len(found.traceback) < 201_000
    assert found.traceback.startswith("Traceback (most recent call last)")


CONSEQUENCES = [
    ("RuntimeError", GLOO_CLOSED),
    ("RuntimeError", GLOO_RESET),
    ("RuntimeError", GLOO_TIMEOUT),
    ("RuntimeError", "Socket closed"),
    ("RuntimeError", "writev [127.0.0.1]:3: Broken pipe"),
    ("DistNetworkError", STORE_CLOSED),
    ("DistStoreError", STORE_TIMEOUT),
    ("DistBackendError", NCCL_REMOTE),
    ("Stopped", "stopped by SIGTERM"),
]


@pytest.mark.parametrize(("kind", "message"), CONSEQUENCES)
def test_an_exception_wins_over_what_its_peers_saw_earlier(kind, message):
    cause = report(2, 5.0, "ValueError", "bad input")
    assert root_cause([report(0, 1.0, kind, message), report(1, 2.0, kind, message), cause], 3) is cause


@pytest.mark.parametrize(("kind", "message"), CONSEQUENCES)
def test_a_killed_rank_wins_over_what_its_peers_saw_earlier(kind, message):
    cause = exited(1, 5.0, -signal.SIGKILL)
    assert root_cause([report(0, 1.0, kind, message), cause], 2) is cause


def test_the_launchers_own_sigterm_is_no_cause():
    cause = report(1, 2.0, "ValueError", "bad input")
    assert root_cause([exited(0, 1.0, -signal.SIGTERM), cause], 2) is cause
    lost = report(1, 1.0)
    assert root_cause([exited(0, 2.0, -signal.SIGTERM), lost], 2) is lost


def test_the_earliest_exception_wins():
    first, second = report(1, 1.0, "ValueError", "first"), report(0, 2.0, "ValueError", "second")
    assert root_cause([second, first], 2) is first
    assert root_cause([first, second], 2) is first


def test_an_exception_wins_over_the_abort_it_causes():
    cause = report(0, 1.0, "ValueError", "first")
    assert root_cause([exited(1, 2.0, -signal.SIGABRT), cause], 2) is cause


def test_a_ranks_own_report_wins_over_its_exit_status():
    lost, cause = report(0, 1.0), report(1, 2.0, "ValueError", "bad input")
    assert root_cause([lost, cause, exited(0, 3.0, 1), exited(1, 3.0, 1)], 2) is cause


def test_an_exit_without_a_report_is_a_cause():
    cause = exited(1, 5.0, 3)
    assert root_cause([report(0, 1.0), cause], 2) is cause
    assert "exit status 3" in cause.message


def test_the_silent_rank_is_named_when_its_peers_only_lost_it():
    found = root_cause([report(0, 2.0), report(2, 1.0, message=GLOO_RESET)], 4)
    assert found.rank == 1
    assert found.message.startswith("ranks 1, 3 left no report; rank 2 then saw: ")
    assert GLOO_RESET in found.message
    assert found.traceback == "Traceback of rank 2"
    assert status_of(found) == "failed"


def test_a_rank_that_hangs_is_named_and_the_run_timed_out():
    found = root_cause([report(0, 2.0, message=GLOO_TIMEOUT)], 2)
    assert found.rank == 1
    assert found.message.startswith("rank 1 left no report; rank 0 then saw: ")
    assert status_of(found) == "timeout"


def test_when_all_lost_their_peers_the_earliest_is_named():
    first = report(1, 1.0)
    assert root_cause([report(0, 2.0), first], 2) is first


def test_ranks_that_were_all_stopped_blame_nobody():
    first = report(1, 1.0, "Stopped", "stopped by SIGUSR2")
    found = root_cause([first, report(0, 2.0, "Stopped", "stopped by SIGUSR2")], 4)
    assert found is first
    assert status_of(found) == "preempted"


def test_nccl_out_of_memory_is_no_lost_peer():
    cause = report(1, 2.0, "DistBackendError", "ncclUnhandledCudaError: Cuda failure 2 'out of memory'")
    assert root_cause([report(0, 1.0), cause], 2) is cause
    assert status_of(cause) == "oom"


class Stopped(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "status"),
    [
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
        (RuntimeError(GLOO_CLOSED), "failed"),
        (dist.DistBackendError(NCCL_REMOTE), "failed"),
        (ValueError("bad input"), "failed"),
    ],
)
def test_status_of_an_exception(error, status):
    assert status_of(describe(error, rank=0)) == status


def test_status_of_a_real_lack_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert status_of(describe(caught.value, rank=0)) == "oom"


@pytest.mark.parametrize(
    ("exit_code", "status", "words"),
    [
        (-signal.SIGKILL, "failed", "killed by SIGKILL (the kernel's out-of-memory killer sends this too)"),
        (-signal.SIGSEGV, "failed", "killed by SIGSEGV"),
        (-signal.SIGFPE, "failed", "killed by SIGFPE"),
        (-signal.SIGTERM, "preempted", "stopped by SIGTERM"),
        (-signal.SIGUSR2, "preempted", "stopped by SIGUSR2"),
        (-signal.SIGINT, "preempted", "stopped by SIGINT"),
        (-999, "failed", "killed by signal 999"),
        (1, "failed", "ended with exit status 1"),
    ],
)
def test_status_of_an_exit(exit_code, status, words):
    failure = describe_exit(3, exit_code)
    assert (failure.rank, failure.exit_code) == (3, exit_code)
    assert status_of(failure) == status
    assert words in failure.message


def test_describe():
    before = time.time()
    failure = describe(raised(ValueError("bad input")), rank=3)
    assert (failure.rank, failure.type, failure.message) == (3, "ValueError", "bad input")
    assert "in raised" in failure.traceback
    assert failure.host == socket.gethostname()
    assert before <= failure.time <= time.time()
    assert failure.exit_code is None
    assert set(failure.as_error()) == {"rank", "type", "message", "traceback", "where"}


def test_a_wrapped_reason_is_named_as_pipeline_stages_wrap_it():
    error = RuntimeError("[Stage 0] failed to run forward")
    error.__cause__ = raised(torch.OutOfMemoryError("CUDA out of memory."))
    failure = describe(raised(error), rank=0)
    assert (failure.type, failure.message) == ("OutOfMemoryError", "CUDA out of memory.")
    assert "failed to run forward" in failure.traceback


def test_an_error_that_explains_its_cause_is_named_itself():
    error = ValueError("no such text: corpus.txt")
    error.__cause__ = FileNotFoundError("corpus.txt")
    assert describe(error, rank=0).type == "ValueError"


def test_reports_come_back_in_the_order_of_time(tmp_path):
    late, early = report(0, 2.0), exited(11, 1.0, -9)
    write_failure(tmp_path, late)
    write_failure(tmp_path, early)
    assert read_failures(tmp_path) == [early, late]
    files = sorted(tmp_path.iterdir())
    assert [json.loads(path.read_text())["rank"] for path in files] == [0, 11]


def test_the_first_report_of_a_rank_stands(tmp_path):
    first = report(0, 1.0, "ValueError", "bad input")
    write_failure(tmp_path, first)
    write_failure(tmp_path, report(0, 2.0))
    assert read_failures(tmp_path) == [first]


CRASHED = """\
Fatal Python error: Segmentation fault

Current thread 0x00007fc03c5d0b80 (most recent call first):
  File "/somewhere/mymodels.py", line 13 in forward
  File "{package}/run.py", line 205 in _work
  File "/somewhere/train.py", line 4 in <module>

Extension modules: torch._C (total: 1)
"""


def crashed(folder: Path, rank: int) -> None:
    crash_file(folder, rank).write_text(CRASHED.format(package=Path(ptdbench.__file__).parent))


def test_a_rank_that_native_code_ended_has_left_its_stack_instead_of_a_report(tmp_path):
    crashed(tmp_path, 11)
    crash_file(tmp_path, 2).touch()  # goes on
    write_failure(tmp_path, report(0, 1.0))
    assert reporters(tmp_path) == {0, 11}
    lost, found = read_failures(tmp_path)
    assert (lost.rank, found.rank, found.type) == (0, 11, "SIGSEGV")
    assert found.message == "killed by SIGSEGV (an invalid memory access in native code)"
    assert found.where == "mymodels.py:13 in forward"
    assert "line 13 in forward" in found.traceback
    assert found.time == pytest.approx(time.time(), abs=60)
    assert root_cause([lost, found, exited(11, time.time() + 1, -signal.SIGSEGV)], 12) is found
    assert status_of(found) == "failed"


def test_a_rank_that_has_said_why_it_failed_may_crash_on_its_way_out(tmp_path):
    write_failure(tmp_path, report(0, 1.0, "ValueError", "bad input"))
    crashed(tmp_path, 0)
    assert [failure.type for failure in read_failures(tmp_path)] == ["ValueError"]


def test_what_killed_ranks_leave_is_cleared(tmp_path):
    folder = tmp_path / "failures" / "start"
    folder.mkdir(parents=True)
    crash_file(folder, 0).touch()
    crashed(folder, 1)
    clear(folder)
    assert list(folder.iterdir()) == [crash_file(folder, 1)]
    crash_file(folder, 1).write_text("")
    clear(folder)
    assert list(tmp_path.iterdir()) == []
    clear(folder)  # nothing is there


def test_no_reports(tmp_path):
    assert read_failures(tmp_path) == []


def test_an_exception_that_cannot_say_what_it_is_is_still_reported():
    class MuteError(Exception):
        def __str__(self):
            raise AttributeError("no words")

    told = describe(MuteError(), rank=1)
    assert (told.type, told.rank) == ("MuteError", 1)
    assert told.message == "(no message: the exception's own __str__ raised AttributeError)"
    assert "MuteError" in told.traceback
