"""By how much the clocks of the ranks differ."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ptdbench.launch.peers import Peer
from ptdbench.launch.together import gather

#: Messages there and back; the fastest one counts.
_TRIES = 10


def ahead(peers: Sequence[Peer], rank: int, device: torch.device) -> float:
    """Seconds by which this rank's clock is ahead of that of rank 0; called in all ranks.

    Ranks of one machine have one clock. One rank of each other machine asks rank 0 for the time, as NTP does
    (RFC 5905): rank 0 is taken to have answered halfway between the question and the answer.
    """
    first: dict[str, int] = {}
    for peer in peers:
        first.setdefault(peer.host, peer.rank)
    found = 0.0
    for asking in first.values():
        if asking and rank in (0, asking):
            found = _answer(asking, device) if rank == 0 else _ask(device)
    of_ranks: list[float] = gather(found)
    return of_ranks[first[peers[rank].host]]


def _ask(device: torch.device) -> float:
    """The least uncertain of several differences to the clock of rank 0."""
    best = (float("inf"), 0.0)
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_TRIES):
        asked = time.time()
        dist.send(message, 0)
        dist.recv(message, 0)
        theirs = message.item()
        answered = time.time()
        best = min(best, (answered - asked, (asked + answered) / 2 - theirs))
    return best[1]


def _answer(asking: int, device: torch.device) -> float:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_TRIES):
        dist.recv(message, asking)
        message.item()  # NCCL makes only the device wait
        message.fill_(time.time())
        dist.send(message, asking)
    return 0.0
