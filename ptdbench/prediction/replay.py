"""Replay of logs of virtual GPUs: when each piece of work would run, given how long it takes.

A pure function of the actions of some ranks. Nothing in it knows a device: :mod:`ptdbench.prediction.costs` says how
long an action takes, and the same actions give the same times to the digit on any machine.
"""

from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple


class Kind(IntEnum):
    """What an action is; ``subject`` is what :class:`Action` has there."""

    WORK = 0  #: A kernel, a copy or a fill; no subject.
    MESSAGE = 1  #: A kernel of messages; the subject is a tuple of the keys by which its ranks find each other.
    RECORD = 2  #: A stream records an event, the subject.
    WAIT = 3  #: A stream waits for an event, the subject.
    AWAIT_STREAM = 4  #: The host waits for a stream.
    AWAIT_EVENT = 5  #: The host waits for an event, the subject.
    AWAIT_DEVICE = 6  #: The host waits for all streams.
    MARK = 7  #: A place in the program; the subject names it.


class Action(NamedTuple):
    """An action of a rank, in the order in which its host asked for it; all times are in seconds."""

    kind: int  #: A :class:`Kind`.
    host: float = 0.0  #: How long the host works before.
    stream: int = 0  #: The stream that it is for.
    seconds: float = 0.0  #: How long it runs; a message, once its last rank has called it.
    subject: Any = None  #: See :class:`Kind`.


@dataclass
class Timeline:
    """When the actions of a rank ran, in seconds since all ranks began; one item for each action."""

    hosts: list[float] = field(default_factory=list)  #: When the host had asked for it, or had waited.
    starts: list[float] = field(default_factory=list)  #: When it began; a message may have to wait for other ranks.
    ends: list[float] = field(default_factory=list)  #: When it ended.
    #: Of a message by its place: when its last rank called it, and which of the ranks that is.
    ready: dict[int, tuple[float, int]] = field(default_factory=dict)


@dataclass
class _World:
    """What the ranks of a replay share."""

    members: Counter[Hashable]  #: How many ranks call the message of a key.
    slowdown: float
    #: By the key of a message, when each rank called it, and which.
    calls: dict[Hashable, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    #: Whether work starts although a message before it still waits for other ranks: only once nobody else can go on.
    is_impatient: bool = False


def replay(logs: Sequence[Sequence[Action]], slowdown: float = 0.0) -> list[Timeline]:
    """Return when the actions of each rank run.

    Work starts when the host has asked for it, its stream is free, and the events that the stream waits for have ended.
    A message starts when the last rank has called it; only ranks with a log count, so that one may stand for many.

    Args:
        logs: The actions of each rank.
        slowdown: How much longer work takes beside a message that moves, as a share.

    Raises:
        ValueError: Ranks wait for each other in a circle.
    """
    members = Counter(key for log in logs for action in log if action[0] == Kind.MESSAGE for key in action[4])
    world, timelines = _World(members, slowdown), [Timeline() for _ in logs]
    running = [_Rank(number, log, timelines[number], world).steps() for number, log in enumerate(logs)]
    before = -1
    while running:
        running = [rank for rank in running if next(rank, True) is None]
        progress = sum(map(len, world.calls.values())) - len(running)
        if progress == before and world.is_impatient:
            raise ValueError(f"{len(running)} of {len(logs)} ranks wait for messages that the others do not reach")
        world.is_impatient, before = progress == before, progress
    return timelines


class _Rank:
    """A rank that goes through its actions, as far as it depends on nothing that other ranks have not called yet."""

    def __init__(self, number: int, log: Sequence[Action], of: Timeline, world: _World) -> None:
        self._number, self._log, self._of, self._world = number, log, of, world
        self._streams: defaultdict[int, float] = defaultdict(float)
        self._events: dict[Any, float] = {}
        self._pending: dict[int, int] = {}  # by stream, its last message, while not all ranks have called it
        self._behind: dict[Any, int] = {}  # the streams of events that were recorded behind such a message
        self._moving: list[tuple[float, float]] = []  # when the latest messages moved

    def steps(self) -> Generator[None]:
        """Run all actions; yield whenever other ranks have to go on first."""
        host, of, slowdown = 0.0, self._of, self._world.slowdown
        streams, events, pending, moving = self._streams, self._events, self._pending, self._moving
        for place, (kind, busy, stream, seconds, subject) in enumerate(self._log):
            host += busy
            while pending and self._must_wait(kind, stream, subject):
                yield
            start = end = host
            if kind == Kind.WORK:
                start = max(host, streams[stream])
                end = streams[stream] = _end(start, seconds, moving, slowdown) if moving else start + seconds
            elif kind == Kind.MESSAGE:
                start = end = max(host, streams[stream])
                for key in subject:
                    self._world.calls[key].append((start, self._number))
                pending[stream] = place
            elif kind == Kind.RECORD:
                end = events[subject] = max(host, streams[stream])
                self._behind.pop(subject, None)
                if stream in pending:
                    self._behind[subject] = stream
            elif kind == Kind.WAIT:
                end = streams[stream] = max(streams[stream], events.get(subject, 0.0))
            elif kind == Kind.AWAIT_STREAM:
                end = host = max(host, streams[stream])
            elif kind == Kind.AWAIT_EVENT:
                end = host = max(host, events.get(subject, 0.0))
            elif kind == Kind.AWAIT_DEVICE:
                end = host = max([host, *streams.values()])
            of.hosts.append(host)
            of.starts.append(start)
            of.ends.append(end)
        while pending and self._must_wait(Kind.AWAIT_DEVICE, 0, None):
            yield

    def _must_wait(self, kind: int, stream: int, subject: Any) -> bool:
        """End the messages that all ranks have called; return whether an action depends on one of the others.

        Other work does not depend on them, but it has to know whether they move beside it.
        """
        for other, place in [*self._pending.items()]:
            self._settle(other, place)
        if kind in (Kind.MARK, Kind.RECORD) or not self._pending:
            return False
        if kind in (Kind.WAIT, Kind.AWAIT_EVENT) and subject in self._behind:
            return True
        is_behind = kind != Kind.AWAIT_EVENT and stream in self._pending
        return is_behind or kind == Kind.AWAIT_DEVICE or (kind == Kind.WORK and not self._world.is_impatient)

    def _settle(self, stream: int, place: int) -> None:
        """End the message of a stream if all of its ranks have called it."""
        keys, calls, members = self._log[place][4], self._world.calls, self._world.members
        if any(len(calls[key]) < members[key] for key in keys):
            return
        since, last = max(call for key in keys for call in calls[key])
        end = since + self._log[place][3]
        self._of.ready[place], self._of.ends[place], self._streams[stream] = (since, last), end, end
        self._moving.append((since, end))
        del self._moving[:-8], self._pending[stream]
        for event in [event for event, behind in self._behind.items() if behind == stream]:
            self._events[event] = max(self._events[event], end)
            del self._behind[event]


def _end(start: float, seconds: float, moving: Sequence[tuple[float, float]], slowdown: float) -> float:
    """Return when work ends that is slower by a share while messages move."""
    at, left = start, seconds
    for begin, end in moving:
        if end > at and begin < at + left:
            left -= max(0.0, begin - at)
            at = max(at, begin)
            if at + left * (1 + slowdown) <= end:
                return at + left * (1 + slowdown)
            left -= (end - at) / (1 + slowdown)
            at = end
    return at + left
