"""Local ranks: one process per device on this machine, started by torch's own elastic agent.

The agent forks the ranks from a server that has already imported torch (:mod:`ptdbench.launch.preload`), which
makes the second and every later run of a sweep start in a fraction of a second, and still gives each
run fresh processes.
"""

from __future__ import annotations

import logging
import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

#: Signals that end a run from outside. USR2 is the one that submitit and SLURM send ahead of a time limit.
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR2")

#: How long ranks that were told to end have for it before they are killed: to write their reports, and to wait for
#: that of the rank that failed first.
END_SECONDS = 5.0

#: So many times Ctrl-C, and a person does not want to wait for the ranks any longer.
_INSISTS = 3

#: Loggers that tell of each death and signal, with tracebacks of their own; the record tells it better.
_CHATTY = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)


class Stopped(BaseException):
    """A signal asked this process to end; no handler of ordinary errors may swallow it."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")


@dataclass(eq=False)  # not frozen: Python writes tracebacks into exceptions
class RankDied(Exception):
    """A local rank ended without success.

    Attributes:
        rank: The rank that the agent saw fail first.
        exit_code: Its exit status; ``-n`` when signal ``n`` killed it.
    """

    rank: int
    exit_code: int

    def __str__(self) -> str:
        return f"rank {self.rank} ended with exit status {self.exit_code}"


def warm_up(modules: Iterable[str] = ()) -> None:
    """Start the fork server in the background, so that it imports while this process goes on.

    Args:
        modules: What the ranks will need beside torch and the package's own modules.
    """
    multiprocessing.set_forkserver_preload(["ptdbench.launch.preload", *modules])
    multiprocessing.forkserver.ensure_running()


def start(entry: Callable[..., Any], size: int, *arguments: Any, grace: float = 0.0) -> None:
    """Run ``entry(environ, *arguments)`` in ``size`` fresh processes and wait for all of them.

    The ranks find their place in the environment, as under torchrun. The fork server may be older than
    the present environment, so the present one travels as the first argument.

    Args:
        entry: A function that can be pickled.
        size: How many ranks.
        arguments: What it gets beside the environment.
        grace: Seconds that the ranks have to save and to end by themselves after a stop signal, which is passed on to
            them once; a third Ctrl-C takes it away. Without it they are ended at once.

    Raises:
        RankDied: A rank failed; its peers have been ended.
        Stopped: A signal arrived; the ranks have ended or been ended, whatever else happened to them meanwhile.
    """
    warm_up()
    from ptdbench.launch.agent import Agent

    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    overseer = _Overseer(grace)
    with handling(overseer.note):
        result = Agent(_begin, size, (dict(os.environ), entry, *arguments), overseer.look).run()
    overseer.raise_if_stopped()
    for rank, failure in result.failures.items():  # it failed in the instant between our look and the agent's
        raise RankDied(rank, failure.exitcode)


@contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """For a time all stop signals go to ``handler``; then to what was there before. In the main thread only."""
    before = {name: signal.signal(getattr(signal, name), handler) for name in STOP_SIGNALS}
    try:
        yield
    finally:
        for name, previous in before.items():
            # None is a handler that was not set from Python, which cannot be set again from here.
            signal.signal(getattr(signal, name), signal.SIG_DFL if previous is None else previous)


@contextmanager
def deferred() -> Iterator[None]:
    """Around what must not be interrupted: a stop signal is raised as :class:`Stopped` after it."""
    noted: list[int] = []
    with handling(lambda number, _: noted.append(number)):
        yield
    if noted:
        raise Stopped(noted[0])


def ignore_signals() -> None:
    """From now on no stop signal keeps this process from what it still has to write."""
    for name in STOP_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def stop_on_signals() -> None:
    """From now on a stop signal raises :class:`Stopped` in the main thread instead of killing the process."""

    def stop(number: int, _: Any) -> None:
        raise Stopped(number)

    for name in STOP_SIGNALS:
        signal.signal(getattr(signal, name), stop)


class _Overseer:
    """Decides what signals to this process and failures of ranks mean for the other ranks."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._signals: list[int] = []
        self._grace_ends: float | None = None

    def note(self, number: int, _: Any) -> None:
        """Remember a signal; the next look deals with it."""
        self._signals.append(number)

    def raise_if_stopped(self) -> None:
        """Say that we were asked to stop; the first signal counts."""
        if self._signals:
            raise Stopped(self._signals[0])

    def look(self, ranks: Sequence[BaseProcess]) -> None:
        """See to it that the ranks end where one has failed, or where they were asked to.

        A checkpoint needs all ranks: once one has failed in the grace, the others have nothing left to save.
        """
        failed = next(((rank, process.exitcode) for rank, process in enumerate(ranks) if process.exitcode), None)
        if failed:
            _end(ranks, signal.SIGTERM)
            self.raise_if_stopped()
            raise RankDied(*failed)
        if self._signals:
            self._stop(ranks)

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


def _begin(environ: Mapping[str, str], entry: Callable[..., Any], *arguments: Any) -> None:
    """In a rank: let the kernel kill it when the fork server ends, which ends with the process that started it.

    torch asks for SIGINT instead, which a rank may have reason to only note (:mod:`ptdbench.launch.brake`).
    """
    import torch.multiprocessing as mp

    mp._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    entry(environ, *arguments)


def _send(ranks: Sequence[BaseProcess], number: int) -> None:
    for rank in ranks:
        if rank.exitcode is None and rank.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)


def _end(ranks: Sequence[BaseProcess], number: int) -> None:
    """Ask the ranks to end, and kill those that do not: a rank stopped by SIGSTOP hears nothing but SIGKILL."""
    for sent in (number, signal.SIGKILL):
        _send(ranks, sent)
        until = time.monotonic() + END_SECONDS
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
