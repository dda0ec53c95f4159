"""What a rank hands to NCCL on virtual GPUs is what the same rank hands to gloo on CPUs, call by call."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.virtual.conftest import Start

#: Ranks and options. Not those that send between two ranks: NCCL's trace has no sizes of messages sent together.
LAYOUTS = (
    "2 parallel=ddp train.micro_batch=3",
    "2 parallel=ddp parallel.optimizer=zero1",
    "3 parallel=fsdp",
    "4 parallel=hsdp",
    "2 parallel=tp",
    "4 parallel=fsdp parallel.tensor=2 parallel.sequence=true",
    "4 parallel=fsdp parallel.context=2",
)

#: Bytes of a number of fp32: gloo's trace has no size of a tensor without dimensions, such as a loss.
NUMBER = 4


@pytest.mark.ranks
@pytest.mark.thorough
def test_virtual_ranks_send_what_real_ones_send(start: Start, environ):
    command = [sys.executable, "-m", "tests.virtual.sent", *LAYOUTS]
    env = {**environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == list(LAYOUTS)
    for layout, of_devices in found.items():
        for rank, (virtual, real) in enumerate(zip(of_devices["virtual"], of_devices["gloo"], strict=True)):
            assert virtual, (layout, rank)
            assert [call[:2] for call in virtual if call[1] > NUMBER] == [call[:2] for call in real if call[1] > NUMBER]
            for (_, _, ranks), (_, size, known) in zip(virtual, real, strict=True):
                if known and size > NUMBER:  # gloo's trace does not name the group, and what called it does not always
                    assert ranks == known, (layout, rank)
