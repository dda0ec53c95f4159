"""The workload ``check``: what it leaves, and that unsound is no success.

The tolerance of the runs that must be sound is so wide that no busy machine exceeds it.
"""

import json
import re
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ptdbench.measure import node_state
from ptdbench.measure.results import OtherLoad
from ptdbench.workloads import check
from ptdbench.workloads.check import Check
from tests import forked
from tests.workloads.made_job import refusal

WIDE = ("workload=check", "device=cpu", "workload.tolerance=0.9999")
MADE = "workload._target_=tests.workloads.made_slow"
SLOW = (f"{MADE}.MadeSlow", "workload.attempts=2")


@pytest.mark.ranks
class TestRun:
    def test_sound_ranks(self, shared_run):
        ranks = 3
        record = shared_run(*WIDE, f"cluster.ranks_per_node={ranks}")
        assert (record["status"], record["error"]) == ("ok", None)
        report = record["check"]
        assert (report["sound"], report["findings"], report["tolerance"]) == (True, [], 0.9999)
        assert len(report["hello"]["ranks"]) == len(report["matmul"]["ranks"]) == ranks
        assert len(report["p2p"]["pairs"]) == ranks * (ranks - 1)
        assert {row["op"] for row in report["collectives"]["results"]} == {"all_reduce", "all_gather", "broadcast"}
        assert report["versions"]["torch"] == record["environment"]["torch"]

    def test_a_slow_rank_is_named_the_run_has_failed_and_a_person_reads_it(self, tmp_path, environ):
        asked = (*WIDE, *SLOW, "cluster.ranks_per_node=3", "hydra.run.dir=run")
        done = forked.with_ranks(*asked, cwd=tmp_path, environ={**environ, "COLUMNS": "120"})
        assert done.returncode == 1, done.stderr
        record = json.loads((tmp_path / "run" / "record.json").read_text())
        assert (record["status"], record["error"]["type"]) == ("failed", "Unsound")
        report = record["check"]
        assert (report["sound"], report["verdict"], report["busy"]) == (False, "unsound", None)
        assert report["attempts"]["matmul"] == 2
        assert {(finding["kind"], *finding["ranks"]) for finding in report["findings"]} == {("slow rank", 2)}
        assert "rank 2 reaches less than 0.1% of its peers' median in fp32 products" in record["error"]["message"]
        assert "verdict       unsound, 2 findings" in done.stdout
        assert "  - rank 2 reaches less than 0.1% of its peers' median in bf16 products, best of 2" in done.stdout

    @pytest.mark.thorough
    def test_beside_other_processes_it_is_busy_which_is_no_success_either(self, shared_run):
        record = shared_run(*WIDE, f"{MADE}.MadeBusy", "workload.attempts=1", "cluster.ranks_per_node=2")
        assert (record["status"], record["error"]["type"]) == ("failed", "Busy")
        report = record["check"]
        assert (report["sound"], report["verdict"]) == (False, "busy")
        assert {(finding["kind"], finding["beside_load"]) for finding in report["findings"]} == {("slow rank", True)}
        assert re.fullmatch(r"other processes took \d+.\d of 2 cores; measure again on a quiet machine", report["busy"])
        assert record["error"]["message"].startswith(f"{report['busy']}; rank 1 reaches less than 0.1% of its peers'")
        assert record["check"]["other_load"]["matmul"][0]["taken"] > 2

    def test_a_wrong_result_is_an_error_beside_other_processes_too(self, shared_run):
        record = shared_run(*WIDE, f"{MADE}.MadeWrong", "cluster.ranks_per_node=2")
        assert (record["status"], record["error"]["type"]) == ("failed", "ArithmeticError")


@pytest.mark.parametrize(
    ("option", "values", "rule"),
    [
        ("tolerance", ["0", "1", "-0.1", "5"], "must be between 0 and 1, a fraction of the median; 0.05 is 5 %"),
        ("attempts", ["0"], "must be a whole number of at least 1"),
    ],
)
def test_what_is_refused(option, values, rule):
    for value in values:
        said = refusal("workload=check", "device=cpu", f"workload.{option}={value}")
        assert said == f"workload.{option}={value}: {rule}"


@pytest.mark.parametrize(("rounds", "slow", "attempts"), [
    (({0: 10.0, 1: 10.0}, {0: 1.0, 1: 10.0}), {}, 1),  # sound at once
    (({0: 10.0, 1: 6.0}, {0: 6.0, 1: 9.9}, {0: 1.0, 1: 1.0}), {}, 2),  # a disturbance
    (({0: 10.0, 1: 6.0}, {0: 10.0, 1: 8.0}, {0: 9.0, 1: 7.0}), {1: pytest.approx(0.8)}, 3),
    ((None,), {}, 1),  # one rank has no links
])  # fmt: skip
def test_slow_is_measured_again_and_named_after_the_last_attempt(monkeypatch, rounds, slow, attempts):
    monkeypatch.setattr(node_state, "LoadWatch", lambda _: SimpleNamespace(stop=lambda: []))
    left = iter(rounds)
    outcome = Check(attempts=3)._until_sound(
        SimpleNamespace(device=None), lambda: next(left), lambda rates: (rates or {}, dict.fromkeys(rates or {}, "all"))
    )
    assert (outcome.first, outcome.slow, outcome.attempts) == (rounds[0], slow, attempts)
    assert len([*left]) == len(rounds) - attempts


def test_ranks_beside_other_load():
    facts = [check._Facts(node) for node in ("n1", "n1", "n2")]
    quiet, loaded = OtherLoad("n1", 2, 0.0, [], on_gpu=False), OtherLoad("n2", 2, 1.14, [], on_gpu=False)
    assert check._loaded(facts, [quiet, loaded]) == {2}
    # On GPUs those whose GPUs are shared.
    assert check._loaded(facts, [replace(quiet, on_gpu=True, gpu_ranks=[1]), replace(loaded, on_gpu=True)]) == {1}

    text, again = "other processes took 1.1 of 2 cores", "measure again on a quiet machine"
    assert check._why_busy([loaded]) == f"{text}; {again}"
    assert check._why_busy([quiet, loaded]) == f"{text} of node n2; {again}"
