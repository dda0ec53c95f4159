"""Watchdog: notices that a run is stuck, names the rank that holds it up, and ends the run.

A rank that is suspended, spins or waits for a message that is never sent keeps all others waiting without an error. Two
threads in every rank keep running: one observes the main thread and judges, the other exchanges the ranks' states
through the run's key-value store. They are separate because the store may be in the very process that is suspended, so
that a call to it never returns.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from msgspec import Struct, json
from msgspec.structs import replace

from ptdbench.grouping import grouped
from ptdbench.launch import stacks
from ptdbench.launch.world import World
from ptdbench.terminal import rank_names

#: Factor on the time limit for the first step: it compiles, tunes kernels and opens connections, so that a limit that
#: suits later steps would end healthy runs.
FIRST_STEP = 3

#: Time limit in seconds for collective work before and after the steps, whatever the limit of a step: ranks do not
#: arrive at it at the same time.
JOIN_OR_LEAVE_SECONDS = 600.0

#: The phases of that work, worded for messages: "a rank has not ...".
JOINED, LEFT = "joined the others", "left the process group"

#: What may have happened to ranks that do not answer.
_GONE = "stopped, or unreachable"

#: The folder with the stacks, below the run's directory, as messages name it.
FOLDER = "failures"


class State(Struct, frozen=True):
    """The state that a rank publishes."""

    tick: int = 0  #: Incremented with each post, as clocks of different machines cannot be compared.
    #: Number of steps finished, on a GPU by the device; this is also the number of the current step. ``None`` before
    #: the first.
    step: int | None = None
    begun: int | None = None  #: Number of steps finished by its host, which on a GPU runs ahead of the device.
    phase: str = ""  #: Work other than a step: :data:`JOINED`, :data:`LEFT`, or empty.
    #: Seconds until it is overdue, at most 0 if it is; ``None`` during work without a limit, such as saving a
    #: checkpoint.
    patience: float | None = None
    place: str = ""  #: Where its main thread is.
    waits: bool = False  #: Whether the main thread waits for other ranks there.
    dumped: bool = False  #: Whether it has given up and written its stacks.
    left: bool = False  #: Whether its work is done.

    @property
    def reached(self) -> tuple[bool, int, int]:
        """Its progress, to be compared with that of other ranks."""
        return self.phase != JOINED, -1 if self.step is None else self.step, -1 if self.begun is None else self.begun


@dataclass(frozen=True)
class Sighting:
    """The last posted state of another rank, if any, and when it was first seen, by this rank's clock."""

    state: State | None
    since: float


