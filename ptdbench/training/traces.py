"""Traces in the directory of a run, clock offsets between ranks, and the ranks of a traced call."""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from ptdbench.files import lack_of_space
from ptdbench.job import Job
from ptdbench.launch.collect import gather
from ptdbench.launch.peers import machine
from ptdbench.parallel.context import RingAttention
from ptdbench.profiling import perfetto
from ptdbench.profiling.events import LABELED, POINT_TO_POINT, CommCall
from ptdbench.profiling.phases import Ready
from ptdbench.profiling.trace import UPDATE
from ptdbench.terminal import echo

#: Number of round trips; the fastest one counts.
_TRIES = 10


def clock_ahead(rank: int, device: torch.device) -> float:
    """Return the seconds by which this rank's clock is ahead of rank 0's; called in all ranks.

    Ranks on one machine share a clock. One rank of each other machine asks rank 0 for the time, as in NTP (RFC 5905):
    rank 0's answer is assumed to be from halfway between request and response.
    """
    machines = gather(machine())
    if dist.get_backend() == "gloo":  # which cannot send a GPU's tensors
        device = torch.device("cpu")
    first = {name: machines.index(name) for name in dict.fromkeys(machines)}
    seconds = 0.0
    for asking in first.values():
        if asking and rank in (0, asking):
            seconds = _answer(asking, device) if rank == 0 else _ask(device)
    of_ranks: list[float] = gather(seconds)
    return of_ranks[first[machines[rank]]]


def _ask(device: torch.device) -> float:
    """Return the least uncertain of several measured differences to rank 0's clock."""
    best = (float("inf"), 0.0)
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_TRIES):
        sent = time.time()
        dist.send(message, 0)
        dist.recv(message, 0)
        theirs = message.item()
        received = time.time()
        best = min(best, (received - sent, (sent + received) / 2 - theirs))
    return best[1]


def _answer(asking: int, device: torch.device) -> float:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_TRIES):
        dist.recv(message, asking)
        message.item()  # wait for it: NCCL blocks only the device
        message.fill_(time.time())
        dist.send(message, asking)
    return 0.0


def keep(job: Job, write: Callable[[Path], None], ahead: float) -> None:
    """Let each rank ``write`` its trace to a folder in the run's directory, and rank 0 merge them.

    Called in all ranks; if one cannot write, the merged trace is lost, but not the run. ``ahead``: seconds by which
    this rank's clock is ahead of rank 0's.
    """
    written: list[tuple[float, str | None]] = gather((ahead, _written(_of_rank(job, job.world.rank), write)))
    if not job.world.is_first:
        return
    error = next((failure for _, failure in written if failure), None)
    if not error:
        of_ranks = [_of_rank(job, rank) for rank in range(job.world.size)]
        merge = partial(perfetto.merge, of_ranks, _names(job), [offset for offset, _ in written])
        error = _written(job.directory / perfetto.NAME, merge)
    if error:
        echo(f"warning: some traces could not be written: {error}", sys.stderr)


def _written(path: Path, write: Callable[[Path], None]) -> str | None:
    """Write a trace; if that fails, delete it and return why."""
    try:
        path.parent.mkdir(exist_ok=True)
        write(path)
    except (OSError, RuntimeError, ValueError) as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return str(lack_of_space(error, path.parent, Path(tempfile.gettempdir())) or error)
    return None


def _of_rank(job: Job, rank: int) -> Path:
    return job.directory / "trace" / f"rank{rank}.json.gz"


def _names(job: Job) -> list[str]:
    """Name each rank: ``rank 3, cpu, stages 1, 2``."""
    names = [f"rank {peer.rank}, {peer.device}" for peer in job.peers]
    if (stages_of_ranks := stages(job)) is None:
        return names
    stages_text = (f"stage{'s' * (len(of_rank) > 1)} {', '.join(map(str, of_rank))}" for of_rank in stages_of_ranks)
    return [f"{name}, {text}" for name, text in zip(names, stages_text, strict=True)]


def stages(job: Job) -> list[list[int]] | None:
    """Return the stage numbers of each rank; ``None`` without a pipeline."""
    dims = job.training.layout.dims
    if dims.pipeline == 1:
        return None
    owners = job.training.strategy.stage_ranks(dims)
    return [
        [number for number, place in enumerate(owners) if place == dims.stage(rank)] for rank in range(job.world.size)
    ]


#: A call without its time: operation, bytes, and index among calls that share these.
_Key = tuple[str, int, int]

#: When a rank started a call, awaited it, and saw its end, by rank 0's clock.
_Times = tuple[float, float, float]


