"""The phases of a record, and why there are none."""

import pytest

from ptdbench.profiling.phases import PHASES
from ptdbench.report.recorded_phases import groups, missing, of_rank, step, work_difference
from tests.report.made import DDP, FSDP, PDP, failed, phased, run


def test_the_phases_of_a_step_are_means_over_ranks_and_add_up_to_it():
    """The slowest rank makes the step: what the others did not need of it is in none of their phases."""
    found = step(phased("ddp", 100, {"forward": [40, 30], "backward": [50, 50], "other": [10, 6]}))
    assert found.phases["forward"] == pytest.approx(0.035)
    assert found.phases["other"] == pytest.approx(0.015)  # 8 of its own, and 7 that were not measured
    assert sum(found.phases.values()) == pytest.approx(found.seconds)


@pytest.mark.parametrize("record", [DDP, FSDP, PDP], ids=lambda record: record.parallel)
def test_operations_take_the_place_of_communication(record):
    parts = step(record).parts()
    assert sum(parts.values()) == pytest.approx(record.phases.step_seconds)
    assert "communication" not in parts
    assert set(record.phases.communication) <= set(parts)


def test_a_phase_that_a_record_lacks_is_zero():
    record = phased("ddp", 100, {"forward": [100]})
    del record.phases.ranks["bubble"]
    assert step(record).phases["bubble"] == 0
    assert of_rank(record.phases, 0) == [0, 0.1, *[0] * (len(PHASES) - 2)]


def without(phases=None, **changes):
    return run(phases=phases, workload="train", **changes)


@pytest.mark.parametrize(("record", "reason"), [
    (DDP, None),
    (without({"steps": 0, "reason": "the profiler failed: no room"}), "no phases: the profiler failed: no room"),
    (without(config={"profile": {"steps": 0}}), "no phases: profile.steps=0; run it again with profile.steps=5"),
    (without(config={"profile": {"steps": 5}}),
     "no phases: the 5 profiled steps after the timed ones failed or were interrupted; run it again"),
    (without(), "no phases: written by an earlier version; run it again"),
    (without(environment={"ptdbench": "1.2"}), "no phases: written by an earlier version (1.2); run it again"),
    (failed("pdp", "no room", "oom"),
     "no phases: the run did not finish (oom), and they are taken after the last step"),
    (failed("ddp", "still running") | {"error": {"type": "Unfinished", "message": "still running"}},
     "no phases: the run has not ended"),
    (run(model=None, workload="hello"),
     "workload=hello does not train, so it has no phases; give a run of workload=train"),
])  # fmt: skip
def test_a_record_without_phases_says_why(record, reason):
    assert missing(record) == reason


@pytest.mark.parametrize(("changes", "wrong"), [
    ({"step_seconds": None}, "step_seconds must be above 0"),
    ({"ranks": {"forward": [1.0]}}, "ranks.backward is missing"),
    ({"ranks": {"forward": [], "backward": []}}, "ranks.forward is missing"),
    ({"ranks": {"forward": [1.0], "backward": [1.0, 2.0]}}, "lists for 1 and 2 ranks"),
    ({"waited_for": [0.0]}, "lists for 1 and 2 ranks"),
    ({"stages": [[0]]}, "lists for 1 and 2 ranks"),
])  # fmt: skip
def test_phases_that_do_not_belong_together_are_damaged(changes, wrong):
    record = DDP | {"phases": DDP["phases"] | changes}
    assert missing(record) == f"its phases are damaged: {wrong}; run it again"


@pytest.mark.parametrize(("changes", "difference"), [
    ({"parallel": "tp", "world_size": 8}, None),
    ({"model": "toy"}, "model=gpt_tiny and model=toy"),
    ({"parameters": 7}, "1234567 parameters and 7 parameters"),
    ({"tokens_per_sample": 64}, "None tokens a sample and 64 tokens a sample"),
    ({"global_batch": 32}, "train.global_batch=16 and train.global_batch=32"),
    ({"precision": "bf16"}, "precision=fp32 and precision=bf16"),
    ({"kernels": "torch"}, "kernels=fused and kernels=torch"),
])  # fmt: skip
def test_runs_of_other_work_are_not_compared(changes, difference):
    assert work_difference(DDP, DDP | changes) == difference


def test_runs_of_the_same_work_are_a_group():
    runs = {"a": DDP, "b": DDP | {"global_batch": 32}, "c": FSDP}
    assert [list(group) for group in groups(runs)] == [["a", "c"], ["b"]]
