"""The workload ``check``: what it leaves, and that unsound is no success.

The tolerance of the runs that must be sound is so wide that no busy machine exceeds it.
"""

import json
import re
from types import SimpleNamespace

import pytest
from msgspec.structs import asdict, replace

from ptdbench.measure import node_state
from ptdbench.measure.node_state import Gpu
from ptdbench.measure.results import Finding, OtherLoad
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
        ("tolerance", ["0", "1", "-0.1", "5"], "must be between 0 and 1, a fraction of the median; 0.05 is 5%"),
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


UNKNOWN = Gpu(*[None] * len(Gpu.__struct_fields__))
GPU = replace(
    UNKNOWN, throttles=[], temperature_celsius=60, processes=1, power_limit_watts=700.0,
    power_limit_default_watts=700.0, near_cores=[0, 1, 2, 3],
)  # fmt: skip


@pytest.mark.parametrize(("rates", "expected"), [
    ({0: 100.0, 1: 100.0, 2: 94.0, 3: 100.0}, {2: 0.94}),  # below the median of the others
    ({0: 100.0, 1: 96.0, 2: 95.0, 3: 100.0}, {}),  # within the tolerance
    ({0: 100.0, 1: 90.0}, {1: 0.9}),
    ({0: 100.0, 1: 100.0, 2: 300.0}, {}),  # faster than all is no fault
    ({0: 1.0}, {}),  # one alone has no peers
])  # fmt: skip
def test_slow_is_what_is_below_the_median_of_its_peers(rates, expected):
    assert check.slow_rates(rates, dict.fromkeys(rates, "all"), 0.05) == pytest.approx(expected)


def test_only_peers_count_and_of_all_attempts_the_best():
    rates = {"a": 900.0, "b": 890.0, "c": 20.0, "d": 10.0}
    peers = {"a": "near", "b": "near", "c": "far", "d": "far"}
    assert check.slow_rates(rates, peers, 0.05) == {"d": pytest.approx(0.5)}
    assert check.slow_rates(rates, peers, 0.6) == {}
    assert check.best_rates([{0: 5.0, 1: 9.0}, {0: 7.0, 1: 8.0}, {0: 6.0}]) == {0: 7.0, 1: 9.0}


def test_slow_ones_are_named_with_their_share_and_marked_if_other_load_may_have_slowed_them():
    rank, loaded = check.slow_ranks({("bf16", 3): 0.9, ("bf16", 4): 0.9}, 5, {4})
    text = "rank 3 reaches 90.0% of its peers' median in bf16 products, best of 5"
    assert (rank, loaded.beside_load) == (Finding("slow rank", [3], text), True)
    link, *others = check.slow_links({(1, 2): 0.0001, (3, 4): 0.9, (4, 3): 0.9}, 2, {4})
    text = "rank 1 sends to rank 2 at less than 0.1% of the median of similar links, best of 2"
    assert link == Finding("slow link", [1, 2], text)
    assert [other.beside_load for other in others] == [True, True]


def test_the_verdict_and_versions_that_differ():
    """Busy is what other load may have caused, and nothing else."""
    slow = Finding("slow rank", [1], "slow", beside_load=True)
    shared = [*check.gpu_troubles(0, replace(GPU, processes=2), 1, [0])]
    findings = ([], [slow, slow], [slow, Finding("versions", [1], "")], shared)
    assert [check.verdict_on(of_ranks) for of_ranks in findings] == ["sound", "busy", "unsound", "busy"]
    same = {"torch": "2.15.0", "python": "3.11.7", "driver": "550.54", "host": "n1"}
    (finding,) = check.different_versions([same, {**same, "host": "n2"}, {**same, "driver": None, "host": "n3"}])
    assert finding == Finding("versions", [2], "driver differs: 550.54 on ranks 0, 1, None on rank 2")


@pytest.mark.parametrize(("changes", "users", "cores", "kind", "text"), [
    (
        {"throttles": ["too hot (hardware)"]}, 1, (2, 3), "throttled",
        "the GPU of rank 4 is throttled: too hot (hardware), at 60 °C",
    ),
    ({"processes": 3}, 1, (2, 3), "busy", "the GPU of rank 4 is used by 2 other processes"),
    (
        {"power_limit_watts": 500.0}, 1, (2, 3), "power limit",
        "the GPU of rank 4 is limited to 500 W, below the default 700 W",
    ),
    ({}, 1, (8, 9), "far cores", "rank 4 cannot run on any core near its GPU"),
    ({}, 1, (2, 3), None, None),
    ({"processes": 2}, 2, (2, 3), None, None),
    (asdict(UNKNOWN), 1, (2, 3), None, None),
])  # fmt: skip
def test_troubles_of_a_gpu(changes, users, cores, kind, text):
    findings = [
        (finding.kind, finding.text) for finding in check.gpu_troubles(4, replace(GPU, **changes), users, cores)
    ]
    assert findings == ([(kind, text)] if kind else [])