def group_of(call: CommCall, groups: dict[str, dist.ProcessGroup]) -> str | None:
    """Return the group of a call; ``None`` if it is unknown.

    A gloo trace does not name the group, but the callers reveal it: FSDP, ring attention, other functional collectives
    for tensor and context parallelism, and DDP, whose C++ communicates directly from the backward pass.
    """
    if call.ranks is not None:
        named = [name for name, group in groups.items() if dist.get_process_group_ranks(group) == [*call.ranks]]
        return next(iter(named), None)
    named = [name for name, group in groups.items() if group.group_name == call.group]
    if named or (call.group is not None and call.operation not in POINT_TO_POINT):
        return next(iter(named), None)  # NCCL shortens a long list of ranks
    callers = {caller.partition("::")[0] for caller in call.within}
    if call.operation in POINT_TO_POINT:
        name = "pp"
    elif call.operation in LABELED.values():
        name = "ep"
    elif call.operation == "all_to_all" or any(caller.startswith(RingAttention.__name__) for caller in call.within):
        name = "cp"
    elif "FSDP" in callers:
        name = "dp_replicate" if call.operation == "all_reduce" else "fsdp"
    elif "_c10d_functional" in callers:
        name = "tp"
    elif UPDATE in call.within and call.operation == "all_reduce":  # the gradient norm, reduced over several groups
        return None
    else:
        name = "dp_cp"
    return name if name in groups else None


def in_pipeline(call: CommCall, pipeline: dist.ProcessGroup) -> CommCall:
    """Convert a message's peer to its rank in the pipeline: torch 2.15 has a group per pair, without ranks."""
    if call.peer is None or call.group is None or call.ranks is not None:
        return call
    pair = dist.get_process_group_ranks(_resolve_process_group(cast("Any", call.group)))
    return replace(call, peer=dist.get_process_group_ranks(pipeline).index(pair[call.peer]))


def ready(calls: Sequence[CommCall], groups: dict[str, dist.ProcessGroup], ahead: float) -> list[Ready]:
    """Return when each call of this rank could begin; called in all ranks, with calls ordered by start.

    ``groups``: see :meth:`ptdbench.parallel.mesh.Mesh.groups`; ``ahead``: see :func:`clock_ahead`.
    """
    begins = [Ready(call.start) for call in calls]
    names = [group_of(call, groups) for call in calls]
    calls = [in_pipeline(call, groups[name]) if name == "pp" else call for call, name in zip(calls, names, strict=True)]
    places: dict[str, dict[_Key, int]] = {}
    for name, group in groups.items():
        in_group = [place for place, of_call in enumerate(names) if of_call == name]
        keys = _keys([calls[place] for place in in_group], dist.get_rank(group))
        places[name] = dict(zip(keys, in_group, strict=True))
    of_ranks: list[dict[str, dict[_Key, _Times]]] = gather(
        {name: {key: _times(calls[place], ahead) for key, place in keys.items()} for name, keys in places.items()}
    )
    for name, group in groups.items():
        ranks = dist.get_process_group_ranks(group)
        times = [of_ranks[rank][name] for rank in ranks]
        for key, place in places[name].items():
            if others := _others(key, calls[place], dist.get_rank(group), times):
                begins[place] = _ready(_times(calls[place], ahead), others, ranks, ahead)
    return together(calls, begins)


def together(calls: Sequence[CommCall], begins: Sequence[Ready]) -> list[Ready]:
    """Let the messages of one NCCL kernel begin with the latest of them, as the kernel waits for all."""
    latest: dict[tuple[float, float], Ready] = {}
    for call, ready in zip(calls, begins, strict=True):
        before = latest.get((call.start, call.end), ready)
        latest[call.start, call.end] = max(before, ready, key=lambda begin: begin.since)
    return [
        ready if call.held is not None or call.operation not in POINT_TO_POINT else latest[call.start, call.end]
        for call, ready in zip(calls, begins, strict=True)
    ]


def _times(call: CommCall, ahead: float) -> _Times:
    return call.start - ahead, call.awaited - ahead, call.end - ahead


def _ready(mine: _Times, others: Mapping[int, _Times], ranks: Sequence[int], ahead: float) -> Ready:
    """Return when a call could begin, by this rank's clock, from its times on all ranks by rank 0's clock."""
    last, (since, *_) = max(others.items(), key=lambda item: item[1])
    since = max(since, mine[0])
    done = min((end + ahead for _, awaited, end in (mine, *others.values()) if awaited <= since), default=None)
    return Ready(since + ahead, ranks[last] if since > mine[0] else -1, done)


def _keys(calls: Sequence[CommCall], rank: int) -> Iterator[_Key]:
    """Yield a key for each call that matches its counterparts on other ranks: all run collectives in the same order.

    Messages are ordered only within a sender, receiver and communicator, which are parts of their keys.
    """
    counts = Counter[tuple[str, int]]()
    for call in calls:
        if call.operation in POINT_TO_POINT and call.peer is not None:
            sender, receiver = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
            kind = (f"{call.group or ''} {sender} to {receiver}", 0)
        else:  # sizes of dispatch and combine differ between ranks
            kind = (call.operation, 0 if call.operation in LABELED.values() else call.bytes)
        counts[kind] += 1
        yield (*kind, counts[kind])


def _others(key: _Key, call: CommCall, rank: int, times: Sequence[dict[_Key, _Times]]) -> dict[int, _Times]:
    """Return the times of this call on the other ranks; empty if some did not make it."""
    if call.operation in POINT_TO_POINT:
        return {call.peer: times[call.peer][key]} if call.peer is not None and key in times[call.peer] else {}
    others = {other: of_other[key] for other, of_other in enumerate(times) if other != rank and key in of_other}
    return others if len(others) == len(times) - 1 else {}
