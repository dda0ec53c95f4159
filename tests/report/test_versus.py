"""Two sets of runs beside each other: what is matched, the verdicts, and the exit status of a gate."""

import itertools
import re

import pytest

from ptdbench.comparison.ranking import group_runs, of_models
from ptdbench.report.versus import Incomparable, as_json, gate, match, render, status
from tests.report.made import failed, repeated, run

STEADY = [1000.0, 1010.0, 990.0, 1005.0, 995.0]


def before(parallel="ddp", factor=1.0, rates=STEADY, **changes):
    return repeated(parallel, [factor * rate for rate in rates], sweep="outputs/before", **changes)


def after(parallel="ddp", factor=1.0, rates=STEADY, **changes):
    return repeated(parallel, [factor * rate for rate in rates[::-1]], sweep="outputs/after", **changes)


def with_option(runs, **options):
    return [one | {"config": {**one.config, **options}} for one in runs]


def of(runs, **environment):
    return [one | {"environment": environment} for one in runs]


def shown(found, width=200):
    return render(found, ("before", "after"), width)


class TestMatch:
    def test_configurations_are_brought_together(self):
        found = match([*before("fsdp"), *before("ddp")], [*after("ddp", 0.8), *after("fsdp", 1.3)])
        assert [(pair.label, pair.verdict) for pair in found.pairs] == [("fsdp", "faster"), ("ddp", "slower")]
        fsdp, ddp = found.pairs
        assert fsdp.difference.ratio == pytest.approx(1.3)
        assert ddp.difference.ratio == pytest.approx(0.8)
        assert not ddp.difference.is_paired
        assert found.remarks == []

    def test_one_configuration_on_each_side_is_a_pair_and_what_one_side_has_alone_is_named(self):
        found = match(before("ddp"), after("fsdp", 0.8))
        assert [(pair.label, pair.verdict) for pair in found.pairs] == [("ddp → fsdp", "slower")]
        assert found.remarks == []
        (same_blocks,) = match(before("ddp"), before("fsdp", 0.999)).pairs
        assert (same_blocks.difference.is_paired, same_blocks.verdict) == (True, "slower")
        found = match([*before("ddp"), *before("pdp")], [*after("fsdp"), *after("ddp"), *after("tp")])
        assert [pair.label for pair in found.pairs] == ["ddp"]
        assert (found.remarks, status(found, None)) == (["only before: pdp", "only after: fsdp, tp"], 0)
        seeds = [with_option([*before("ddp"), *before("fsdp")], seed=seed) for seed in (1, 2)]
        said = "before: ddp seed=1, fsdp seed=1; after: ddp seed=2, fsdp seed=2; give runs"
        with pytest.raises(Incomparable, match=f"^no configuration is in both: {said}"):
            match(*seeds)
        sides = [[*of("ddp"), *of("ddp", model="toy")] for of in (before, after)]
        assert [pair.label for pair in match(*sides).pairs] == ["gpt_tiny ddp", "toy ddp"]

    @pytest.mark.parametrize("names", [["ddp"], ["ddp", "fsdp"]])
    def test_other_work_is_refused(self, names):
        def runs(side, precision):
            return [one for name in names for one in side(name, precision=precision)]

        with pytest.raises(Incomparable, match="they did other work, precision=fp32 and precision=bf16; give runs of"):
            match(runs(before, "fp32"), runs(after, "bf16"))

    def test_options_that_one_version_alone_has_tell_nothing_apart(self):
        sides = of(before(), ptdbench="1"), of(with_option(after(), new={"option": 1, "other": 2}), ptdbench="2")
        found = match(*sides)
        assert [pair.label for pair in found.pairs] == ["ddp"]
        assert found.remarks == ["options of one version of ptdbench alone, not compared: new.option and new.other"]
        commits = of(before(), git_commit="a"), of(with_option(after(), new=1), git_commit="b")
        assert [pair.label for pair in match(*commits).pairs] == ["ddp"]
        of_sweep = of(before(), ptdbench="1"), of(with_option(after(), sweep={"new": 1}), ptdbench="2")
        assert match(*of_sweep).remarks == []
        same = of(before(), ptdbench="1"), of(with_option(after(), new=1), ptdbench="1")
        assert [pair.label for pair in match(*same).pairs] != ["ddp"]
        several = [*with_option(after(), new=1), *with_option(after(), new=2)]
        with pytest.raises(Incomparable, match="no configuration is in both"):
            match(of(before(), ptdbench="1"), of(several, ptdbench="2"))

    def test_the_level_holds_for_all_pairs_together(self):
        """A difference that is seen alone is none among many that are tied."""
        change, names = 0.981, [f"p{number}" for number in range(12)]
        one, other = before("ddp", rates=STEADY[:4]), after("ddp", change, STEADY[:4])
        (alone,) = match(one, other).pairs
        many = match([*one, *(run for name in names for run in before(name))],
                     [*other, *(run for name in names for run in after(name))])  # fmt: skip
        assert alone.verdict == "slower"
        assert many.pairs[0].verdict == "no difference seen"
        assert many.pairs[0].difference.detectable > alone.difference.detectable

    def test_the_level_holds_for_all_looks_and_intervals_of_each_side(self):
        def known(**options):
            return match(before(options=options), after(factor=0.98, options=options)).pairs[0].difference

        auto = {"runs": "auto", "max": 20}
        assert known(**auto) == known()  # what each sweep looked at was not the difference between them
        once, several = known(series="s"), known(series="s", **auto)
        assert several.low < once.low < once.high < several.high
        once, several = (
            re.findall(r" ±(\S*)% ", shown(match(before(options=options), after(factor=0.98, options=options))))
            for options in ({}, {"runs": "auto", "max": 20})
        )
        assert (once, several) == (["1.0", "1.0"], ["1.5", "1.5"])


