"""The workload ``check`` and the check before a training run: what they leave, and that unsound is no success.

The tolerance of the runs that must be sound is so wide that no busy machine exceeds it.
"""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ptdbench.measure import contention
from ptdbench.measure.results import OtherLoad
from ptdbench.workloads import check
from ptdbench.workloads.check import Check
from ptdbench.workloads.train import Train
from tests import forked
from tests.conftest import ROOT, composed
from tests.workloads.made_job import job, refusal

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
        assert json.loads((ROOT / record["directory"] / "check.json").read_text()) == report

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


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_training_run_goes_on_after_its_check(shared_run):
    toy = ("model=toy", "train.steps=3", "device=cpu", "cluster.ranks_per_node=2")
    record = shared_run(*toy, "check=true")
    assert (record["status"], len(record["losses"])) == ("ok", 3)
    assert record["losses"] == shared_run(*toy)["losses"]  # it draws from no generator of the training's
    report = record["check"]
    assert len(report["matmul"]["ranks"]) == 2
    assert ("check" in record["remarks"]) == (not report["sound"])
    assert record["metrics"]["startup_seconds"]["check"] > 0


@pytest.mark.parametrize(("option", "values", "rule"), [
    ("tolerance", ["0", "1", "-0.1", "5"], "must be between 0 and 1, a fraction of the median; 0.05 is 5 %"),
    ("attempts", ["0"], "must be a whole number of at least 1"),
])  # fmt: skip
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
    monkeypatch.setattr(contention, "Watch", lambda _: SimpleNamespace(stop=lambda: []))
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


def verdict(name: str, busy: str | None, *texts: str) -> Any:
    findings = [SimpleNamespace(text=text) for text in texts]
    return SimpleNamespace(sound=name == "sound", verdict=name, busy=busy, findings=findings)


UNSOUND = verdict("unsound", None, "rank 1 is slow", "torch differs")


def test_the_summary_names_other_load_first():
    assert check.summary(UNSOUND) == "unsound: rank 1 is slow; torch differs"
    busy = verdict("busy", "others took 1 core", "rank 1 is slow")
    assert check.summary(busy) == "busy: others took 1 core; rank 1 is slow"


@pytest.mark.ranks
@pytest.mark.parametrize("found", [UNSOUND, verdict("sound", None), None])
def test_the_verdict_is_a_remark_beside_those_of_the_training(alone, tmp_path, monkeypatch, found):
    monkeypatch.setattr(check, "preliminary", lambda _: found)
    short = ("model=toy", "device=cpu", "parallel=single", "train.steps=5", "train.max_minutes=1e-9", "profile.steps=0")
    outcome = Train()(job(tmp_path, composed(*short)))
    assert outcome.check is found
    assert outcome.remarks.check == ("unsound: rank 1 is slow; torch differs" if found is UNSOUND else None)
    assert outcome.remarks.cut_short.startswith("3 of 5 steps: ")


def test_it_is_said_at_once_on_rank_0(monkeypatch, capsys):
    monkeypatch.setattr(Check, "examine", lambda self, job: UNSOUND)
    for rank, said in ((0, "unsound: rank 1 is slow; torch differs; the run continues\n"), (1, "")):
        of_rank = SimpleNamespace(
            spec=SimpleNamespace(config=SimpleNamespace(general=SimpleNamespace(check=True))),
            watch=SimpleNamespace(lap=lambda name: None),
            world=SimpleNamespace(is_first=rank == 0), device=torch.device("cpu"),
        )  # fmt: skip
        assert check.preliminary(of_rank) is UNSOUND
        assert capsys.readouterr().err == said
