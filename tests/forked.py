"""``train.py`` in a process of its own that need not import everything first: it is forked from the tests'.

For command lines that start no ranks here: refusals, what only shows something, and what SLURM is given.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest

from ptdbench.launch import local

ROOT = Path(__file__).parent.parent


def train_py(
    *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """What ``python train.py ARGUMENTS`` says, and its exit status; killed after ``timeout`` seconds."""
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


def _be_train_py(arguments: tuple[str, ...], cwd: Path, environ: Mapping[str, str], out: IO[str], err: IO[str]) -> None:
    """In the child: never returns."""
    status = 1
    try:
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
        local.warm_up = lambda *_: None  # the server that ranks are forked from is the tests', and none are started
        sys.argv = [str(ROOT / "train.py"), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