class TestStatus:
    @pytest.mark.parametrize(
        ("factor", "threshold", "expected"),
        [(0.8, None, 1), (0.8, 0.1, 1), (0.8, 0.3, 0), (1.2, 0.01, 0), (1.0, None, 0), (1.0, 0.1, 0), (1.0, 0.001, 3)],
    )
    def test_gate_fails_beyond_the_threshold(self, factor, threshold, expected):
        assert status(match(before(), after("ddp", factor)), threshold) == expected

    def test_gate_passes_only_if_the_interval_excludes_the_threshold(self):
        """Slower by 2 %, with an interval from 1 % to 3 %."""
        found = match(before(), after("ddp", 0.98))
        (pair,) = found.pairs
        assert pair.verdict == "slower"
        assert 0.96 < pair.difference.low < 0.97 < pair.difference.ratio < pair.difference.high < 1
        assert [status(found, threshold) for threshold in (None, 0.01, 0.03, 0.04)] == [1, 1, 3, 0]

    @pytest.mark.parametrize("threshold", [None, 0.03])
    def test_a_configuration_that_fails_now_and_then(self, threshold):
        broken = failed("ddp", "broken") | {"directory": "outputs/after/9"}
        found = match(before(), [*after("ddp", 1.1), broken])
        assert (found.pairs[0].verdict, status(found, threshold)) == ("fails at times", 1)
        found = match([*before(), broken | {"directory": "outputs/before/9"}], [*after("ddp", 1.1), broken])
        assert (found.pairs[0].verdict, status(found, threshold)) == ("faster", 0)

    @pytest.mark.parametrize("threshold", [None, 0.1])
    @pytest.mark.parametrize(("ended", "word"), [
        ({"status": "preempted", "error": {"type": "Stopped", "message": "stopped by SIGTERM"}}, "preempted"),
        ({"status": "failed", "error": {"type": "Unfinished", "message": "still running"}}, "unfinished"),
        ({"status": "failed", "error": {"type": "CANCELLED", "message": "SLURM ended job 7"}}, "cancelled"),
    ])  # fmt: skip
    def test_interrupted_runs_are_left_out_and_named(self, threshold, ended, word):
        gone = [run("ddp", metrics=None, directory=f"outputs/after/{n}", **ended) for n in (7, 8)]
        found = match(before(), [*after(), *gone])
        assert (found.pairs[0].verdict, status(found, threshold)) == ("no difference seen", 0)
        assert shown(found).splitlines()[-1] == f"ddp after: 2 of 7 runs left out: 2 {word}"
        nothing = match(before(), gone)
        assert (nothing.pairs[0].verdict, status(nothing, threshold)) == ("not enough data", 3)
        nothing = match(gone, after())
        assert (nothing.pairs[0].verdict, status(nothing, threshold)) == ("not enough data", 3)

    def test_configuration_that_no_longer_starts_fails(self):
        """Jobs whose nodes fail never know how many ranks they have."""
        lost = failed("ddp", "SLURM ended job 7: NODE_FAIL", rank=-1)
        gone = [lost | {"world_size": None, "nodes": None, "directory": f"outputs/after/{n}"} for n in range(3)]
        found = match([*before(nodes=["a"]), *before("fsdp")], [*after("fsdp"), *gone])
        verdicts = {pair.label: pair.verdict for pair in found.pairs}
        assert (verdicts, status(found, 0.03)) == ({"ddp": "fails", "fsdp": "no difference seen"}, 1)

    @pytest.mark.parametrize("threshold", [None, 0.03])
    @pytest.mark.parametrize(("was", "now", "verdict", "gate"), [
        (before(), after("ddp", 0.1, STEADY[:2]), "not enough data", 3),
        (before(), [failed("ddp", "broken")], "fails", 1),
        ([failed("ddp", "broken")], after(), "runs again", 0),
        ([failed("ddp", "broken")], [failed("ddp", "broken")], "not enough data", 3),
    ])  # fmt: skip
    def test_too_few_runs_and_failures(self, threshold, was, now, verdict, gate):
        found = match(was, now)
        assert (found.pairs[0].verdict, status(found, threshold)) == (verdict, gate)


