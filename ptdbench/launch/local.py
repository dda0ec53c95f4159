"""Local ranks: one process per device on this machine, with the environment that torchrun would give it.

The ranks are forked from a server that has already imported torch (:mod:`ptdbench.launch.preload`), which makes the
second and every later run of a sweep start in a fraction of a second, and still gives each run fresh processes.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ptdbench.launch import forced_exit
from ptdbench.launch.address import HERE, listen
from ptdbench.launch.lifetime import die_with_parent
from ptdbench.launch.settings import added
from ptdbench.launch.world import THIS_MACHINE, Place, local_environments
from ptdbench.problems import ConfigError, Problem
from ptdbench.terminal import echo

if TYPE_CHECKING:
    from torch.distributed import TCPStore

#: Signals that end a run from outside. USR2 is the one that submitit and SLURM send ahead of a time limit.
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR2")

#: How long ranks that were told to end have for it before they are killed: to write their reports, and to wait for
#: that of the rank that failed first.
END_SECONDS = 5.0

#: How long ranks that were killed are waited for: they end at once, unless the machine is busy or a device holds them.
KILLED_SECONDS = 5.0

#: Seconds between two looks at the ranks, at most: the end of a rank is seen at once.
INTERVAL = 0.05

#: How long processes that ranks have left behind are given to end by themselves, and once more after SIGTERM.
ORPHAN_SECONDS = 2.0

#: How long to wait, where a stop signal has ended a rank, for the same to happen to others: who sends it to all sends
#: it to one after the other.
_MOMENT = 0.5

#: So many times Ctrl-C, and a person does not want to wait for the ranks any longer.
_INSISTS = 3

#: How long the name of a Unix socket may be, and how much of it multiprocessing appends to the folder.
_SOCKET_BYTES = 107 if sys.platform == "linux" else 103
_SOCKET_NAME = len("/pymp-12345678/listener-12345678")

#: Bytes: torch 2.14 for CUDA cannot be imported with 2.9 GiB of address space, and with 3.4 GiB ranks do not start.
_ADDRESS_SPACE = 4 << 30

#: What the fork server imports, beside what it always does, and the variables of the dynamic linker that it has.
_modules: dict[str, None] = {}
_loading: dict[str, str] = {}

_STOP_NUMBERS = frozenset(getattr(signal, name) for name in STOP_SIGNALS)

_SERVER_ENDED = "the fork server, which makes their processes, has ended (it was killed, or lacked memory or processes)"


class Stopped(BaseException):
    """A signal asked this process to end; no handler of ordinary errors may swallow it."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")


@dataclass(eq=False)  # not frozen: Python writes tracebacks into exceptions
class RankDied(Exception):
    """A local rank ended without success."""

    #: Of the ranks that had ended by themselves when that was seen, in order; ``-n`` when signal ``n`` killed one. The
    #: others have been ended since.
    exit_codes: Mapping[int, int]

    def __str__(self) -> str:
        failed = ((rank, code) for rank, code in self.exit_codes.items() if code)
        return "; ".join(f"rank {rank} ended with exit status {code}" for rank, code in failed)


class LaunchError(Exception):
    """The ranks could not be started, or what they depend on was gone. None of them is left."""


def check_sockets() -> None:
    """Raise ConfigError if no folder takes temporary files, or its name is too long for the fork server's socket."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:  # read-only or full, all that Python has tried
        given, remedy = os.environ.get("TMPDIR", "(not set)"), "make room, or set it to a folder that can be written to"
        raise ConfigError([Problem("TMPDIR", given, str(error.strerror), remedy)]) from None
    spare = _SOCKET_BYTES - len(os.fsencode(folder))
    if spare < _SOCKET_NAME:
        rule = f"at most {_SOCKET_BYTES - _SOCKET_NAME} bytes, as ranks are started through a Unix socket in it"
        raise ConfigError([Problem("TMPDIR", folder, rule, "try TMPDIR=/tmp")])


def check_address_space() -> None:
    """Raise ConfigError if ``ulimit -v`` leaves less than the import of torch for CUDA maps, which would abort it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < _ADDRESS_SPACE and _is_torch_for_cuda():  # below 0: none
        rule = f"must be at least {_ADDRESS_SPACE >> 30} GiB: importing torch takes nearly as much address space"
        raise ConfigError([Problem("ulimit -v", limit >> 10, rule, "try ulimit -v unlimited")])


