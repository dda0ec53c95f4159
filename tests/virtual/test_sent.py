"""What a rank hands to NCCL on virtual GPUs is what the same rank hands to gloo on CPUs, call by call."""

import json
import sys
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.programs import call
from tests.virtual.conftest import Start

#: Ranks and options.
LAYOUTS = (
    "2 parallel=ddp train.micro_batch=3",
    "2 parallel=ddp parallel.optimizer=zero1",
    "3 parallel=fsdp",
    "4 parallel=hsdp",
    "2 parallel=tp",
    "4 parallel=fsdp parallel.tensor=2 parallel.sequence=true",
    "4 parallel=fsdp parallel.context=2",
    "4 parallel=fsdp parallel.context=2 parallel.context_method=ring",
    "4 parallel=pdp parallel.pipeline=2",
    "2 parallel=pdp parallel.schedule=interleaved1f1b model.layers=4",
    "4 parallel=3d parallel.pipeline=2 parallel.tensor=2 parallel.shard=1",
)

#: Bytes of a number of fp32: messages of a single one, such as a loss, are not compared.
NUMBER = 4


@pytest.mark.ranks
@pytest.mark.thorough
def test_virtual_ranks_send_what_real_ones_send(start: Start, environ):
    done = call(sys.executable, "-m", "tests.virtual.sent", *LAYOUTS, cwd=ROOT, environ=environ, timeout=600)
    assert done.returncode == 0, done.stderr
    messages = json.loads(done.stdout.splitlines()[-1])
    assert list(messages) == list(LAYOUTS)
    for layout, of_devices in messages.items():
        for rank, (virtual, real) in enumerate(zip(of_devices["virtual"], of_devices["gloo"], strict=True)):
            assert virtual, (layout, rank)
            for (pair, expected), (of, sent) in zip(_apart(real).items(), _apart(virtual).items(), strict=True):
                sizes = [[message[:2] for message in of_pair] for of_pair in (sent, expected)]
                assert (of, sizes[0]) == (pair, sizes[1]), (layout, rank)
                for (_, _, ranks, _), (_, _, of_gloo, _) in zip(sent, expected, strict=True):
                    if of_gloo:  # gloo's trace does not name the group, and what called it does not always
                        assert ranks == of_gloo, (layout, rank)


def _apart(calls: list[Any]) -> dict[Any, list[Any]]:
    """Collectives, and the messages to and from each rank: NCCL carries out several of them in one kernel."""
    groups: dict[Any, list[Any]] = {"collectives": []}
    for message in calls:
        operation, size, _, peer = message
        if size > NUMBER:
            groups.setdefault("collectives" if peer is None else f"{operation} {peer}", []).append(message)
    return dict(sorted(groups.items()))
