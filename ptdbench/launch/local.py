"""Local ranks: one process per device on this machine, with the environment that torchrun would give it.

The ranks are forked from a server that has already imported torch (:mod:`ptdbench.launch.preload`), which makes the
second and every later run of a sweep start in a fraction of a second, and still gives each run fresh processes.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from ptdbench import search_path
from ptdbench.launch.address import HERE, listen
from ptdbench.launch.lifetime import die_with_parent, exit_soon, wait_for
from ptdbench.launch.settings import added
from ptdbench.launch.world import THIS_MACHINE, Place, local_environments
from ptdbench.problems import ConfigError, Problem

#: Signals that stop a run from outside. SIGUSR2 is the one that submitit and SLURM send ahead of a time limit.
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR2")

#: Seconds that ranks have, once told to stop, before they are killed: to write their reports, and to wait for the
#: report of the rank that failed first.
END_SECONDS = 5.0

#: Seconds to wait for killed ranks: they exit at once, unless the machine is busy or a device driver holds them.
KILLED_SECONDS = 5.0

#: Maximum seconds between two looks at the ranks; the exit of a rank is noticed at once.
INTERVAL = 0.05

#: Seconds that orphans of ranks have to exit by themselves.
ORPHAN_SECONDS = 2.0

#: Seconds to wait, once a stop signal has ended a rank, for it to reach the others: a signal to all ranks is sent to
#: one after another.
_MOMENT = 0.5

#: Number of Ctrl-C presses after which the ranks are not waited for any longer.
_INSISTS = 3

#: The fork server's additional imports, and the dynamic linker's variables that it was started with.
_modules: dict[str, None] = {}
_loading: dict[str, str] = {}

_STOP_NUMBERS = frozenset(getattr(signal, name) for name in STOP_SIGNALS)

_SERVER_ENDED = "the fork server, which starts the ranks, has ended (it was killed, or lacked memory or processes)"


class Stopped(BaseException):
    """A signal asked this process to stop; not an ``Exception``, so that no handler of errors swallows it."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")


@dataclass(eq=False)  # not frozen: Python writes tracebacks into exceptions
class RankDied(Exception):
    """A local rank failed."""

    #: By rank, in order, of the ranks that had already exited when the failure was noticed; ``-n`` if signal ``n``
    #: killed one. The others have been ended since.
    exit_codes: Mapping[int, int]


class LaunchError(Exception):
    """The ranks could not be started, or lost the fork server that they depend on. None of them is left running."""


def check_sockets() -> None:
    """Raise ConfigError if no temporary folder can hold the Unix socket through which ranks are started."""
    try:
        with socket.socket(socket.AF_UNIX) as probe, tempfile.TemporaryDirectory(prefix="pymp-") as folder:
            probe.bind(f"{folder}/listener-12345678")  # as multiprocessing will
    except OSError as error:  # read-only, full, or the name is too long
        typed, reason = os.environ.get("TMPDIR", "(not set)"), error.strerror or str(error)
        remedy = "set it to a folder with free space, such as /tmp"
        raise ConfigError([Problem("TMPDIR", typed, reason, remedy)]) from None


