"""From the log of a step to the actions that a replay goes through: each with its cost, and its host's."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from ptdbench.prediction import costs as prices
from ptdbench.prediction.costs import Costs, memory_share
from ptdbench.prediction.log import OPERATIONS, Flag, Kind, Log
from ptdbench.prediction.replay import Action
from ptdbench.prediction.replay import Kind as Does

#: What the calls of a log do, other than work, messages and transfers.
_CALLS = {
    Kind.EVENT.value: Does.RECORD,
    Kind.WAIT.value: Does.WAIT,
    Kind.HOST_WAITS_STREAM.value: Does.AWAIT_STREAM,
    Kind.HOST_WAITS_EVENT.value: Does.AWAIT_EVENT,
    Kind.HOST_WAITS_DEVICE.value: Does.AWAIT_DEVICE,
}

_WORK = (Kind.KERNEL.value, Kind.COPY.value, Kind.SET.value)

#: The fields of a record that its cost depends on.
_COSTED = ["kind", "flags", "name", "bytes", "dims", "dtype", "result"]


@dataclass(frozen=True)
class Costed:
    """The actions of a step of one rank; the lists have an item for each."""

    actions: Sequence[Action]
    families: Sequence[str]  #: Of :data:`ptdbench.prediction.costs.FAMILIES`; empty for what takes no time.
    names: Sequence[str]  #: Of kernels, or of what a call does.
    errors: Sequence[float]  #: Of the seconds of memory-bound work, as shares; 0 for others.
    threads: Sequence[int]  #: The number of the calling thread.
    sizes: Sequence[int]  #: Bytes.
    guessed: Sequence[int]  #: Those of them that are a guess.
    #: Of messages, as a trace names them: ``send`` and ``recv`` in one direction, ``send_recv`` in both; or empty.
    operations: Sequence[str]


def costed(log: Log, records: NDArray[Any], costs: Costs, joins: bool = True) -> Costed:
    """Return the actions of a step's records.

    Args:
        log: The log of a rank.
        records: Those of one of its steps.
        costs: Of the device.
        joins: Whether its collectives are those of the other logs; ranks that ran apart have each their own.

    Raises:
        NoCosts: The device has no costs of some work.
    """
    of_work, launch = _of_work(log, records, costs), costs.launch
    pending: defaultdict[int, list[Any]] = defaultdict(list)
    actions, families, errors, operations = list[Action](), list[str](), list[float](), list[str]()
    columns = (records[name].tolist() for name in ("kind", "stream", "operators", "object"))
    for place, (kind, stream, operators, target) in enumerate(zip(*columns, strict=True)):
        host, family, error, operation = operators * prices.OPERATOR, "", 0.0, ""
        if kind in _WORK:
            family, seconds, error = of_work[place]
            action = Action(Does.WORK, host + launch, stream, seconds)
        elif kind == Kind.MESSAGE.value:
            record, transfers = records[place], pending.pop(stream, [])
            family, seconds = "messages", _seconds(record, transfers, costs)
            directions = sorted({OPERATIONS[transfer["operation"]] for transfer in transfers}, reverse=True)
            operation = "_".join(directions) or OPERATIONS[record["operation"]]
            keys = _keys(record, transfers, None if joins else log.facts["rank"])
            action = Action(Does.MESSAGE, host + prices.CALL, stream, seconds, keys)
        else:
            if kind == Kind.TRANSFER.value:
                pending[stream].append(records[place])
            action = Action(_CALLS.get(kind, Does.MARK), host + prices.EVENT, stream, 0.0, target)
        actions.append(action)
        families.append(family)
        errors.append(error)
        operations.append(operation)
    names = [log.names[number] for number in records["name"].tolist()]
    is_guessed = records["flags"] & Flag.GUESSED.value != 0
    sizes, guessed = records["bytes"].tolist(), (records["bytes"] * is_guessed).tolist()
    return Costed(actions, families, names, errors, records["thread"].tolist(), sizes, guessed, operations)


def _of_work(log: Log, records: NDArray[Any], costs: Costs) -> dict[int, tuple[str, float, float]]:
    """Return family, seconds and their error of each piece of work, by its place; equal ones are costed once."""
    places = np.flatnonzero(np.isin(records["kind"], _WORK))
    alike: dict[bytes, tuple[str, float, float]] = {}
    of_place = {}
    fields = repack_fields(records[places][_COSTED])
    for place, key in zip(places.tolist(), fields.view(f"V{fields.itemsize}").tolist(), strict=True):
        if key not in alike:
            record = records[place]
            name = log.names[record["name"]]
            family, seconds = costs.work(record, name)
            alike[key] = family, seconds, memory_share(name)[1] if family == "memory" else 0.0
        of_place[place] = alike[key]
    return of_place


def _seconds(record: Any, transfers: Sequence[Any], costs: Costs) -> float:
    if transfers:  # both directions of a link at once
        directions = defaultdict[str, int](int)
        for transfer in transfers:
            directions[OPERATIONS[transfer["operation"]]] += int(transfer["bytes"])
        return costs.message("send", 2, max(directions.values()))
    ranks = int(record["dims"][0])
    if ranks < 2:
        return prices.KERNEL
    return costs.message(OPERATIONS[record["operation"]], ranks, int(record["bytes"]))


def _keys(record: Any, transfers: Sequence[Any], alone: int | None) -> tuple[Hashable, ...]:
    """Return the keys by which the ranks of a message find each other; ``alone``: the rank, if it has run apart.

    The first item of a key is how many ranks have it. Transfers of ranks that ran apart, which have no communicator in
    common, are known by their ends and size.
    """
    keys = list[Hashable]()
    for transfer in transfers:
        ranks, own, peer = (int(size) for size in transfer["dims"][:3])
        ends = (own, peer) if OPERATIONS[transfer["operation"]] == "send" else (peer, own)
        communicator = int(transfer["object"]) if alone is None else ranks
        keys.append((2, communicator, *ends, int(transfer["bytes"]), int(transfer["sequence"])))
    members = int(record["dims"][0]) if alone is None else 1
    return (*keys,) if keys else ((members, alone, int(record["object"]), int(record["sequence"])),)
