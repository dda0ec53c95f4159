from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ptdbench.profiling.events import CommCall
from ptdbench.profiling.phases import Ready
from ptdbench.training import traces
from tests.parallel.ranks import each, on_ranks

#: Of the ranks, from which gloo can send nothing, as from a GPU.
META = torch.device("meta")


def aheads(machines: str, skew: float) -> float:
    """In a rank: by how much its clock is ahead, where all but that of the first machine are ``skew`` ahead.

    All machines have one host name.
    """
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traces, "machine", lambda: machines[rank])
        if machines[rank] != machines[0]:
            now = traces.time.time
            patched.setattr(traces, "time", SimpleNamespace(time=lambda: now() + skew))
        return traces.clock_ahead(rank, META)


@pytest.mark.ranks
def test_one_rank_of_each_other_machine_asks_rank_0_for_the_time():
    offsets = on_ranks(3, each, aheads, [("abb", 5.0), ("aab", 5.0)])
    assert [[of_rank[machines, 5.0] for of_rank in offsets] for machines in ("abb", "aab")] == [
        [0, pytest.approx(5.0, abs=0.5), offsets[1]["abb", 5.0]], [0, 0, pytest.approx(5.0, abs=0.5)],
    ]  # fmt: skip
    assert offsets[1]["abb", 5.0] == offsets[2]["abb", 5.0]


def since_of_a_pair() -> list[Ready]:
    """In a rank: when its calls could begin, where ranks 1 and 2 have a group of their own, as in torch 2.15."""
    pair = dist.new_group([1, 2])
    mine = {1: CommCall("send", 8, 1.0, 6.0, peer=1), 2: CommCall("recv", 8, 5.0, 6.0, peer=0)}.get(dist.get_rank())
    calls = [replace(mine, group=pair.group_name)] if mine else []
    return traces.ready(calls, {"pp": dist.group.WORLD}, 0.0)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_message_in_a_group_of_two_is_one_between_ranks_of_the_pipeline():
    assert on_ranks(3, since_of_a_pair) == [[], [Ready(5.0, last=2)], [Ready(5.0)]]