def with_losses(runs, *losses, **changes):
    """Runs whose last losses are these, in turn."""
    cycled = itertools.cycle(losses)
    return [one | {"final_loss": next(cycled), "steps": 60, **changes} for one in runs]


class TestLosses:
    """The same configuration on both sides has the same losses; what is faster otherwise computes something else."""

    def judged(self, one, other):
        found = match(one, other)
        return found.pairs[0].losses, status(found, None), status(found, 0.1)

    def test_another_loss_is_told_and_fails_the_gate(self):
        said, *gates = self.judged(with_losses(before(), 2.6), with_losses(after("ddp", 1.5), 2.7))
        rounding = "0.037 of it apart, where rounding makes 0.00024 at most"
        assert said == f"the last loss is 2.6 before and 2.7 after: {rounding}"
        assert gates == [0, 1]
        found = match(with_losses(before(), 2.6), with_losses(after("ddp", 1.5), 2.7))
        assert f"ddp: {said}" in shown(found).splitlines()
        assert gate(found, 0.1) == ["ddp: fails, because it does not train the same on both sides"]

    @pytest.mark.parametrize(
        ("precision", "factor"), [("fp32", 1.0001), ("tf32", 1.001), ("bf16", 1.02), ("fp8", 1.04)]
    )
    def test_rounding_is_no_other_training(self, precision, factor):
        sides = with_losses(before(precision=precision), 2.6), with_losses(after(precision=precision), factor * 2.6)
        assert self.judged(*sides) == (None, 0, 0)

    def test_runs_of_one_side_may_differ_as_much(self):
        sides = with_losses(before(), 2.6, 2.65), with_losses(after(), 2.64, 2.7)
        assert self.judged(*sides)[0] is None

    @pytest.mark.parametrize("changes", [
        {"steps": 59},  # by train.max_minutes
        {"final_loss": None},
        {"environment": {"python": "3.13"}},  # whose library the text is
    ])  # fmt: skip
    def test_other_data_or_steps_say_nothing(self, changes):
        one, other = (
            with_option(with_losses(side, loss), data={"name": "text", "path": None})
            for side, loss in ((before(), 2.6), (after(), 2.7))
        )
        assert self.judged(one, other)[0] is not None
        assert self.judged(one, [run | changes for run in other])[0] is None

    def test_other_losses_fail_the_gate_and_those_of_other_configurations_may_differ(self):
        found = match(with_losses(before(), 2.6), with_losses(after("ddp", 1.5), 2.7))
        assert [status(found, threshold) for threshold in (None, 0.1)] == [0, 1]
        assert gate(found, 0.1) == ["ddp: fails, because it does not train the same on both sides"]
        assert self.judged(with_losses(before("ddp"), 2.6), with_losses(after("fsdp"), 2.7))[0] is None


