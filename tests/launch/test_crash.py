"""What native code leaves that ends a process, in processes of their own: no rank, and not torch either."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ptdbench.launch import crash
from tests.conftest import ROOT
from tests.programs import call

HEAD = """\
import ctypes, faulthandler, os, signal, sys
from pathlib import Path
from ptdbench.launch import crash

hit = lambda: ctypes.string_at(0)

"""


def file(directory: Path) -> Path:
    return directory / "failures" / "start" / "crash.txt"


def ended(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    """A process that has the path of a file in ``sys.argv[1]``."""
    return call(sys.executable, "-c", HEAD + code, file(directory), cwd=ROOT, environ=os.environ, timeout=60)


@pytest.mark.parametrize(("how", "name"), [
    ("hit()", "SIGSEGV"), ("os.abort()", "SIGABRT"),
    *((f"signal.raise_signal(signal.{name})", name) for name in ("SIGBUS", "SIGFPE", "SIGILL")),
])  # fmt: skip
def test_crash_leaves_its_stacks(tmp_path, how, name):
    done = ended(tmp_path, f"def work():\n    {how}\n\nwith crash.kept(Path(sys.argv[1])):\n    work()")
    assert done.returncode == -getattr(signal, name)
    assert "Fatal" not in done.stderr
    found = crash.read(file(tmp_path).read_text())
    assert found.signal == name
    assert ("<string>", 8, "work") in found.calls
    assert found.calls[-1][2] == "<module>"


def test_without_a_crash_nothing_is_left_and_later_stacks_go_to_stderr(tmp_path):
    done = ended(tmp_path, "with crash.kept(Path(sys.argv[1])):\n    pass\nhit()")
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_exception_and_a_missing_file_are_no_crash(tmp_path):
    other = file(tmp_path).with_name("rank-1.json")
    other.parent.mkdir(parents=True)
    other.touch()
    done = ended(tmp_path, "with crash.kept(Path(sys.argv[1])):\n    raise ValueError('bad input')")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: bad input\n")
    assert list(other.parent.iterdir()) == [other]
    assert crash.read("") is crash.read("some words\n") is None
    half = "Fatal Python error: Segmentation fault\n\nCur"
    assert crash.read(half) == crash.Crash("SIGSEGV", f"{half}\n", [])


def test_crash_of_a_forked_worker_is_not_the_ranks(tmp_path):
    code = (
        "with crash.kept(Path(sys.argv[1])):\n"
        "    child = os.fork() or hit()\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = ended(tmp_path, code)
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGSEGV}\n")
    assert "Fatal Python error" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_work_goes_on_without_a_crash_file(tmp_path):
    (tmp_path / "failures").touch()
    done = ended(tmp_path, "with crash.kept(Path(sys.argv[1])):\n    print('done')")
    assert (done.returncode, done.stdout) == (0, "done\n")


OF_THREADS = """\
Fatal Python error: Aborted

Thread 0x00007fbf6bf546c0 (most recent call first):
  File "/lib/threading.py", line 331 in wait

{hit} 0x00007fc03c5d0b80 (most recent call first):
  File "/home/ada/my models.py", line 13 in forward
  File "/ptdbench/run.py", line 205 in _work
{more}
Extension modules: torch._C (total: 1)
"""


def test_crashed_thread_is_told_from_the_others():
    calls = [("/home/ada/my models.py", 13, "forward"), ("/ptdbench/run.py", 205, "_work")]
    found = crash.read(OF_THREADS.format(hit="Current thread", more=""))
    assert (found.signal, found.calls) == ("SIGABRT", calls)
    assert "threading.py" not in found.stack
    assert "Extension modules" not in found.stack
    # A thread of native code leaves where the main thread was, and all stacks.
    found = crash.read(OF_THREADS.format(hit="Thread", more=""))
    assert found.calls == calls
    assert "threading.py" in found.stack
    # The stack of native code that newer versions of Python add holds no calls.
    native = '\nCurrent thread\'s C stack trace (most recent call first):\n  Binary file "/lib/libc.so", at +0x3c\n'
    found = crash.read(OF_THREADS.format(hit="Current thread", more=native))
    assert found.calls == calls
    assert "libc.so" in found.stack
