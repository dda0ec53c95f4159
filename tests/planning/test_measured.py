"""Measured runs in the cache, and what a plan predicted of them."""

import os

import pytest

from ptdbench.planning import measured, plans
from tests.report.made import made

WORDS = ("model=toy", "precision=bf16", "train.global_batch=16")
(PLAN,) = plans.composed([*WORDS, "virtual=h200", "cluster.ranks_per_node=2", "train.micro_batch=max"]).configs
(TYPED,) = plans.composed([*WORDS, "train.steps=500", "timeout_minutes=60"]).configs

PLANNED = made({
    "kind": "planned", "world_size": 2, "global_batch": 16, "layout": {"micro_batch": 8}, "config": PLAN.resolved,
    "environment": {"devices": ["virtual NVIDIA H200"] * 2, "torch": "2.14"},
    "predicted": {"step_seconds": 0.1, "samples_per_second": 160.0, "bound_by": "host"},
})  # fmt: skip
MEASURED = PLANNED | {
    "kind": None, "config": TYPED.resolved, "nodes": ["a"], "predicted": None, "metrics": {"samples_per_second": 200.0},
    "environment": {"devices": ["NVIDIA H200"] * 8, "torch": "2.14"},
}  # fmt: skip


@pytest.mark.parametrize(("changes", "is_same"), [
    ({}, True),
    ({"layout": {"micro_batch": 4}}, False),
    ({"world_size": 4}, False),
    ({"nodes": ["a", "b"]}, False),
    ({"environment": {"devices": ["NVIDIA H200"], "torch": "2.11"}}, False),
    ({"environment": {"devices": ["NVIDIA H100 80GB HBM3"], "torch": "2.14"}}, False),
    ({"environment": {"devices": []}}, False),
    ({"config": {**TYPED.resolved, "kernels": "torch"}}, False),
])  # fmt: skip
def test_a_run_gets_the_prediction_of_the_same_work_on_the_same_device(cache, changes, is_same):
    run = MEASURED | changes
    assert measured.prediction(run) is None
    measured.keep_prediction(PLANNED)
    predicted = measured.prediction(run)
    assert (predicted is not None) is is_same
    if predicted:
        assert predicted["bound_by"] == "host"
        # a step of 16 samples takes 80 ms at 200 samples/s, and 100 ms were predicted
        assert (run | {"predicted": predicted}).prediction_error == pytest.approx(0.25)


def test_the_latest_runs_are_cached_once_each(cache, monkeypatch):
    monkeypatch.setattr(measured, "_MOST", 2)
    for age, (ranks, rate) in enumerate([(2, 100.0), (4, 200.0), (2, 300.0), (8, 400.0)]):
        measured.keep(MEASURED | {"world_size": ranks, "metrics": {"samples_per_second": rate}})
        for path in (cache / "measured").glob("*.json"):
            if f'"samples_per_second": {rate}' in path.read_text():
                os.utime(path, (age, age))
    measured.keep(MEASURED | {"status": "failed"})
    (cache / "measured" / "damaged.json").write_text("{")
    assert [run.metrics.samples_per_second for run in measured.runs()] == [400.0, 300.0]
