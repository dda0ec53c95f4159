"""NCCL's operations in a trace of torch's profiler.

torch writes each operation that it hands to NCCL on the host, as ``record_param_comms``, and repeats its facts at the
kernel that carries it out. Of messages that are sent together it cannot: one kernel carries out all of them, and starts
when their group ends, under ``nccl:coalesced`` and under none of them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ptdbench.profiling.events import BYTES, LABELED, Call, Event, launches_of, operation_of

#: Bytes of a GPU that the buffers of a communicator take, an estimate: ``NCCL_BUFFSIZE`` is 4 MiB by NCCL's
#: documentation, for each neighbor and channel; a ring has two neighbors, and up to 32 channels over NVLink.
NCCL_BUFFERS = 2 * 32 * (4 << 20)

_NAME = "Collective name"
_RECORDED, _TOGETHER = "record_param_comms", "nccl:coalesced"


def is_of(event: Event) -> bool:
    """Return whether an event is a kernel of NCCL's."""
    return event.name.startswith("nccl")


def calls(events: Sequence[Event], kernels: Iterable[Event]) -> list[Call]:
    """The operations that kernels of NCCL carry out; one that carries out several messages has each of them.

    Args:
        events: All of a trace, in the order of their start.
        kernels: Some of NCCL's.
    """
    launches, groups = launches_of(events), list(_groups(events))
    begins = [group.start for group, _ in groups]
    labels = [event for event in events if event.name in LABELED and event.kind == "user_annotation"]
    labels_begin = [label.start for label in labels]
    found = []
    for kernel in kernels:
        messages: Sequence[Mapping[str, Any]] = ()
        moment = launches.get(kernel.facts.get("correlation"), -math.inf)
        if _NAME not in kernel.facts:
            place = bisect_right(begins, moment) - 1
            if place >= 0 and moment < groups[place][0].end:
                messages = groups[place][1]
        place = bisect_right(labels_begin, moment) - 1
        label = labels[place].name if place >= 0 and moment < labels[place].end else ""
        found += [_call(kernel, facts, label) for facts in messages or [kernel.facts]]
    return found


def _groups(events: Sequence[Event]) -> Iterator[tuple[Event, list[Mapping[str, Any]]]]:
    """Each end of a group on the host, and the facts of its operations: those since the last one of their thread.

    An operation of its own has its kernel under it, and an annotation such as ``nccl:send 0->1``.
    """
    pending: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        own = pending[event.thread]
        if event.name == _RECORDED and event.facts.get(_NAME) != "wait":
            own.append(event)
        elif event.name == _TOGETHER and event.kind == "user_annotation":
            yield event, [one.facts for one in own]
            own.clear()
        elif event.name.startswith("nccl:") and own and event.end <= own[-1].end:
            own.pop()


def _call(kernel: Event, facts: Mapping[str, Any], label: str) -> Call:
    """The operation of these facts, carried out by a kernel that was launched under a label."""
    elements = max(int(facts.get("In msg nelems", 0)), int(facts.get("Out msg nelems", 0)))
    item = BYTES.get(str(facts.get("dtype", "")).lower(), 1)
    named = str(facts.get(_NAME) or re.sub(r"ncclDevKernel_|nccl(Dev)?Kernel_?", "", kernel.name))
    listed = str(facts.get("Process Group Ranks", ""))
    ranks = tuple(map(int, re.findall(r"\d+", listed))) if "..." not in listed else ()
    operation = operation_of(named.lstrip("_"))
    other = facts.get({"send": "Dst Rank", "recv": "Src Rank"}.get(operation, ""))
    return Call(
        operation=LABELED.get(label, operation),
        bytes=elements * item,
        start=kernel.start,
        end=kernel.end,
        peer=ranks.index(int(other)) if other is not None and int(other) in ranks else None,
        ranks=ranks or None,
        group=facts.get("Process Group Name"),
    )