def _is_torch_for_cuda() -> bool:
    """Return whether the installed torch is a build for CUDA, whose libraries are larger, without importing it."""
    torch = importlib.util.find_spec("torch")
    return bool(torch and torch.origin and (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists())


def warm_up(modules: Iterable[str] = (), loading: Mapping[str, str] | None = None) -> None:
    """Start the fork server in the background, so that it imports while this process goes on.

    Args:
        modules: What the ranks will need beside torch and the package's own modules; remembered, for a server that has
            to be started again.
        loading: Variables by which the dynamic linker loads something else into the ranks. They work in a process
            that is started with them: a server that was not is replaced.

    Raises:
        ConfigError: See :func:`check_sockets`.
    """
    check_sockets()
    _modules.update(dict.fromkeys(modules))
    multiprocessing.set_forkserver_preload(["ptdbench.launch.preload", *_modules])
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    loading = dict(loading or {})
    if server._forkserver_pid and loading != _loading:
        server._stop()
    _loading.clear()
    _loading.update(loading)
    multiprocessing.resource_tracker.ensure_running()  # without them
    with added(loading):
        multiprocessing.forkserver.ensure_running()


def start(
    entry: Callable[..., Any], size: int, *arguments: Any, grace: float = 0.0, where: Place = THIS_MACHINE
) -> None:
    """Run ``entry(environ, *arguments)`` in ``size`` fresh processes and wait for all of them.

    The ranks find their place in the environment, as under torchrun. The fork server may be older than
    the present environment, so the present one travels as the first argument. This process serves their store.

    Args:
        entry: A function that can be pickled.
        size: How many ranks.
        arguments: Can be pickled too.
        grace: Seconds that the ranks have to save and to end by themselves after a stop signal, which is passed on to
            them once; a third Ctrl-C takes it away. Without it they are ended at once.
        where: Where they take themselves to be.

    Raises:
        RankDied: A rank failed; its peers have been ended.
        LaunchError: There were not enough processes or memory to start them, or the fork server ended; the next call
            starts another one.
        Stopped: A signal arrived; the ranks have ended or been ended, whatever else happened to them meanwhile.
    """
    overseer = _Overseer(grace, where.ranks(size))
    context = multiprocessing.get_context("forkserver")
    ranks: list[BaseProcess] = []
    with handling(overseer.note), _ending_orphans():
        try:
            warm_up(loading=where.loading)
            store = _served_store()
            for place in local_environments(size, HERE, store.port, os.environ, where):
                rank = context.Process(target=_begin, args=(place, dict(os.environ), entry, *arguments))
                rank.start()
                ranks.append(rank)
            while not overseer.look(ranks):
                _await_end(ranks)
        except (RankDied, LaunchError):
            raise
        except Exception as error:
            _end(ranks, signal.SIGKILL)
            overseer.raise_if_stopped()
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, EOFError | ConnectionError):  # it was to answer which process it has forked
                reason = _SERVER_ENDED
            elif isinstance(error, OSError):
                reason = error.strerror or str(error)
            raise LaunchError(f"the ranks could not be started: {reason}") from error
    overseer.raise_if_stopped()


