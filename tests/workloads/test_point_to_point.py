"""The workload ``p2p``: what it measures, checks and refuses."""

from types import SimpleNamespace

import pytest
import torch

from ptdbench.launch.world import World
from ptdbench.measure import timing
from ptdbench.problems import ConfigError
from ptdbench.workloads import collectives, point_to_point
from ptdbench.workloads.collectives import Collectives
from ptdbench.workloads.point_to_point import PointToPoint, ordered_pairs
from tests.conftest import composed
from tests.daily import cases
from tests.workloads.made_job import refusal

QUICK = (
    "workload.seconds=0.0001", "workload.min_repetitions=2", "workload.warmup=1", "workload.max_seconds=60",
    "workload.max_bytes=65536", "workload.factor=8",
)  # fmt: skip


@pytest.mark.ranks
@cases("ranks", [2, 3], daily=[3])
def test_every_pair_is_measured(shared_run, ranks):
    record = shared_run("workload=p2p", "device=cpu", f"cluster.ranks_per_node={ranks}", *QUICK)
    assert (record["status"], record["error"]) == ("ok", None)
    links = record["p2p"]
    pairs = [(pair["source"], pair["target"]) for pair in links["pairs"]]
    assert pairs == [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    for pair in links["pairs"]:
        assert [size["bytes"] for size in pair["sizes"]] == [8, 64, 512, 4096, 32768, 65536]
        assert pair["latency"] > 0
        assert pair["bandwidth"] == pair["sizes"][-1]["bandwidth"]
        for size in pair["sizes"]:
            median = size["seconds"]["median"]
            assert size["one_way"] == pytest.approx(max(median - pair["latency"], median / 2))
            assert size["bandwidth"] == pytest.approx(size["bytes"] / size["one_way"])


def test_pairs():
    assert list(ordered_pairs(3, ring=False)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert list(ordered_pairs(3, ring=True)) == [(0, 1), (1, 2), (2, 0)]


@pytest.mark.ranks
def test_a_message_that_arrives_wrong_is_a_failed_run_that_names_it(run):
    target = "workload._target_=tests.workloads.wrong.WrongReceive"
    record = run("workload=p2p", target, "device=cpu", "workload.max_bytes=4096")
    assert record["status"] == "failed"
    error = record["error"]
    assert (error["rank"], error["type"]) == (1, "ArithmeticError")
    assert error["message"].startswith("1024 bytes from rank 0 to rank 1: rank 1 has 0 at element 1023 instead of ")


@pytest.mark.parametrize(("overrides", "message"), [
    (["cluster.ranks_per_node=1"], "workload=p2p: needs at least two ranks; try cluster."),
    (["workload.pairs=some"], "workload.pairs=some: must be all or ring; try all, ring"),
    (["workload.max_bytes=0"], "workload.max_bytes=0: must be a whole number of at least 1"),
])  # fmt: skip
def test_bad_input_is_refused_before_any_rank_starts(overrides, message):
    assert refusal("workload=p2p", "device=cpu", *overrides).startswith(message)


@pytest.mark.parametrize(
    ("workload", "options"),
    [(point_to_point, PointToPoint(max_bytes=2**50)), (collectives, Collectives(max_bytes=2**50))],
)
def test_too_much_memory_is_refused(monkeypatch, workload, options):
    monkeypatch.setattr(timing, "gather", lambda told: [told])
    job = SimpleNamespace(device=torch.device("cpu"), world=World(0, 2, 0, 2, "local"))
    with pytest.raises(ConfigError, match=rf"^workload\.max_bytes={2**50}: needs 4.19e\+06 GiB per rank"):
        workload.measure(job, options)


@pytest.mark.parametrize(("name", "made"), [("p2p", PointToPoint()), ("collectives", Collectives())])
def test_the_options_and_their_defaults_are_said_twice_and_alike(name, made):
    options = composed(f"workload={name}").workload
    assert type(made)(**{key: options[key] for key in options if key not in ("name", "label", "_target_")}) == made