class TestText:
    def test_the_figures_of_a_row(self):
        found = match(before(), after("ddp", 0.8))
        heading, _, row, *remarks = shown(found).splitlines()
        assert heading.split("  ")[0] == "configuration"
        assert "before tokens/s" in heading
        assert row.split()[:3] == ["ddp", "5,", "5"]
        assert "1,000 ±1.0%" in row  # 2.776 * 0.0079 / sqrt(5)
        assert "800 ±1.0%" in row
        assert " 0.800 (0.791-0.809) " in row
        assert row.endswith("slower")
        assert remarks == []

    def test_detectable_difference_is_shown(self):
        found = match(before(), after())
        share = found.pairs[0].difference.detectable  # some 2 %
        seen = f"differences of {1 + share:.3f}x or more are detected (90% power)"
        assert shown(found).splitlines()[-1] == f"ddp: {seen}, 5 runs each, not paired: they were not run in turn"
        paired = match(before(), before("fsdp", rates=STEADY[::-1]))
        assert shown(paired).splitlines()[-1].endswith(", 5 runs each, paired by block")
        wild = [1000.0, 10.0, 100000.0]
        text = shown(match(before(rates=wild), after(rates=wild)))
        assert text.count("±>100%") == 3
        assert "ddp: not even 2x is detected (90% power), 3 runs each, " in text

    def test_too_few_runs_say_how_many_it_takes_unless_none_is_ok(self):
        text = shown(match(before(rates=STEADY[:2]), after("ddp", 0.5, STEADY[:2])))
        assert text.splitlines()[-1] == "ddp: it takes 3 runs of each that are ok; try repeat=5"
        assert " 0.500 " in text
        text = shown(match([failed("ddp", "broken")], [failed("ddp", "broken") | {"directory": "outputs/after/0"}]))
        assert "ddp: no run is ok on either side" in text.splitlines()
        assert "repeat" not in text

    def test_failures_what_is_missing_and_the_environments_are_told(self):
        text = shown(match([*before("ddp"), *before("fsdp")], [failed("ddp", "broken")]))
        told = ["ddp after: 1 of 1 run: failed on rank 1: RuntimeError: broken", "only before: fsdp"]
        assert text.splitlines()[-2:] == told
        sides = of(before(), torch="2.7.0", python="3.12"), of(after(), torch="2.8.0", python="3.12")
        assert shown(match(*sides)).splitlines()[-1] == "environment: torch 2.7.0 → 2.8.0"
        assert "environment" not in shown(match(sides[0], [one | {"directory": "x"} for one in sides[0]]))
        one, other = of(before(rates=[1000.0]), host="n1"), of(before(rates=[1010.0], name="_b"), host="n2")
        early = of([failed("ddp", "gone")], host="login")
        assert "environment" not in shown(match([*one, *other], [*other, *one, *early]))

    def test_what_else_changes_speed_is_compared_and_other_gpus_have_a_line_of_their_own(self):
        def machine(gpu, cores, commit, **settings):
            return {"devices": 2 * [gpu], "cores": cores, "git_commit": 40 * commit, "settings": {"A": "1", **settings}}

        one = machine("NVIDIA A100-SXM4-80GB", 64, "a", OMP_NUM_THREADS="8")
        other = machine("NVIDIA H100 80GB HBM3", 2, "b", OMP_NUM_THREADS="1", NCCL="Ring")
        assert shown(match(of(before(), **one), of(after(), **other))).splitlines()[-2:] == [
            "not the same GPUs: NVIDIA A100-SXM4-80GB → NVIDIA H100 80GB HBM3",
            "environment: git_commit aaaaaaaaaa → bbbbbbbbbb; cores 64 → 2; OMP_NUM_THREADS 8 → 1; NCCL none → Ring",
        ]

    def test_other_load_is_named_and_intervals_are_those_of_the_table(self):
        load = [{"node": "n1", "cores": 2, "taken": 1.5, "gpu_ranks": [], "on_gpu": False}]
        found = match(before(), [*after(rates=STEADY[1:]), *after(rates=STEADY[:1], hardware={"other_load": load})])
        assert shown(found).splitlines()[-1] == "other processes took 1.5 of 2 cores during ddp after (1 of 5 runs)"
        side = [*before(rates=STEADY[:3]), *before("fsdp", rates=[1000.0, 1100.0, 900.0]), *before("pdp", 0.5)]
        rows = [place for places in of_models(group_runs(side)) for place in places]
        expected = {place.alternative.median_run.parallel: f"±{place.margin:.1%}" for place in rows}
        text = shown(match(side, after(rates=STEADY[:3])))
        assert re.search(r"^ddp .*?(±\S*)", text, re.MULTILINE)[1] == expected["ddp"]

    def test_commits_are_shortened_and_samples_named(self):
        heading = render(match(before(), after()), ("a" * 40, "b" * 40), 200).splitlines()[0]
        assert "  aaaaaaaaaa tokens/s  bbbbbbbbbb tokens/s  " in heading
        text = shown(match([run("ddp", None)], [run("ddp", None, directory="other")]))
        assert "before samples/s" in text

    def test_each_row_names_its_unit_where_they_differ(self):
        toy = {"model": "toy", "metrics": {"samples_per_second": 100.0}}
        lost = [failed("tp", "gone", rank=-1)]
        found = match([*before(), run("single", **toy), *lost], [*after(), run("single", directory="x", **toy), *lost])
        heading, _, ddp, single, tp, *_ = shown(found).splitlines()
        assert heading.split() == ["configuration", "runs", "before", "after", "ratio", "(95%)", "verdict"]
        assert (ddp.count(" tokens/s "), single.count("  100 samples/s "), tp.count("/s ")) == (2, 2, 0)
        told = as_json(found, None)
        assert (told["unit"], [pair["unit"] for pair in told["pairs"][:2]]) == (None, ["tokens", "samples"])
        alike = match([*before(), *lost], [*after(), *lost])
        assert (as_json(alike, None)["unit"], "before tokens/s" in shown(alike)) == ("tokens", True)
