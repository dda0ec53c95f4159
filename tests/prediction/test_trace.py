"""Predicted steps as traces, read by the code that reads measured ones."""

import json

import pytest

from ptdbench.prediction import trace
from ptdbench.prediction.steps import predict
from ptdbench.profiling.phases import PHASES
from tests.prediction.records import log, record
from tests.prediction.test_costs import H200
from tests.prediction.test_steps import FROM_MESSAGES, TO_MESSAGES, backward, kernel


def test_phases_of_a_predicted_step_are_read_as_of_a_measured_one(tmp_path):
    of = record("MESSAGE", name=4, stream=8, operation="all_reduce", dims=(2, 0), object=5, bytes=2**29)
    step = predict(
        [log(kernel(), kernel(), *backward(3), *TO_MESSAGES, of, *FROM_MESSAGES, kernel(), world_size=2)], H200
    )
    moving = H200.message("all_reduce", 2, 2**29)
    taken = trace.phases(step)
    assert taken.duration == pytest.approx(6e-3 + moving, rel=1e-4)
    expected = {"forward": 2e-3, "backward": 3e-3, "communication": moving, "optimizer": 1e-3}
    for name in PHASES:
        assert taken.seconds[name] == pytest.approx(expected.get(name, 0.0), abs=1e-5), name
    assert {name: (sent.calls, sent.bytes) for name, sent in taken.traffic.items()} == {"all_reduce": (1, 2**29)}
    trace.write(step, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["cat"] == "kernel" for event in events) == 7


def test_waiting_for_another_rank_is_no_communication():
    def rank(busy, mine):
        of = record("MESSAGE", name=4, stream=8, operation="all_reduce", dims=(2, mine), object=5, bytes=2**29)
        return log(*[kernel()] * busy, *TO_MESSAGES, of, *FROM_MESSAGES, kernel(), rank=mine, world_size=2)

    step = predict([rank(4, 0), rank(1, 1)], H200)
    assert trace.phases(step).seconds["communication"] == pytest.approx(H200.message("all_reduce", 2, 2**29), rel=1e-3)
