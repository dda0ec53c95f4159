"""Commands that are attacked: their processes, the birth of their ranks, and what is left of them."""

from __future__ import annotations

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

#: The variable by which a victim's processes are known: /proc shows of a fork what its program began with.
MARK = "PTDBENCH_ATTACK"

#: Set when the attack itself is asked to end: from then on nothing is started.
STOPPED = threading.Event()

#: Seconds between two looks: while nothing is expected, while a file is, and while a birth is.
IDLE, KEEN, EAGER = 0.01, 0.002, 0.0005

#: The priority that this process was started with, and its victims have.
_NICE = os.getpriority(os.PRIO_PROCESS, 0)

#: Seconds that a victim gets to come to the moment of its kill; then the moment is now.
LIMIT = 300.0


class Interrupted(Exception):
    """The attack ends, and its rounds with it."""


@dataclass(frozen=True)
class Process:
    """A process of a victim."""

    pid: int  #: Its id.
    role: str  #: What it is to the victim: ``train.py``, ``fork server``, ``rank``, ...
    command: str = ""  #: Its command line, as far as a report needs it.

    def __str__(self) -> str:
        return f"{self.role} {self.pid}"


class Victim:
    """One command of the product.

    Args:
        command: What a person would type.
        folder: Where; its output goes there, into ``log``.
        mark: The value of :data:`MARK` for its processes.
        environ: Its variables, but for that one.
        log: The file for what it prints.
    """

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
        with suppress(OSError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    @property
    def exit_status(self) -> int | None:
        """Of the command itself, once it has ended."""
        return self._process.poll()

    def ends_within(self, seconds: float) -> bool:
        """Whether the command itself ends in time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        return self.exit_status is not None

    def awaits(self, reached: Callable[[], object], every: Callable[[], float] = lambda: KEEN) -> bool:
        """Wait until something is so; whether it was before the victim ended, or the attack, or :data:`LIMIT`."""
        while self.exit_status is None and not STOPPED.is_set() and time.monotonic() < self.started + LIMIT:
            if reached():
                return True
            time.sleep(every())
        return False

    def family(self) -> list[Process]:
        """The command and its descendants, as long as it runs; takes well under a millisecond."""
        if self.exit_status is not None:
            return []
        return [Process(self._process.pid, "train.py"), *_descendants(self._process.pid, "train.py")]

    def await_birth(self) -> float | None:
        """Wait for the first rank; when it was born, or ``None`` where the victim ends before. See :func:`now`.

        What the fork server starts before there is a record are no ranks: it imports, and imports may start programs.
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
    """The time on the clock of births, in seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def births(family: Iterable[Process]) -> Iterator[float]:
    """When the ranks of a family were born, by the kernel's account, which is up to 10 ms early."""
    for process in family:
        if process.role == "rank":
            with suppress(OSError, IndexError):
                ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
                yield int(ticks) / os.sysconf("SC_CLK_TCK")


def hurry() -> None:
    """Let this thread go before the victims, which keep the machine busy, if it may: 50 ms are soon over."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE - 10)


def choose(family: Sequence[Process], rng: random.Random) -> list[Process]:
    """Whom to kill: mostly one, each role as often as any other; else several or all at once."""
    by_role = [[one for one in family if one.role == role] for role in sorted({one.role for one in family})]
    if rng.random() < 0.75:
        return [rng.choice(rng.choice(by_role))]
    return sorted(rng.sample(family, rng.randint(min(2, len(family)), len(family))), key=lambda one: one.pid)


def kill(processes: Iterable[Process]) -> None:
    """SIGKILL to each that is still there."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def left(mark: str, folder: Path | None = None, in_jobs: bool = True) -> list[Process]:
    """The processes that bear a mark, or one that begins so, and those that work in ``folder``.

    Args:
        mark: Value of :data:`MARK`.
        folder: Where the victim was started.
        in_jobs: Those of SLURM's jobs too.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            environ = (path / "environ").read_bytes()
            is_marked = f"{MARK}={mark}".encode() in environ
            if not is_marked and not (folder and Path(os.readlink(path / "cwd")).is_relative_to(folder)):
                continue
            if in_jobs or b"SLURM_JOB_ID=" not in environ:
                found.append(Process(int(path.name), "process", _command(int(path.name))))
    return found


def survivors(mark: str, folder: Path, until: float, in_jobs: bool = True) -> list[Process]:
    """Those that are still there at ``until``, a time of the monotonic clock; they are killed then."""
    while (there := left(mark, folder, in_jobs)) and time.monotonic() < until:
        time.sleep(0.2)
    kill(there)
    return there


def sweep_away(mark: str) -> None:
    """Kill whatever bears the mark, until there is nothing."""
    while there := left(mark):
        kill(there)
        time.sleep(0.05)


def _descendants(pid: int, role: str) -> Iterator[Process]:
    """What a process of a role has started, and what that has.

    /proc names the children of each thread at once, where psutil would read every process of the machine.
    """
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
