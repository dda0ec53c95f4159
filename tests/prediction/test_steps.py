"""Predicted steps of logs written by hand."""

from dataclasses import replace

import pytest

from ptdbench.prediction.costs import CALL, EVENT, KERNEL, LAUNCH, OPERATOR
from ptdbench.prediction.steps import NoTime, predict
from tests.prediction.records import log, product, record
from tests.prediction.test_costs import H200

#: Bytes of an elementwise kernel that takes a millisecond.
MILLISECOND = round((1e-3 - KERNEL) * 0.87 * 4.8e12)


def kernel(**more):
    return record(name=1, bytes=MILLISECOND, **more)


#: Messages go on after the kernels before, and kernels after the messages before.
TO_MESSAGES = [record("EVENT", object=1), record("WAIT", stream=8, object=1)]
FROM_MESSAGES = [record("EVENT", stream=8, object=2), record("WAIT", object=2)]


def backward(count=1):
    return [kernel(thread=2) for _ in range(count)]


def test_a_step_takes_as_long_as_its_work_or_its_host():
    busy = predict([log(kernel(), kernel(), kernel())], H200)
    assert busy.seconds == pytest.approx(3e-3, rel=1e-6)
    assert busy.parts["memory"] == pytest.approx(3e-3, rel=1e-6)
    assert busy.bound_by == "memory"
    assert busy.twice_as_fast() == pytest.approx({"host": 3e-3, "memory": 1.5e-3}, rel=1e-6)
    late = predict([log(kernel(operators=1000), kernel(operators=1000))], H200)
    assert late.seconds == pytest.approx(2 * (1000 * OPERATOR + LAUNCH))
    assert late.parts["host"] == pytest.approx(late.seconds - 2e-3, rel=1e-6)
    assert late.bound_by == "host"
    assert late.twice_as_fast()["memory"] == pytest.approx(late.seconds)
    waits = predict([log(kernel(), kernel(), record("HOST_WAITS_DEVICE", operators=100))], H200)
    assert waits.seconds == pytest.approx(2e-3 + LAUNCH, rel=1e-6)  # the device waits for the first launch


def test_passes_of_a_step_are_repeated():
    two = log(kernel(), *backward(2), kernel(), *backward(2), kernel())
    assert predict([two], H200).seconds == pytest.approx(7e-3, rel=1e-6)
    assert predict([two], H200, passes=5).seconds == pytest.approx(16e-3, rel=1e-6)
    with pytest.raises(NoTime, match="3 passes of a step, and 1 can be told apart"):
        predict([log(kernel(), *backward())], H200, passes=3)


def test_ranks_wait_for_each_other():
    def message(rank):
        return record("MESSAGE", name=4, stream=8, operation="all_reduce", dims=(2, rank), object=5, bytes=2**29)

    logs = [
        log(*[kernel()] * busy, *TO_MESSAGES, message(rank), *FROM_MESSAGES, kernel(), rank=rank, world_size=2)
        for rank, busy in enumerate((1, 4))
    ]
    moving = H200.message("all_reduce", 2, 2**29)
    both = predict(logs, H200)
    assert both.seconds == pytest.approx(5e-3 + moving, rel=1e-6)
    assert both.parts["messages"] == pytest.approx(moving, rel=1e-6)  # of the busiest rank, which nobody waits for
    apart = [
        replace(of, facts={**of.facts, "world_size": 4}) for of in logs
    ]  # whose collectives have nothing in common
    assert predict(apart, H200).seconds == pytest.approx(5e-3 + moving, rel=1e-6)
    assert predict(logs[:1], H200).seconds == pytest.approx(2e-3 + moving, rel=1e-6)
    other = log(message(1), message(1), rank=1, world_size=2)
    other.records["sequence"] += 1  # in another step
    with pytest.raises(NoTime, match="the steps of its ranks are not the same: all_reduce is not called by all"):
        predict([logs[0], other], H200)
    with pytest.raises(NoTime, match="several GPUs"):
        predict([log(kernel(), kernel(device=1))], H200)


def test_stages_wait_for_each_others_transfers():
    def transfer(kind, mine, peer, sequence):
        of = record("TRANSFER", stream=8, operation=kind, dims=(2, mine, peer), object=5 + mine, bytes=2**20)
        of["sequence"] = sequence
        return [of, record("MESSAGE", name=4, stream=8, object=5 + mine)]

    first = [kernel(), *TO_MESSAGES, *transfer("send", 0, 1, 0), *transfer("recv", 0, 1, 0), *FROM_MESSAGES, kernel()]
    second = [*transfer("recv", 1, 0, 0), *FROM_MESSAGES, kernel(), kernel(), *TO_MESSAGES, *transfer("send", 1, 0, 0)]
    step = predict([log(*first), log(*second, rank=1)], H200)
    assert step.seconds == pytest.approx(4e-3 + 2 * H200.message("send", 2, 2**20), rel=0.02)  # one after the other
    assert step.parts["bubble"] == pytest.approx(2e-3, rel=0.05)
    with pytest.raises(NoTime, match="not all stages of its pipeline ran"):
        predict([log(*first), log(*first)], H200)


def test_errors_are_those_of_the_tables():
    step = predict([log(product(8192, 8192, 2048), kernel())], H200)
    assert step.errors["products"] == 0.05
    assert step.errors["memory"] == pytest.approx(0.08)
    assert EVENT < LAUNCH < CALL