class Watchdog:
    """Context around the work of a rank: ends the process if no rank has finished a step for too long.

    It only checks whether steps finish, so a slow run is never ended unless a step exceeds the limit. Exiting the
    context stops both threads at once. All ranks must enter it.

    Args:
        world: This rank's place.
        store: A store used only by this run.
        folder: Folder for the stacks, ``stacks-rank-N.txt``; created if missing.
        limit_seconds: Time limit of a step; :data:`FIRST_STEP` times as much for the first one.
        report: Called, in a thread, in every rank that gives up, just before it exits with status 1: with the rank to
            blame (-1: the process that started the ranks), a message for the user, and that rank's stacks, or this
            rank's if it has written none. All ranks report, since the exit of any of them may be seen first.
    """

    def __init__(
        self,
        world: World,
        store: dist.Store,
        folder: Path,
        limit_seconds: float,
        report: Callable[[int, str, str], None],
    ) -> None:
        self._world = world
        self._folder = folder
        self._limit = limit_seconds
        self._report = report
        self._period = min(2.0, max(0.2, limit_seconds / 20))
        self._quiet = 5 * self._period + 1  # on a busy node a thread may have to wait for a core
        self._board = _Board(world, store, patience=self._quiet)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._over = threading.Event()
        self._pauses = 0
        self._step: int | None = None
        self._device: Callable[[], int] | None = None
        self._phase = ""
        self._mine = State()

    def __enter__(self) -> Watchdog:
        self._progressed_at = self._posted_at = time.monotonic()
        self._board.start()
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._over.set()
        self._thread.join(timeout=1.0)
        self._board.close(replace(self._mine, tick=self._mine.tick + 1, left=error is None))

    def beat(self, step: int) -> None:
        """Note that ``step`` steps are finished."""
        self._step = step

    @contextmanager
    def following(self, device: Callable[[], int]) -> Iterator[None]:
        """Within the context, count a step when the device has finished it, not when its work is queued.

        ``device`` returns the number of steps finished by the device; it is called in a thread, and must not block.
        """
        self._device = device
        try:
            yield
        finally:
            self._device = None

    @contextmanager
    def limited(self, phase: str) -> Iterator[None]:
        """Within the context, apply :data:`JOIN_OR_LEAVE_SECONDS`; ``phase`` is :data:`JOINED` or :data:`LEFT`."""
        self._phase = phase
        try:
            yield
        finally:
            self._phase = ""

    def alive(self) -> None:
        """Note that a unit of work other than a training step is finished, such as one message size."""
        self._step = (self._step or 0) + 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context, apply no limit: for work between two steps, such as a checkpoint or an evaluation."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def _watch(self) -> None:
        while not self._over.wait(self._period):
            now = time.monotonic()
            self._post(now)
            if self._mine.patience is not None and self._mine.patience <= 0 and (judgement := self._judge(now)):
                self._give_up(*judgement)

    def _post(self, now: float) -> None:
        """Observe the main thread and post its state; ask for the other ranks' states only if this rank is late."""
        was_asleep = now - self._posted_at > self._quiet  # this thread, for example by Ctrl-Z or ``scontrol suspend``
        # The finished steps; the device is asked once there is a first one.
        finished = self._device() if self._step is not None and self._device else self._step
        before, place = self._mine, stacks.main_thread()
        self._mine = State(before.tick + 1, finished, self._step, self._phase, place=str(place), waits=place.waits)
        if (self._mine.step, self._mine.phase) != (before.step, before.phase) or self._pauses or was_asleep:
            self._progressed_at = now
        self._posted_at = now
        patience = self._allowed() - (now - self._progressed_at)
        self._mine = replace(self._mine, patience=None if self._pauses else patience)
        self._board.post(self._mine, asks=patience < self._allowed() / 2)

    def _allowed(self) -> float:
        if self._mine.phase:
            return JOIN_OR_LEAVE_SECONDS
        return self._limit * (FIRST_STEP if self._mine.step is None else 1)

    def _judge(self, now: float) -> tuple[int, str] | None:
        """Return the rank to blame and why, or ``None`` while another rank may still progress; this rank does not."""
        if now - self._board.answered > self._quiet:
            return self._silent_store()
        seen = self._board.seen()
        if len(seen) < self._world.size - 1:
            return None
        states: dict[int, State | None] = {self._world.rank: self._mine}
        for rank, sighting in seen.items():
            state, age = sighting.state, now - sighting.since
            if state and not state.left:
                if age > self._quiet:
                    state = None  # it no longer answers
                elif state.patience is None or state.patience > age:
                    return None
            states[rank] = state
        return verdict(states, self._allowed())

    def _silent_store(self) -> tuple[int, str]:
        has_store = self._world.started_by.has_store
        who = "the process that started the ranks" if has_store else "rank 0"
        message = (
            f"{who} does not answer: {_GONE} (rank {self._world.rank} has not {_undone(self._mine)} for "
            f"{self._allowed():g} s: {_where(self._mine)}); stacks in {FOLDER}/"
        )
        return (-1 if has_store else 0), message

    def _give_up(self, culprit: int, message: str) -> None:
        """Write the stacks, wait until the others have written theirs, report, and end the process.

        Without the wait, the launcher would end the others as soon as this rank exits.
        """
        shown = stacks.text()
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stacks(self._world.rank).write_text(shown)
        self._mine = replace(self._mine, dumped=True)
        until = time.monotonic() + 2 * self._period + 1
        while time.monotonic() < until and not self._over.is_set():
            now, sightings = time.monotonic(), self._board.seen().values()
            others = [sighting.state for sighting in sightings if now - sighting.since <= self._quiet]
            if all(state.dumped or state.left for state in others if state):
                break
            self._mine = replace(self._mine, tick=self._mine.tick + 1)
            self._board.post(self._mine, asks=True)
            self._over.wait(0.1)
        if self._over.is_set():  # the main thread continued after all: a peer that gave up has reported and exited
            return
        try:
            with suppress(OSError):
                shown = self._stacks(culprit).read_text() or shown
            self._report(culprit, message, shown)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)  # the main thread cannot be interrupted

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"stacks-rank-{rank}.txt"


