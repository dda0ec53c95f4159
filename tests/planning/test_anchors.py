"""Anchors: runs that set the level of predicted steps, and runs that cannot."""

import math

import pytest
import torch

from ptdbench.planning import anchors, measured, plans
from ptdbench.planning.anchors import Anchor
from ptdbench.problems import ConfigError
from ptdbench.records.store import write_record
from tests.report.made import made

WORDS = ("model=toy", "cluster.ranks_per_node=2", "precision=bf16")
(PLAN,) = plans.composed([*WORDS, "virtual=h200"]).configs

MEASURED = made({
    "model": "toy", "precision": "bf16", "kernels": "fused", "nodes": ["a"], "world_size": 2,
    "environment": {"devices": ["NVIDIA H200"], "torch": "2.14"}, "metrics": {"samples_per_second": 100.0},
    "layout": {"micro_batch": 4}, "config": {name: of for name, of in PLAN.resolved.items() if name != "virtual"},
})  # fmt: skip

STEP = {"step_seconds": 0.1, "tokens_per_second": None, "samples_per_second": 110.0, "mfu": 0.5, "phases": None}
FIELDS = {"environment": {"torch": "2.14"}, "predicted": {**STEP, "parts": {"products": 0.1}}}


def read(folder, run):
    write_record(folder, run.written)
    return anchors.read([folder], [PLAN])


def test_a_measured_run_is_planned_as_it_ran(tmp_path):
    (anchor,) = read(tmp_path, MEASURED)
    planned = anchor.config
    assert (planned.resolved["virtual"]["name"], planned.resolved["train"]["micro_batch"]) == ("h200", 4)
    assert (planned.cluster.nodes, planned.cluster.ranks_per_node) == (1, 2)
    assert anchor.level(FIELDS) == pytest.approx(1.1)
    with pytest.raises(ConfigError, match="its step cannot be predicted: no costs"):
        anchor.level({"predicted": {"reason": "no costs"}})


@pytest.mark.parametrize(("changes", "reason"), [
    ({"kind": "virtual"}, "it is virtual: an anchor is measured"),
    ({"status": "failed"}, "it has no throughput: failed"),
    ({"nodes": ["a", "b"]}, "it ran on several nodes"),
    ({"environment": {"devices": ["NVIDIA L4"]}}, "it was measured on NVIDIA L4, and the plan is for NVIDIA H200"),
    ({"precision": "fp32"}, "its precision is fp32, and the plan's bf16"),
    ({"hardware": {"clocks": [{"rank": 0, "power_limit_watts": 500.0}]}},
     "the power limit of its GPUs is 500 W, and the plan's 700 W; try virtual.gpu.power=500"),
])  # fmt: skip
def test_what_sets_no_level_is_refused(tmp_path, changes, reason):
    with pytest.raises(ConfigError, match=f"--anchor={tmp_path}: {reason}"):
        read(tmp_path, MEASURED | changes)


@pytest.mark.parametrize(("changes", "count"), [
    ({}, 1),
    ({"hardware": None}, 0),  # an unknown power limit
    ({"hardware": {"clocks": [{"rank": 0, "power_limit_watts": 600.0}]}}, 0),
    ({"environment": {"devices": ["NVIDIA H200"], "torch": "2.8"}}, 0),
    ({"precision": "fp32"}, 0),
])  # fmt: skip
def test_cached_runs_of_the_same_device_torch_and_power_limit_are_anchors(cache, changes, count):
    environment = {"devices": ["NVIDIA H200"], "torch": torch.__version__}
    hardware = {"clocks": [{"rank": 0, "power_limit_watts": 700.0}]}
    measured.keep(MEASURED | {"environment": environment, "hardware": hardware, **changes})
    several_nodes = plans.composed([*WORDS, "virtual=h200", "cluster.nodes=2"]).configs
    assert len(anchors.cached([PLAN])) == count
    assert anchors.cached(several_nodes) == []  # whose steps have no predicted time


@pytest.mark.parametrize(("changes", "levels", "level", "deviation", "doubt"), [
    ({}, [1.1], 1.1, math.sqrt(2) * 0.0225, ""),
    ({}, [1.0, 1.21], 1.1, math.sqrt((2 * 0.0225**2 + 2 * math.log(1.1) ** 2) / 3 * 1.5), ""),
    ({"kernels": "torch"}, [1.1], 1.1, math.hypot(math.sqrt(2) * 0.0225, 0.04), " (kernels=torch, so the in"),
    ({"environment": {"devices": ["NVIDIA H200"], "torch": "2.8"}}, [1.1], 1.1,
     math.hypot(math.sqrt(2) * 0.0225, 0.02), " (torch 2.8, so the in"),
])  # fmt: skip
def test_levels_and_their_spread_are_those_of_logarithms(changes, levels, level, deviation, doubt):
    anchor = Anchor(MEASURED | changes, PLAN)
    step = anchors.applied(FIELDS, PLAN, [(anchor, figure) for figure in levels])["predicted"]
    assert step["step_seconds"] == pytest.approx(0.1 * level) == step["parts"]["products"]
    assert (step["samples_per_second"], step["mfu"]) == pytest.approx((110 / level, 0.5 / level))
    assert step["high"] / step["step_seconds"] == pytest.approx(math.exp(1.96 * deviation))
    assert step["anchor"].startswith(f"outputs/a{doubt}")
    (other,) = plans.composed([*WORDS, "virtual=h100"]).configs
    assert anchors.applied(FIELDS, other, [(anchor, 1.1)]) == FIELDS
