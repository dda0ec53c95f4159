"""What runs are called in the display of their sweep; as rows of a table they are tested in test_table.py."""

import pytest

from ptdbench.report.labels import titles
from tests.report.made import run

PDP = {"data": 1, "replicate": 1, "pipeline": 2, "microbatches": 4, "accumulation": 1}


def pdp(schedule, **changes):
    return run("pdp", layout=PDP, config={"parallel": {"schedule": schedule}}, **changes)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([pdp("1f1b")], ["gpt_tiny pdp"]),
        ([run("ddp"), pdp("1f1b")], ["gpt_tiny ddp", "gpt_tiny pdp"]),
        ([run("ddp"), run("ddp", model="toy")], ["gpt_tiny ddp", "toy ddp"]),
        (
            [run("ddp"), pdp("1f1b", global_batch=32), pdp("gpipe"), pdp("gpipe", global_batch=32)],
            ["gpt_tiny ddp", "gpt_tiny pdp 1f1b", "gpt_tiny pdp gpipe b16", "gpt_tiny pdp gpipe b32"],
        ),
        ([run("ddp"), run("ddp", world_size=4)], ["gpt_tiny ddp 2 ranks", "gpt_tiny ddp 4 ranks"]),
        ([run("ddp"), run("ddp", precision="bf16")], ["gpt_tiny ddp fp32", "gpt_tiny ddp bf16"]),
        (
            [run(config={"compile": on, "optimizer": {"lr": rate}}) for on in (True, False) for rate in (0.1, 0.2)],
            [
                "gpt_tiny ddp compile=true lr=0.1", "gpt_tiny ddp compile=true lr=0.2",
                "gpt_tiny ddp compile=false lr=0.1", "gpt_tiny ddp compile=false lr=0.2",
            ],
        ),
        ([run(), run()], ["gpt_tiny ddp", "gpt_tiny ddp"]),  # the number tells them apart
        ([run(None, model=None, global_batch=None, workload="p2p")], ["p2p"]),
    ],
)  # fmt: skip
def test_titles_say_what_differs(runs, expected):
    assert titles(runs) == expected