def _heard() -> list[int]:
    """The stop signals, but a SIGHUP that is ignored, for which ``nohup`` asks."""
    return [
        number for number in _STOP_NUMBERS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


@contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Send all stop signals to ``handler`` for a time, then to what was there before; in the main thread only."""
    before = {number: signal.signal(number, handler) for number in _heard()}
    try:
        yield
    finally:
        for number, previous in before.items():
            # None is a handler that was not set from Python, which cannot be set again from here.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


@contextmanager
def deferred() -> Iterator[None]:
    """Raise a stop signal that arrives meanwhile as :class:`Stopped` only at the end."""
    noted: list[int] = []
    with handling(lambda number, _: noted.append(number)):
        yield
    if noted:
        raise Stopped(noted[0])


def let_go_at_once() -> None:
    """From now on let a stop signal end this process as the kernel does: a rank has nothing to tidy up."""
    for number in _heard():
        signal.signal(number, signal.SIG_DFL)


def ignore_signals() -> None:
    """From now on let no stop signal keep this process from what it still has to write."""
    for number in _STOP_NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def stop_on_signals() -> None:
    """From now on raise :class:`Stopped` in the main thread on a stop signal, instead of being killed by it."""
    for number in _heard():
        signal.signal(number, _stop)


def stopping() -> AbstractContextManager[None]:
    """Raise :class:`Stopped` in the main thread on a stop signal meanwhile, instead of being killed by it."""
    return handling(_stop)


def stops(number: int) -> bool:
    """Return whether the signal of this number raises :class:`Stopped` as things are."""
    return signal.getsignal(number) is _stop


def _stop(number: int, _: Any) -> None:
    raise Stopped(number)


class _Overseer:
    """Decides what signals to this process and failures of ranks mean for the other ranks."""

    def __init__(self, grace: float, numbers: Sequence[int]) -> None:
        self._grace = grace
        self._numbers = numbers
        self._signals: list[int] = []
        self._grace_ends: float | None = None

    def note(self, number: int, _: Any) -> None:
        """Remember a signal; the next look deals with it."""
        self._signals.append(number)

    def raise_if_stopped(self) -> None:
        """Say that we were asked to stop; the first signal counts."""
        if self._signals:
            raise Stopped(self._signals[0])

    def look(self, ranks: Sequence[BaseProcess]) -> bool:
        """See to it that the ranks end where one has failed, or where they were asked to.

        A checkpoint needs all ranks: once one has failed in the grace, the others have nothing left to save.

        Returns:
            Whether all have ended, and well.
        """
        if any(rank.exitcode for rank in ranks):
            exit_codes = self._await_others(ranks)
            server_ended = _server_has_ended()
            _end(ranks, signal.SIGTERM)
            self.raise_if_stopped()
            if server_ended:
                raise LaunchError(f"{_SERVER_ENDED}, and the ranks with it")
            raise RankDied({self._numbers[place]: code for place, code in exit_codes.items()})
        if self._signals:
            self._stop(ranks)
        return all(rank.exitcode == 0 for rank in ranks)

    def _await_others(self, ranks: Sequence[BaseProcess]) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended; wait for all where a signal seems to have gone to all."""
        until = time.monotonic() + _MOMENT
        while True:
            codes = {rank: process.exitcode for rank, process in enumerate(ranks)}
            ended = {rank: code for rank, code in codes.items() if code is not None}
            asked = any(-code in _STOP_NUMBERS for code in ended.values())
            if not asked or len(ended) == len(ranks) or self._signals or time.monotonic() > until:
                return ended
            time.sleep(0.01)

    def _stop(self, ranks: Sequence[BaseProcess]) -> None:
        if not self._grace:
            _end(ranks, self._signals[0])
            self.raise_if_stopped()
        elif self._grace_ends is None:
            self._grace_ends = time.monotonic() + self._grace
            _send(ranks, self._signals[0])
        elif time.monotonic() > self._grace_ends or self._signals.count(signal.SIGINT) >= _INSISTS:
            _end(ranks, signal.SIGKILL)
            self.raise_if_stopped()


def _served_store() -> TCPStore:
    """Serve the ranks' store on a port that the kernel chooses, so that nobody can take it before a rank does."""
    from torch.distributed import TCPStore

    port, descriptor = listen(HERE, 0)
    return TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _await_end(ranks: Sequence[BaseProcess]) -> None:
    """Wait until a rank ends, for a short time; where one has failed, for as long for others to fail with it."""
    if running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
        connection.wait(running, INTERVAL)
    if any(rank.exitcode for rank in ranks):
        time.sleep(INTERVAL)


def _begin(place: Mapping[str, str], environ: Mapping[str, str], entry: Callable[..., Any], *arguments: Any) -> None:
    """Run ``entry`` in a rank, and let the rank neither outlive the run nor what started it."""
    _die_with_server()
    faulthandler.enable(2)  # stacks on stderr where native code ends it
    os.environ.update({**environ, **place})  # the server may be older than the one, and knows nothing of the other
    gc.freeze()  # what the server has imported is no garbage: looking through it would copy all of its memory
    try:
        entry(environ, *arguments)
    finally:
        forced_exit.exit_soon()


def _die_with_server() -> None:
    """Let the kernel kill this rank when the fork server ends, which ends with the process that started it.

    A parent that ended before this call is not reported: the server, or its starter before the server itself could ask.
    """
    die_with_parent()
    preload = sys.modules.get("ptdbench.launch.preload")  # absent where the server could not import it
    starter = multiprocessing.parent_process()
    if (preload and os.getppid() != preload.SERVER) or not (starter and starter.is_alive()):
        os._exit(1)


@contextmanager
def _ending_orphans() -> Iterator[None]:
    """End, after this, what a rank has started and left: it would take cores, memory and ports from the next run.

    Orphans of ranks become children of the fork server, see :mod:`ptdbench.launch.preload`.
    """
    try:
        yield
    finally:
        left = psutil.wait_procs(_orphans(), ORPHAN_SECONDS)[1]
        for process in left:
            command = str(process.pid)
            with suppress(psutil.Error):
                command += f" ({' '.join(process.cmdline())[:100]})"
            echo(f"a rank had left a process running, which is ended: {command}", sys.stderr)
        for number, seconds in ((signal.SIGTERM, ORPHAN_SECONDS), (signal.SIGKILL, KILLED_SECONDS)):
            for process in left:
                with suppress(psutil.Error):
                    process.send_signal(number)
            left = psutil.wait_procs(left, seconds)[1]


def _orphans() -> list[psutil.Process]:
    """Return the living processes below the fork server once its ranks have ended."""
    with suppress(psutil.Error):
        server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        ranks = {child.pid for child in multiprocessing.active_children()}
        below = psutil.Process(server).children(recursive=True) if server else []
        return [one for one in below if one.pid not in ranks and one.status() != psutil.STATUS_ZOMBIE]
    return []


def _server_has_ended() -> bool:
    """Return whether the fork server, which was there, is no more; the next :func:`start` will start another one."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None  # left to multiprocessing
    return True


def _send(ranks: Sequence[BaseProcess], number: int) -> None:
    for rank in ranks:
        if rank.exitcode is None and rank.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)


def _end(ranks: Sequence[BaseProcess], number: int) -> None:
    """Ask the ranks to end, and kill those that do not: a rank stopped by SIGSTOP hears nothing but SIGKILL."""
    for sent, seconds in ((number, END_SECONDS), (signal.SIGKILL, KILLED_SECONDS)):
        _send(ranks, sent)
        until = time.monotonic() + seconds
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
