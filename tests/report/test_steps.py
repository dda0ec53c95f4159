"""The recorded steps of runs, why there are none, and why one is slower than another."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptdbench.comparison.ranking import Alternative, Standing
from ptdbench.profiling.phases import PHASES
from ptdbench.report.steps import (
    against_first,
    behind_first,
    by_work,
    compare_steps,
    recorded_step,
    shares_of_step,
    step_remarks,
    why_no_phases,
    work_difference,
)
from tests.refusals import Abridged
from tests.report.made import DDP, FSDP, PDP, failed, operation, phased, run


def test_the_phases_of_a_step_are_means_over_ranks_and_add_up_to_it():
    """The slowest rank makes the step: what the others did not need of it is in none of their phases."""
    step = recorded_step(phased("ddp", 100, {"forward": [40, 30], "backward": [50, 50], "other": [10, 6]}))
    assert step.phases["forward"] == pytest.approx(0.035)
    assert step.phases["other"] == pytest.approx(0.015)  # 8 of its own, and 7 that were not measured
    assert sum(step.phases.values()) == pytest.approx(step.seconds)


@pytest.mark.parametrize("record", [DDP, FSDP, PDP], ids=lambda record: record.parallel)
def test_operations_take_the_place_of_communication(record):
    parts = recorded_step(record).parts()
    assert sum(parts.values()) == pytest.approx(record.phases.step_seconds)
    assert "communication" not in parts
    assert set(record.phases.communication) <= set(parts)


def test_a_phase_that_a_record_lacks_is_zero():
    record = phased("ddp", 100, {"forward": [100]})
    del record.phases.ranks["bubble"]
    assert recorded_step(record).phases["bubble"] == 0


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
    assert why_no_phases(record) == reason


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
    assert why_no_phases(record) == f"its phases are damaged: {wrong}; run it again"


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
    assert [list(group) for group in by_work(runs)] == [["a", "c"], ["b"]]


class TestTwoRuns:
    def test_the_slower_one_and_where_it_takes_longer(self):
        assert compare_steps(FSDP, DDP, "fsdp", "ddp") == (
            "fsdp +44 ms vs ddp: exposed all-gather +37 (64.0 MB, 1.60 GB/s), optimizer +9, "
            "exposed all-reduce -6 (ddp 4.00 MB, 400 MB/s), rest +4"
        )
        assert compare_steps(DDP, FSDP, "ddp", "fsdp") == (
            "ddp -44 ms vs fsdp: exposed all-gather -37 (fsdp 64.0 MB, 1.60 GB/s), optimizer -9, "
            "exposed all-reduce +6 (4.00 MB, 400 MB/s), rest -4"
        )

    def test_the_bubble_stands_beside_its_formula(self):
        assert "bubble +24 (24% of the step, 20% by formula)" in compare_steps(PDP, DDP, "pdp", "ddp")

    def test_of_an_operation_of_both_each_has_its_figures(self):
        ranks = {"forward": [24, 24], "backward": [39, 39], "communication": [36, 36]}
        slow = phased("ddp", 106, ranks, communication={"all_reduce": operation(36, 40)})
        told = "slow +30 ms vs ddp: exposed all-reduce +30 (4.00 MB, 100 MB/s; ddp 4.00 MB, 400 MB/s)…"
        assert compare_steps(slow, DDP, "slow", "ddp") == Abridged(told)

    def test_what_was_not_measured_is_not_explained_and_records_without_metrics_are_compared(self):
        fast = phased("ddp", 100, {"forward": [61, 61], "backward": [39, 39]})
        slow = phased("ddp", 200, {"forward": [85, 85], "backward": [39, 39], "other": [10, 10]})
        assert compare_steps(slow, fast, "a", "b") == "a +100 ms vs b: other +76, forward +24"
        assert compare_steps(FSDP | {"metrics": None}, DDP | {"metrics": None}, "a", "b").startswith("a +44 ms vs b: ")

    @pytest.mark.parametrize(("step", "intervals", "text"), [
        (76, [None, None], "a 76.0 ms vs b 76.0 ms: within 2%"),
        (77.5, [None, None], "a 77.5 ms vs b 76.0 ms: within 2%"),  # of the longer step
        (77.7, [None, None], None),
        (83, [[0.073, 0.079], [0.075, 0.091]], "a 83.0 ms vs b 76.0 ms: medians within ±8.54 ms (95%)"),
        (83, [[0.073, 0.079], None], None),
        (83, [[0.075, 0.077], [0.082, 0.084]], None),
    ])  # fmt: skip
    def test_a_difference_within_the_noise_is_not_explained(self, step, intervals, text):
        pair = [
            phased("ddp", each, {"forward": [each, each], "backward": [0, 0]})
            | {"metrics": {"step_seconds": {"ci95": interval}}}
            for each, interval in zip((step, 76), intervals, strict=True)
        ]
        expected = text or f"a +{step - 76:.1f} ms vs b: "
        assert compare_steps(*pair, "a", "b").startswith(expected)

    def test_the_interval_of_medians_is_for_their_difference(self):
        """A few long steps make the means differ, and say nothing of the others."""
        pair = [
            phased("ddp", mean, {"forward": [mean, mean], "backward": [0, 0]})
            | {"metrics": {"step_seconds": {"median": median, "ci95": [median - 0.002, median + 0.002]}}}
            for mean, median in ((90, 0.0761), (76, 0.076))
        ]
        assert compare_steps(*pair, "a", "b") == "a 90.0 ms vs b 76.0 ms: medians within ±2.83 ms (95%)"

    def test_waiting_for_no_call_that_was_seen_is_named_so(self):
        ranks = {"forward": [24, 24], "backward": [39, 39], "communication": [30, 30]}
        slow = phased("ddp", 93, ranks, communication={"unknown": operation(30, 0, 0, 0)})
        fast = phased("ddp", 63, ranks | {"communication": [0, 0]})
        assert compare_steps(slow, fast, "a", "b").endswith(": exposed unknown communication +30")


milliseconds = st.floats(0, 5000, allow_nan=False)
runs = st.builds(
    lambda phases, exposed: phased(
        "ddp",
        max(sum(phases) + exposed, 0.001),
        {"forward": [0.0]}
        | {name: [seconds] for name, seconds in zip(PHASES, phases, strict=True)}
        | {"communication": [exposed]},
        communication={"all_reduce": operation(exposed, 2 * exposed)},
    ),
    st.lists(milliseconds, min_size=len(PHASES), max_size=len(PHASES)),
    milliseconds,
)


@settings(max_examples=200, deadline=None)
@given(runs, runs)
def test_the_printed_parts_add_up_to_the_printed_difference(one, other):
    text = compare_steps(one, other, "a", "b")
    head, _, parts = text.partition(": ")
    if "within" in parts:
        return
    total, *found = (float(number.replace(",", "")) for number in re.findall(r" ([+-][\d,.]*\d)", text))
    assert head.startswith("a ")
    assert sum(found) == pytest.approx(total, abs=1e-6)
    assert 1 <= len(found) <= 6


class TestShares:
    def test_a_run_by_itself(self):
        assert (
            shares_of_step(DDP, "ddp")
            == "ddp: forward 32%, backward 51%, exposed all-reduce 8%, optimizer 5%, other 4%"
        )
        assert (
            shares_of_step(PDP, "pdp") == "pdp: data 1%, forward 25%, backward 39%, bubble 24%, optimizer 8%, other 3%"
        )

    @given(runs)
    @settings(max_examples=50, deadline=None)
    def test_they_are_a_hundred_percent(self, record):
        percents = [int(percent) for percent in re.findall(r"(\d+)%", shares_of_step(record, "a"))]
        assert sum(percents) == pytest.approx(100, abs=4)  # rounding, where nothing is left for "other"
        assert min(percents) > 0


class TestRanks:
    def test_stages_that_do_not_take_equally_long(self):
        assert list(step_remarks(PDP | {"remarks": {"pipeline": "stage 0 of 2 with 97%"}}, "pdp")) == [
            "pdp: stage 0 of 2 with 97%",
            "pdp: bubble 24% of the step, 20% by formula",
            "pdp: forward + backward +9% on rank 1 (stage 1), -9% on rank 0 (stage 0); "
            "rank 1 (stage 1) is the straggler (30.0 ms per step)",
        ]

    def test_all_stages_of_a_rank_are_named(self):
        record = PDP | {"phases": PDP["phases"] | {"waited_for": [], "stages": [[0, 3], [1, 2]]}}
        *_, told = step_remarks(record, "pdp")
        assert told == "pdp: forward + backward +9% on rank 1 (stages 1, 2), -9% on rank 0 (stages 0, 3)"

    @pytest.mark.parametrize(("most", "told"), [
        ([1, 1, 1], "rank 1 is the straggler in 3 of 3 steps (30.0 ms per step)"),
        ([1, None, 1], "rank 1 is the straggler in 2 of 3 steps (30.0 ms per step)"),
        ([0, 1], "rank 1 is the straggler in 1 of 2 steps (30.0 ms per step)"),
        ([1], "rank 1 is the straggler (30.0 ms per step)"),
    ])  # fmt: skip
    def test_whether_it_is_always_the_same_rank(self, most, told):
        ranks = {"forward": [30] * 2, "backward": [60] * 2, "stragglers": [30] * 2}
        record = phased("ddp", 120, ranks, waited_for=[0.01, 0.03], waited_for_most=most)
        assert list(step_remarks(record, "ddp")) == [f"ddp: {told}"]

    def test_what_imbalance_costs(self):
        def balanced(step, waits):
            experts = {"fullest_rank": 1 + waits / 40, "dropped": 0, "tokens": {}}
            ranks = {"forward": [30.0] * 2, "backward": [60.0] * 2, "experts": [2.0 * waits, 0.0]}
            return phased("ep", step, ranks, experts=experts)

        loss, forced = balanced(100.0, 10.0), balanced(90.0, 0.0)
        assert list(step_remarks(loss, "a")) == [
            "a: the fullest rank computed 1.25 times the mean tokens of experts, others waited 10.0 ms, 10% of the step"
        ]
        assert compare_steps(loss, forced, "a", "b") == "a +10 ms vs b: experts +10"

    def test_one_slow_rank_is_named_and_even_ones_leave_nothing_to_say(self):
        waits = {"stragglers": [9, 9, 9, 0], "forward": [30] * 4, "backward": [60, 60, 60, 69]}
        record = phased("ddp", 99, waits, waited_for=[0.0, 0.0, 0.0, 0.009])
        assert list(step_remarks(record, "ddp")) == [
            "ddp: forward + backward +7% on rank 3; rank 3 is the straggler (9.00 ms per step)"
        ]
        assert list(step_remarks(DDP, "ddp")) == []
        assert list(step_remarks(phased("ddp", 90, {"forward": [30], "backward": [60]}, waited_for=[]), "ddp")) == []

    def test_profiled_steps_that_were_shorter_cast_doubt(self):
        record = phased("ddp", 100, {"forward": [30], "backward": [70]}, profiled_step_seconds=0.076)
        assert list(step_remarks(record, "ddp")) == [
            "ddp: profiled steps 24% shorter than the timed ones, phases uncertain"
        ]
        record.phases.profiled_step_seconds = 0.096
        assert list(step_remarks(record, "ddp")) == []


def placed(record, number, *faster):
    """An alternative of one run, with its number and those that are known to be faster."""
    return Standing(Alternative([record], {}), number=number, faster=faster)


class TestSweep:
    def test_what_is_not_known_to_differ_is_not_explained(self):
        """Nor of one that is known to be slower than another one alone."""
        tied = behind_first({"ddp": placed(DDP, 0), "pdp": placed(PDP, 1), "fsdp": placed(FSDP, 2, 1)})
        assert [*against_first(tied)] == [Abridged("ddp: forward 32%…")]
        known = behind_first({"ddp": placed(DDP, 0), "pdp": placed(PDP, 1), "fsdp": placed(FSDP, 2, 0)})
        assert [*against_first(known)] == [Abridged("fsdp +44 ms vs ddp: …")]
        alike = phased("fsdp", 76, {"forward": [24, 24], "backward": [40, 40]})
        for other in (alike, phased("fsdp", 60, {"forward": [24, 24], "backward": [30, 30]})):
            lines = against_first(behind_first({"ddp": placed(DDP, 0), "fsdp": placed(other, 1, 0)}))
            assert [*lines] == [Abridged("ddp: forward 32%…")]
        other = DDP | {"global_batch": 32}
        lines = against_first(behind_first({"ddp b16": placed(DDP, 0), "ddp b32": placed(other, 1, 0)}))
        assert [*lines] == [Abridged("ddp b16: forward 32%…"), Abridged("ddp b32: forward 32%…")]
        (line,) = against_first(behind_first({"ddp": placed(DDP | {"phases": None}, 0), "fsdp": placed(FSDP, 1, 0)}))
        assert line.startswith("fsdp: forward 20%")
