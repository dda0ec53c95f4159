"""How long a step would take: its log is costed and replayed until steps follow each other as in a long run."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import mul

from ptdbench.prediction.actions import Costed, costed
from ptdbench.prediction.costs import FAMILIES, SLOWDOWN, Costs
from ptdbench.prediction.log import Log
from ptdbench.prediction.replay import Action, Kind, Timeline, replay
from ptdbench.profiling.events import Interval, intersect, length, subtract, union

#: Steps that are replayed; the last is counted, when the host is as far ahead as it gets.
_STEPS = 3


class NoTime(ValueError):
    """The time of a step cannot be predicted; the message says why."""


@dataclass(frozen=True)
class Prediction:
    """A predicted step."""

    seconds: float
    #: Seconds of the busiest rank by family of costs, of :data:`ptdbench.prediction.costs.FAMILIES`.
    parts: Mapping[str, float]
    errors: Mapping[str, float]  #: By family: one standard deviation, as a share.
    guessed_bytes: int  #: Bytes that kernels of that rank move by a guess.
    step: Costed  #: The last step of the busiest rank.
    timeline: Timeline  #: Its times, which begin with the step.
    ranks: Sequence[Costed]  #: The steps of all ranks.

    @property
    def bound_by(self) -> str:
        """The family that takes most of the step."""
        return max(self.parts, key=self.parts.__getitem__)

    def twice_as_fast(self) -> dict[str, float]:
        """Return how long the step would take if the host, or a family of its work, were twice as fast."""
        families = ("host", "messages", "memory")
        spent = {family for of_rank in self.ranks for family in of_rank.families} | {"host"}
        return {name: _replayed([_halved(of_rank, name) for of_rank in self.ranks])[1]
                for name in families if name in spent}  # fmt: skip


def _halved(step: Costed, family: str) -> list[Action]:
    """Return the actions of a step with half the costs of the host or a family."""
    if family == "host":
        return [action._replace(host=action.host / 2) for action in step.actions]
    return [
        action._replace(seconds=action.seconds / 2) if of == family else action
        for action, of in zip(step.actions, step.families, strict=True)
    ]


def _replayed(ranks: Sequence[Sequence[Action]]) -> tuple[list[Timeline], float, float]:
    """Replay several steps; return the timelines, how long the last one took, and when it began."""
    timelines = replay([_several(step) for step in ranks], SLOWDOWN)
    ends = [max(ends) for ends in zip(*(_ends(line) for line in timelines), strict=True)]
    return timelines, ends[-1] - ends[-2], ends[-2]


def predict(logs: Sequence[Log], costs: Costs, passes: int | None = None) -> Prediction:
    """Predict a step from a log of each kind of rank.

    Args:
        logs: The logs of ranks that do different work, or of all.
        costs: Of the device.
        passes: Passes over which a step accumulates gradients; ``None``: as many as in the log.

    Raises:
        NoTime: A log has no step, or no passes that could be repeated.
        NoCosts: The device has no costs of some work.
        ValueError: The logs do not belong together.
    """
    of_ranks, is_apart = [], any(log.facts.get("alone") for log in logs)
    joins = len(logs) == logs[0].facts["world_size"] and not is_apart
    for log in logs:
        steps = [*log.steps()]
        if not steps or not len(steps[-1]):
            raise NoTime(f"the log of rank {log.facts['rank']} has no complete step")
        records = steps[-1]
        if len({*records["device"].tolist()}) > 1:
            raise NoTime("a process uses several GPUs")
        of_ranks.append(costed(log, records[_repeated(records["thread"].tolist(), passes)], costs, joins))
    _require_partners(of_ranks, joins)
    timelines, seconds, begin = _replayed([step.actions for step in of_ranks])
    busiest = max(range(len(logs)), key=lambda rank: sum(action.seconds for action in of_ranks[rank].actions
                                                         if action.kind == Kind.WORK))  # fmt: skip
    step = of_ranks[busiest]
    line = _last(timelines[busiest], len(step.actions), begin)
    parts = _parts(step, line, seconds)
    guessed = sum(step.guessed)
    return Prediction(seconds, parts, _errors(step, costs), guessed, step, line, of_ranks)


def _require_partners(ranks: Sequence[Costed], joins: bool) -> None:
    """Raise NoTime if a message waits for ranks without a log; of an exchange one rank may stand for the others."""
    messages = [
        (operation, action.subject)
        for step in ranks
        for action, operation in zip(step.actions, step.operations, strict=True)
        if operation
    ]
    calls = defaultdict[Hashable, list[str]](list)
    for operation, keys in messages:
        for key in keys:
            calls[key].append(operation)
    for operation, keys in messages:
        if operation in ("send", "recv") and any({*calls[key]} == {operation} for key in keys):
            raise NoTime("not all stages of its pipeline ran")
        if joins and any(len(calls[key]) < key[0] for key in keys):
            raise NoTime(f"the steps of its ranks are not the same: {operation} is not called by all")


def _repeated(threads: Sequence[int], passes: int | None) -> list[int]:
    """Return the places of a step's records, with those of its second pass as often as it takes for ``passes``.

    A pass is work of the thread that takes steps, followed by that of autograd's.
    """
    places = [*range(len(threads))]
    if passes is None:
        return places
    main = threads[0]
    blocks = [(is_main, len([*block])) for is_main, block in groupby(threads, lambda thread: thread == main)]
    ends = [
        end for (is_main, _), end in zip(blocks, accumulate(size for _, size in blocks), strict=True) if not is_main
    ]
    if passes == len(ends):
        return places
    if len(ends) != 2 or passes < 2:
        raise NoTime(f"{passes} passes of a step, and {len(ends)} can be told apart in its log")
    return places[: ends[0]] + places[ends[0] : ends[1]] * (passes - 1) + places[ends[1] :]


def _several(step: Sequence[Action]) -> list[Action]:
    """Return the actions of several steps, the messages of each with keys of their own."""
    actions, seen = list[Action](), defaultdict[object, int](int)
    for _ in range(_STEPS):
        for action in step:
            if action.kind == Kind.MESSAGE:
                keys = []
                for key in action.subject:
                    keys.append((key, seen[key]))
                    seen[key] += 1
                action = action._replace(subject=tuple(keys))  # noqa: PLW2901
            actions.append(action)
    return actions


def _ends(line: Timeline) -> list[float]:
    """Return when each of the steps ended."""
    count = len(line.ends) // _STEPS
    latest = [max(line.ends[step * count : (step + 1) * count]) for step in range(_STEPS)]
    return [*accumulate(latest, max)]


def _last(line: Timeline, count: int, begin: float) -> Timeline:
    """Return the last step of a timeline, in seconds since it began."""
    first = len(line.ends) - count
    hosts, starts, ends = ([moment - begin for moment in of[first:]] for of in (line.hosts, line.starts, line.ends))
    ready = {place - first: (at - begin, rank) for place, (at, rank) in line.ready.items() if place >= first}
    return Timeline(hosts, starts, ends, ready)


def _parts(step: Costed, line: Timeline, seconds: float) -> dict[str, float]:
    """Split a step: what runs beside products counts as products, and so on in the order of the families."""
    spans: dict[str, list[Interval]] = {family: [] for family in FAMILIES}
    for place, family in enumerate(step.families):
        start, end = line.starts[place], line.ends[place]
        if family == "messages":
            since = max(start, line.ready[place][0])
            spans["bubble"].append((start, since))
            start = since
        if family:
            spans[family].append((start, end))
    free: list[Interval] = [(0.0, seconds)]
    parts = {}
    for family, times in spans.items():
        busy = intersect(union(times), free)
        parts[family] = length(busy)
        free = subtract(free, busy)
    parts["host"] = length(free)
    return parts


def _errors(step: Costed, costs: Costs) -> dict[str, float]:
    """Return the error of each family: of memory-bound work the mean over it, by its seconds."""
    weights = [action.seconds if error else 0.0 for action, error in zip(step.actions, step.errors, strict=True)]
    memory = sum(map(mul, weights, step.errors)) / (sum(weights) or 1.0)
    of_tables = {"products": costs.error, "memory": memory}
    return {family: of_tables.get(family, error or 0.0) for family, error in FAMILIES.items()}