def warm_up(modules: Iterable[str] = (), loading: Mapping[str, str] | None = None) -> None:
    """Start the fork server, so that it imports in the background; raises as :func:`check_sockets`.

    Args:
        modules: Modules that the ranks will need besides torch and this package; remembered in case the server must be
            started again.
        loading: Variables by which the dynamic linker loads other libraries into the ranks. They only take effect at
            process start: a server started without them is replaced.
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
    with search_path.safe():
        multiprocessing.resource_tracker.ensure_running()  # without these variables
        with added({**loading, "PYTHONPATH": os.pathsep.join(sys.path)}):  # which ranks get by themselves
            multiprocessing.forkserver.ensure_running()


def start(
    entry: Callable[..., Any], size: int, *arguments: Any, grace: float = 0.0, where: Place = THIS_MACHINE
) -> None:
    """Run ``entry(environ, *arguments)`` in ``size`` fresh processes and wait for all of them.

    The ranks find their place in the environment, as under torchrun. The fork server's environment may be outdated, so
    the current one is passed as the first argument. This process serves their store.

    Args:
        entry: A function that can be pickled.
        size: Number of ranks.
        arguments: Arguments of ``entry``, which must be picklable too.
        grace: Seconds that the ranks have to save and exit after a stop signal, which is forwarded to them once; a
            third Ctrl-C cuts it short. If 0, they are ended at once.
        where: Their pretended place.

    Raises:
        RankDied: A rank failed; its peers have been ended.
        LaunchError: There were not enough processes or memory to start them, or the fork server ended; the next call
            starts another one.
        Stopped: A signal arrived; the ranks have exited or been ended, whatever else happened to them meanwhile.
    """
    overseer = _Overseer(grace, where.ranks(size))
    context = multiprocessing.get_context("forkserver")
    ranks: list[BaseProcess] = []
    with handling(overseer.note), _ending_orphans():
        try:
            warm_up(loading=where.loading)
            from torch.distributed import TCPStore

            # On a port that the kernel chooses, so that no other process can take it first.
            port, descriptor = listen(HERE, 0)
            store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
            environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}  # torchrun's default
            for place in local_environments(size, HERE, store.port, where):
                rank = context.Process(target=_begin, args=(place, environ, entry, *arguments))
                rank.start()
                ranks.append(rank)
            while not overseer.look(ranks):
                if running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
                    connection.wait(running, INTERVAL)
                if any(rank.exitcode for rank in ranks):  # wait as long again for others to fail with it
                    time.sleep(INTERVAL)
        except (RankDied, LaunchError):
            raise
        except Exception as error:
            _end(ranks, signal.SIGKILL)
            overseer.raise_if_stopped()
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, EOFError | ConnectionError):  # the server did not report the forked process
                reason = _SERVER_ENDED
            elif isinstance(error, OSError):
                reason = error.strerror or str(error)
            raise LaunchError(f"the ranks could not be started: {reason}") from error
    overseer.raise_if_stopped()


@contextmanager
def beside(entry: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Within the context, ``entry(environ, *arguments)`` runs in a fresh process, which the end of the context kills.

    A fork server that is there for ranks stays as it is; one that is started for this ends with it.
    """
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    is_first = not server._forkserver_pid
    warm_up([entry.__module__], _loading)
    process = multiprocessing.get_context("forkserver").Process(
        target=_begin, args=({}, dict(os.environ), entry, *arguments)
    )
    try:
        process.start()
        yield
    finally:
        if process.pid:
            _end([process], signal.SIGKILL)
        if is_first:
            _modules.pop(entry.__module__)
            server._stop()