class _Board:
    """The ranks' states, exchanged through the store by a thread that may be abandoned."""

    def __init__(self, world: World, store: dist.Store, patience: float) -> None:
        self._world = world
        # A separate connection: the main thread may be holding the run's while it waits for a peer.
        self._store = store.clone()  # type: ignore[attr-defined]  # torch 2.11 does not declare it
        self._store.set_timeout(timedelta(seconds=patience))
        self._thread = threading.Thread(target=self._exchange, daemon=True, name="watchdog's board")
        self._wake = threading.Event()
        self._posted, self._closed = State(), False
        self._asking_since: float | None = None
        self._answered_at = 0.0
        self._seen: dict[int, Sighting] = {}

    def start(self) -> None:
        """Start exchanging posted states with the other ranks."""
        self._thread.start()

    def close(self, last: State) -> None:
        """Post the last state; waits only briefly, as the store may be gone."""
        self.post(last, asks=False)
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=1.0)

    def post(self, state: State, asks: bool) -> None:
        """Post this rank's state; if it ``asks``, also fetch the states of the others."""
        if asks and self._asking_since is None:
            self._asking_since = time.monotonic()
        elif not asks:
            self._asking_since = None
        self._posted = state
        self._wake.set()

    @property
    def answered(self) -> float:
        """The time of the store's last answer, but no earlier than the current question."""
        return max(self._answered_at, self._asking_since or time.monotonic())

    def seen(self) -> dict[int, Sighting]:
        """Return the last sightings of the other ranks."""
        return dict(self._seen)

    def _exchange(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            closed, asks = self._closed, self._asking_since is not None
            with suppress(dist.DistError):  # `answered` tells the watchdog that the store is silent
                self._store.set(_key(self._world.rank), json.encode(self._posted).decode())
                if asks:
                    self._ask()
            if closed:
                return

    def _ask(self) -> None:
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        heard = {rank for rank, sighting in self._seen.items() if sighting.state}
        present = [rank for rank in others if rank in heard or self._store.check([_key(rank)])]
        posted = self._store.multi_get([_key(rank) for rank in present]) if present else []
        now = time.monotonic()
        states: dict[int, State | None] = dict.fromkeys(others)
        states |= {rank: json.decode(state, type=State) for rank, state in zip(present, posted, strict=True)}
        for rank, state in states.items():
            if rank not in self._seen or self._seen[rank].state != state:
                self._seen[rank] = Sighting(state, now)
        self._answered_at = now


def _key(rank: int) -> str:
    return f"watchdog/{rank}"


def verdict(states: Mapping[int, State | None], seconds: float) -> tuple[int, str]:
    """Return the rank to blame for a run in which no rank makes progress, and the message for the user.

    In this order: ranks that do not answer, since none can run without them; ranks that do not wait while others do,
    and of these the ones furthest behind, as the hosts of their peers continue to queue work for waiting devices; else
    no particular rank, as when ranks wait in different collectives.

    Args:
        states: The last state of each rank; ``None`` for one that does not answer.
        seconds: Time in which no step was finished.
    """
    present = {rank: state for rank, state in sorted(states.items()) if state and not state.left}
    silent = sorted(rank for rank, state in states.items() if state is None)
    busy = {rank: state for rank, state in present.items() if not state.waits}
    late = _last(busy) if busy else present
    undone = _undone(next(iter(_last(present if silent else late).values())))
    if silent:
        culprits, what = silent, f"never came, {_GONE}" if undone == JOINED else _GONE
    elif len(late) < len(states) or len(states) == 1:
        culprits, what = list(late), _places(late, together="")
    else:
        what = _places(present, together="all " if len(present) > 1 else "")
        return min(present), f"no rank has {undone} for {seconds:g} s: {what}; stacks in {FOLDER}/"
    verb = "has" if len(culprits) == 1 else "have"
    others = {rank: state for rank, state in present.items() if rank not in culprits}
    peers = f" (peers {doing})" if (doing := _doing(others)) else ""
    message = f"{rank_names(culprits)} {verb} not {undone} for {seconds:g} s: {what}{peers}; stacks in {FOLDER}/"
    return culprits[0], message


def _last(states: Mapping[int, State]) -> dict[int, State]:
    """Return the ranks that are furthest behind."""
    least = min((state.reached for state in states.values()), default=None)
    return {rank: state for rank, state in states.items() if state.reached == least}


def _undone(state: State) -> str:
    """Describe what a rank has not done: ``finished step 12``."""
    return state.phase or f"finished {'the first step' if state.step is None else f'step {state.step}'}"


def _doing(peers: Mapping[int, State]) -> str:
    """Describe what the culprits' peers do: ``waiting in all_reduce``, or ``in step 15``; empty if unknown."""
    if places := ", ".join(dict.fromkeys(state.place for state in peers.values() if state.waits)):
        return f"waiting in {places}"
    begun = max((state.begun for state in peers.values() if state.begun is not None), default=None)
    return "" if begun is None else f"in step {begun}"


def _where(state: State) -> str:
    return f"{'waiting ' * state.waits}in {state.place}"


def _places(states: Mapping[int, State], together: str) -> str:
    """Describe where ranks are, grouped by place; if all are in one place, ``together`` replaces their names."""
    where = grouped((_where(state), rank) for rank, state in states.items())
    if len(where) == 1:
        return f"{together}{next(iter(where))}"
    return ", ".join(f"{rank_names(ranks)} {words}" for words, ranks in where.items())
