"""Attacked commands: their processes, the births of their ranks, and processes that are left."""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: The variable that marks the processes of a command: /proc shows those that a program began with, also of forks.
MARK = "PTDBENCH_ATTACK"

#: Set when the attack is to end: from then on no command is started.
STOPPED = threading.Event()

#: Seconds between two looks: while nothing, a file, or a birth is expected.
IDLE, KEEN, EAGER = 0.01, 0.002, 0.0005

#: The priority of this process at its start, and of its victims.
_NICE = os.getpriority(os.PRIO_PROCESS, 0)

#: Seconds until a victim is killed in any case.
LIMIT = 300.0


class Interrupted(Exception):
    """The attack is to end."""


@dataclass(frozen=True)
class Process:
    """A process of a victim."""

    pid: int
    role: str  #: ``train.py``, ``fork server``, ``rank``, ...
    command: str = ""  #: The command line, if a report needs it.

    def __str__(self) -> str:
        return f"{self.role} {self.pid}"


class Victim:
    """A command of the product; it runs in ``folder``, with its output in ``log`` there, and :data:`MARK` set."""

    def __init__(
        self, command: Sequence[str], folder: Path, mark: str, environ: Mapping[str, str], log: str = "victim.log"
    ) -> None:
        if STOPPED.is_set():
            raise Interrupted
        self.folder, self.mark, self.log = folder, mark, folder / log
        with self.log.open("w") as output:
            self.started = time.monotonic()
            self._process = subprocess.Popen(
                command, cwd=folder, env={**environ, MARK: mark}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        with suppress(OSError):  # of one that has ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    @property
    def exit_status(self) -> int | None:
        """Of the command, once it has ended."""
        return self._process.poll()

    def ends_within(self, seconds: float) -> bool:
        """Return whether the command ends in time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        return self.exit_status is not None

    def awaits(self, reached: Callable[[], object], interval: Callable[[], float] = lambda: KEEN) -> bool:
        """Wait for a condition; return whether it held before the victim or the attack ended, or :data:`LIMIT`."""
        while self.exit_status is None and not STOPPED.is_set() and time.monotonic() < self.started + LIMIT:
            if reached():
                return True
            time.sleep(interval())
        return False

    def family(self) -> list[Process]:
        """Return the command and its descendants while it runs; takes well under a millisecond."""
        if self.exit_status is not None:
            return []
        return [Process(self._process.pid, "train.py"), *_descendants(self._process.pid, "train.py")]

    def await_birth(self) -> float | None:
        """Wait for the first rank; return the time of its birth by :func:`now`, or ``None`` if the victim ends before.

        Forks of the fork server before there is a record are no ranks: imports may start programs.
        """
        opened, born = list[Path](), list[float]()

        def is_born() -> bool:
            if not opened:
                for below in ("*", "*/*"):
                    opened.extend(self.folder.glob(f"outputs/{below}/record.json"))
            born.extend(births(self.family()) if opened else ())
            return bool(born)

        return min(born) if self.awaits(is_born, lambda: EAGER if opened else IDLE) else None


def now() -> float:
    """Return the time on the clock of births: seconds since the boot of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def births(family: Iterable[Process]) -> Iterator[float]:
    """Yield the times of birth of a family's ranks, which the kernel rounds down to 10 ms."""
    for process in family:
        if process.role == "rank":
            with suppress(OSError, IndexError):
                ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
                yield int(ticks) / os.sysconf("SC_CLK_TCK")


def hurry() -> None:
    """Give this thread priority over the victims, if permitted: 50 ms are short on a busy machine."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE - 10)


def choose(family: Sequence[Process], rng: random.Random) -> list[Process]:
    """Choose whom to kill: mostly one process, each role with equal probability; else several, or all."""
    roles = sorted({process.role for process in family})
    by_role = [[process for process in family if process.role == role] for role in roles]
    if rng.random() < 0.75:
        return [rng.choice(rng.choice(by_role))]
    return sorted(rng.sample(family, rng.randint(min(2, len(family)), len(family))), key=lambda process: process.pid)


def kill(processes: Iterable[Process]) -> None:
    """Send SIGKILL to each process that is still there."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def left(mark: str, folder: Path | None = None, in_jobs: bool = True) -> list[Process]:
    """Return the processes with a mark of this prefix, and those that work in ``folder``; ``in_jobs``: also SLURM's."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of one that has ended meanwhile
            environ = (path / "environ").read_bytes()
            is_marked = f"{MARK}={mark}".encode() in environ
            if not is_marked and not (folder and Path(os.readlink(path / "cwd")).is_relative_to(folder)):
                continue
            if in_jobs or b"SLURM_JOB_ID=" not in environ:
                processes.append(Process(int(path.name), "process", _command(int(path.name))))
    return processes


def survivors(mark: str, folder: Path, until: float, in_jobs: bool = True) -> list[Process]:
    """Return the processes that are left at ``until``, a time of the monotonic clock, and kill them."""
    while (there := left(mark, folder, in_jobs)) and time.monotonic() < until:
        time.sleep(0.2)
    kill(there)
    return there


def sweep_away(mark: str) -> None:
    """Kill all processes with the mark, until there are none."""
    while there := left(mark):
        kill(there)
        time.sleep(0.05)


def _descendants(pid: int, role: str) -> Iterator[Process]:
    """Yield the descendants of a process of a role, by /proc: psutil would read every process of the machine."""
    mine, children = _command(pid), list[int]()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    for child in children:
        command = _command(child)
        its = _role(role, command, is_fork=command == mine)
        yield Process(child, its, command)
        yield from _descendants(child, its)


def _role(parent: str, command: str, is_fork: bool) -> str:
    if "multiprocessing.resource_tracker" in command:
        return "resource tracker"
    if parent == "train.py" and "multiprocessing.forkserver" in command:
        return "fork server"
    forked = {"fork server": "rank", "rank": "data worker"}
    return forked.get(parent, "helper") if is_fork else "helper"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
