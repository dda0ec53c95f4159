"""Starts any program on virtual GPUs, with all of its processes, and reads what they report of themselves."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ptdbench.problems import ConfigError, Problem
from ptdbench.virtual import watch

#: The folder whose ``sitecustomize`` has processes watched, and that of an ``nvidia-smi``.
_PRELOAD, _BIN = Path(__file__).parent / "preload", Path(__file__).parent / "bin"

#: Seconds between looks at the reports; for which processes that have not yet taken all steps are waited for; and
#: between SIGTERM and SIGKILL.
_POLL, _LAGGING, _GRACE = 0.1, 30.0, 5.0


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    status: int  #: Its exit status, 128 + n for signal n.
    reports: Sequence[Mapping[str, Any]]  #: Of the processes that used a GPU, by rank; see :mod:`watch`.
    was_stopped: bool = False  #: Whether it was ended after the requested number of steps.


def environment(folder: Path, steps: int | None, stacks: bool) -> dict[str, str]:
    """Return the variables by which the processes of a program are watched, and report to the folder."""
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_PRELOAD), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join(filter(None, [str(_BIN), os.environ.get("PATH")])),
        watch.FOLDER: str(folder),
    }
    return variables | ({watch.STEPS: str(steps)} if steps else {}) | ({watch.STACKS: "1"} if stacks else {})


def of_ranks(ranks: Sequence[int], count: int, nodes: int, folder: Path) -> list[dict[str, str]]:
    """Return torchrun's variables for each of these ranks of ``nodes`` with ``count`` GPUs each."""
    from ptdbench.virtual import absent  # imports torch

    with socket.socket() as free:
        free.bind(("localhost", 0))
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"WORLD_SIZE": str(nodes * count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "virtual"}
    if len(ranks) < nodes * count:
        shared |= {absent.PRESENT: ",".join(map(str, ranks)), absent.STORE: str(folder.resolve() / "store")}
    return [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % count), "GROUP_RANK": str(rank // count)}
        for rank in ranks
    ]


def execute(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: Path, steps: int | None, stdout: int | None
) -> Ended:
    """Run commands beside each other until all have ended, or one has failed.

    Args:
        commands: Each with its environment.
        folder: The folder of the reports.
        steps: After how many steps of all processes that take any to end the program; ``None``: it ends by itself.
        stdout: The file descriptor of the commands' standard output; ``None``: that of this process.

    Raises:
        ConfigError: A command cannot be started.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with _signals_for(processes):
        try:
            for words, environ in commands:
                try:
                    processes.append(subprocess.Popen(words, env=environ, stdout=stdout))
                except OSError as error:
                    raise ConfigError([Problem("COMMAND", words[0], f"cannot be started: {error.strerror}")]) from None
            was_stopped = _await_end(processes, folder, steps)
        finally:
            _end_all(processes)
    statuses = [process.returncode for process in processes]
    first = next((status for status in statuses if status), 0)
    status = 0 if was_stopped else first if first >= 0 else 128 - first
    return Ended(status, reports(folder), was_stopped)


def reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports in a folder, by rank, then by process."""
    written = (json.loads(path.read_text()) for path in folder.glob("*.json"))
    return sorted(written, key=lambda report: (report["rank"], report["pid"]))


def _await_end(processes: Sequence[subprocess.Popen[bytes]], folder: Path, steps: int | None) -> bool:
    """Wait until all processes have ended, one has failed, or all that take steps have taken enough: then ``True``."""
    enough_since: float | None = None
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            return False
        if steps:
            taken = [report["steps"] for report in reports(folder)]
            if max(taken, default=0) >= steps:
                enough_since = enough_since or time.monotonic()
                if min(taken) >= steps or time.monotonic() > enough_since + _LAGGING:
                    return True
        time.sleep(_POLL)
    return False


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes that are still running, and all that they started: first with SIGTERM, at last with SIGKILL."""
    running = [process for process in processes if process.poll() is None]
    inside: list[psutil.Process] = []
    for process in running:
        with suppress(psutil.NoSuchProcess):
            inside += psutil.Process(process.pid).children(recursive=True)
        process.terminate()
    _, left = psutil.wait_procs([psutil.Process(process.pid) for process in running], timeout=_GRACE)
    for remaining in [*left, *inside]:
        with suppress(psutil.NoSuchProcess):
            remaining.kill()
    for process in running:
        process.wait()


@contextmanager
def _signals_for(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass SIGTERM on to the processes, and SIGINT unless the terminal sends it to them too; a second one ends them."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        if number == signal.SIGTERM or not sys.stdin.isatty():
            for process in processes:
                process.send_signal(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