def _handle(handler: signal._HANDLER) -> dict[int, signal._HANDLER]:
    """Set the handler of stop signals, except of a SIGHUP ignored as under ``nohup``; return the previous handlers.

    Only the main thread can: in another one, such as a worker's of Ray, signals are its program's.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    return {number: signal.signal(number, handler) for number in _STOP_NUMBERS - ignored}


@contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle all stop signals with ``handler`` within the context, if this is the main thread."""
    before = _handle(handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            # None stands for a handler not installed from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def attended(command: Sequence[str], **options: Any) -> tuple[int, int | None]:
    """Run a command in a session of its own, which Ctrl-C does not reach, and forward stop signals to it.

    ``options`` are those of :class:`subprocess.Popen`. Returns its exit status, and the first stop signal if one came.
    """
    noted: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        noted.append(number)
        if child is not None:
            child.send_signal(number)

    with handling(forward):
        child = subprocess.Popen(command, start_new_session=True, **options)
        for number in noted:  # signals that arrived before the process existed
            child.send_signal(number)
        return wait_for(child), next(iter(noted), None)


@contextmanager
def deferred() -> Iterator[None]:
    """Defer stop signals: one that arrives within the context raises :class:`Stopped` at its end."""
    arrived: list[int] = []
    with handling(lambda number, _: arrived.append(number)):
        yield
    if arrived:
        raise Stopped(arrived[0])


def die_on_signals() -> None:
    """From now on, let the kernel end this process on a stop signal: a rank has nothing to clean up."""
    _handle(signal.SIG_DFL)


def ignore_signals() -> None:
    """From now on, ignore stop signals, so that they do not interrupt what this process still has to write."""
    _handle(signal.SIG_IGN)


def stop_on_signals() -> None:
    """From now on, raise :class:`Stopped` in the main thread on a stop signal, instead of being killed by it."""
    _handle(_stop)


def stopping() -> AbstractContextManager[None]:
    """Within the context, raise :class:`Stopped` in the main thread on a stop signal, instead of being killed by it."""
    return handling(_stop)


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
        """Record a signal; the next :meth:`look` acts on it."""
        self._signals.append(number)

    def raise_if_stopped(self) -> None:
        """Raise :class:`Stopped` for the first signal, if there was one."""
        if self._signals:
            raise Stopped(self._signals[0])

    def look(self, ranks: Sequence[BaseProcess]) -> bool:
        """End the ranks if one has failed, or if a signal asked them to stop.

        A checkpoint needs all ranks: once one fails in the grace period, the others can no longer save.

        Returns:
            Whether all ranks have exited successfully.
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
        """Return the exit codes of the ranks that have exited; if a stop signal ended one, wait a bit for the rest."""
        until = time.monotonic() + _MOMENT
        while True:
            ended = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode is not None}
            by_signal = any(-code in _STOP_NUMBERS for code in ended.values())
            if not by_signal or len(ended) == len(ranks) or self._signals or time.monotonic() > until:
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


def _begin(place: Mapping[str, str], environ: Mapping[str, str], entry: Callable[..., Any], *arguments: Any) -> None:
    """Run ``entry`` in a rank that outlives neither the run nor the process that started it."""
    _die_with_server()
    faulthandler.enable(2)  # print stacks on stderr if native code crashes
    os.environ.pop("PYTHONPATH", None)  # the server's own
    os.environ.update({**environ, **place})  # the server's environment may be outdated, and lacks the rank's place
    gc.freeze()  # scanning the server's imports for garbage would copy all their pages
    try:
        entry(environ, *arguments)
    finally:
        exit_soon()


def _die_with_server() -> None:
    """Have the kernel kill this rank when the fork server ends, which itself ends with the process that started it.

    The kernel does not report the server, or the server's parent, if it ended before asking: this is checked here.
    """
    die_with_parent()
    preload = sys.modules.get("ptdbench.launch.preload")  # absent if the server could not import it
    starter = multiprocessing.parent_process()
    if (preload and os.getppid() != preload.SERVER) or not (starter and starter.is_alive()):
        os._exit(1)


@contextmanager
def _ending_orphans() -> Iterator[None]:
    """On exit, end processes that ranks left behind: they would take cores, memory and ports from the next run.

    Orphans of ranks become children of the fork server, see :mod:`ptdbench.launch.preload`.
    """
    try:
        yield
    finally:
        left = psutil.wait_procs(_orphans(), ORPHAN_SECONDS)[1]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, KILLED_SECONDS)


def _orphans() -> list[psutil.Process]:
    """Return the living processes below the fork server once its ranks have ended."""
    with suppress(psutil.Error):
        server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        ranks = {child.pid for child in multiprocessing.active_children()}
        below = psutil.Process(server).children(recursive=True) if server else []
        return [child for child in below if child.pid not in ranks and child.status() != psutil.STATUS_ZOMBIE]
    return []


def _server_has_ended() -> bool:
    """Return whether the fork server, once started, has ended; the next :func:`start` will start another one."""
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
    """Signal the ranks to stop, and kill those that do not: a rank suspended by SIGSTOP reacts only to SIGKILL."""
    for sent, seconds in ((number, END_SECONDS), (signal.SIGKILL, KILLED_SECONDS)):
        _send(ranks, sent)
        until = time.monotonic() + seconds
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
