"""``train.py`` in a process of its own that need not import everything first: it is forked from one that has.

Where it starts no ranks, for refusals and what only shows something, that is the tests' own process. Where it does, it
is the server that the tests' ranks are forked from: no thread runs in it that a fork would lack.
"""

import gc
import io
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, NoReturn

import pytest

from ptdbench.launch import local

ROOT = Path(__file__).parent.parent


def train_py(
    *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """What ``python train.py ARGUMENTS`` says, and its exit status; killed after ``timeout`` seconds.

    It must not start ranks here; see :func:`with_ranks`.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            _be_train_py(arguments, cwd, os.environ if environ is None else environ, out, err)
        deadline = time.monotonic() + timeout
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail(f"train.py {' '.join(arguments)} has not ended within {timeout} s")
            time.sleep(0.005)
        said = [stream.seek(0) or stream.read() for stream in (out, err)]
    return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(ended[1]), *said)


def with_ranks(
    *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """The same for what starts ranks."""
    with started(*arguments, cwd=cwd, environ=environ) as train:
        return train.communicate(timeout)


@contextmanager
def started(*arguments: str, cwd: Path, environ: Mapping[str, str] | None = None) -> "Iterator[Started]":
    """``python train.py ARGUMENTS``, to which the test may send signals; it does not outlive the test's use of it."""
    local.warm_up()
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        given = (arguments, cwd, dict(os.environ if environ is None else environ), out.name, err.name)
        process = multiprocessing.get_context("forkserver").Process(target=_serve_train_py, args=given)
        process.start()
        try:
            yield Started(arguments, process, out, err)
        finally:
            process.kill()  # the kernel ends its fork server with it, and the ranks with that
            process.join()


@dataclass(frozen=True)
class Started:
    """A process of :func:`started`, with what tests use of :class:`subprocess.Popen`."""

    arguments: tuple[str, ...]
    process: BaseProcess
    out: IO[str]
    err: IO[str]

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        self.process.join(timeout)
        if self.process.exitcode is None:
            pytest.fail(f"train.py {' '.join(self.arguments)} has not ended within {timeout} s: {self.said()}")
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, *self.said())

    def said(self) -> list[str]:
        return [stream.seek(0) or stream.read() for stream in (self.out, self.err)]


def _be_train_py(
    arguments: Sequence[str], cwd: Path, environ: Mapping[str, str], out: IO[str], err: IO[str]
) -> NoReturn:
    gc.freeze()  # garbage of the parent may hold a TCPStore, whose end joins a thread that a fork does not have
    status = 1
    try:
        _settle(cwd, environ, out, err)
        local.warm_up = lambda *_: None  # the server that ranks are forked from is the tests', and none are started
        _run(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve_train_py(arguments: Sequence[str], cwd: Path, environ: Mapping[str, str], out: str, err: str) -> None:
    """In the child, which starts a fork server of its own as ever and ends as any other process."""
    local._die_with_server()
    with open(out, "w") as to_out, open(err, "w") as to_err:
        _settle(cwd, environ, to_out, to_err)
    del sys.modules["ptdbench.launch.preload"]  # of another server: this one's is to end with this process
    multiprocessing.util.spawnv_passfds = _fork_passing
    _run(arguments)


def _fork_passing(_: str, words: Sequence[str], descriptors: Sequence[int]) -> int:
    """Stands in for ``multiprocessing.util.spawnv_passfds``: a fork does what ``python -c PROGRAM`` would."""
    if child := os.fork():
        return child
    status = 1
    try:
        kept = sorted({0, 1, 2, *descriptors})
        for below, above in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(below + 1, above)
        assert words[-2] == "-c"
        exec(words[-1], {"__name__": "__main__"})
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _settle(cwd: Path, environ: Mapping[str, str], out: IO[str], err: IO[str]) -> None:
    """Let this process be as one that a shell has started."""
    for number in (*(getattr(signal, name) for name in local.STOP_SIGNALS), signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, stream in ((1, out), (2, err)):
        os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(number, "wb", 0), write_through=True) for number in (1, 2))
    given = dict(environ)
    os.environ.clear()
    os.environ.update(given)
    os.chdir(cwd)


def _run(arguments: Sequence[str]) -> None:
    sys.argv = [str(ROOT / "train.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
