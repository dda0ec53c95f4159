"""What is said of runs on GPUs that are not there."""

from __future__ import annotations

from ptdbench.report import virtual
from ptdbench.report.remarks import reason
from ptdbench.report.table import render
from tests.report.made import run

GIB = 2**30
RUN = {
    "kind": "virtual",
    "status": "ok",
    "world_size": 256,
    "virtual": {
        "device": "virtual NVIDIA H200",
        "ranks": [0, 131],
        "allocated_bytes": [3 * GIB, 2 * GIB],
        "reserved_bytes": [4 * GIB, 3 * GIB],
        "context_bytes": GIB // 2,
        "communicators": [3, 3],
        "host_seconds": [0.012, 0.034],
        "kernels": {"product": [10, 8], "copy": [0, 2]},
        "messages": {
            "all_gather": {"calls": 4.0, "bytes": 1000.0, "formula_bytes": 1000.0},
            "send": {"calls": 2.0, "bytes": None, "formula_bytes": None},
        },
        "reason": None,
    },
    "memory": {"ranks": {"weights": [GIB, GIB], "activations": [2 * GIB, GIB]}},
}


def test_one_run_is_explained_by_its_ranks_kernels_and_messages():
    lines = virtual.explained(RUN, "fsdp", 140).splitlines()
    assert lines[0] == "fsdp on virtual NVIDIA H200, ranks 0, 131 of 256"
    assert lines[3].split() == ["0", "3", "GiB", "4", "GiB", "1", "GiB", "2", "GiB"]
    assert "kernels of a step on rank 0: 10: 10 product" in lines
    assert lines[-3].split() == ["all_gather", "4", "1,000", "1,000"]
    assert lines[-2].split() == ["send", "2", "-", "-"]
    assert lines[-1] == "the host launched a step in 34 ms, beside the other ranks on this machine"


def test_experts_in_turn_are_told():
    of_experts = {**RUN, "config": {"model": {"router": {"balance": "loss"}}}}
    told = "experts take turns by position, as with model.router.balance=forced"
    assert told in virtual.explained(of_experts, "ep", 140)
    assert sum(told in line for line in virtual.remarks([of_experts, of_experts, RUN])) == 1
    assert told not in virtual.explained(RUN, "fsdp", 140)


def test_what_came_to_its_end_without_a_throughput_gives_no_reason():
    ended = [run(name, kind=kind, metrics=None) for name, kind in (("ddp", "virtual"), ("fsdp", "planned"))]
    assert "no reason on record" not in render(ended)
    assert "ddp: ok: no reason on record" in render([run(metrics=None)])


def test_why_kernels_are_not_known_stands_in_their_place():
    found = virtual.explained({**RUN, "virtual": {**RUN["virtual"], "reason": "profile.steps=0"}}, "fsdp", 140)
    assert "no kernels and no messages: profile.steps=0" in found
    assert "all_gather" not in found


def test_a_rank_that_fails_may_have_decided_by_values():
    error = {"rank": 1, "type": "AssertionError", "message": "no expert was chosen", "traceback": ""}
    failed = {"status": "failed", "directory": "outputs/a", "error": error}
    assert reason(failed) == "failed on rank 1: AssertionError: no expert was chosen"
    assert reason({**failed, "kind": "virtual"}).endswith(
        "; virtual GPUs compute nothing, and what decides by the values of tensors fails there"
    )
    refused = {**error, "rank": -1, "type": "ConfigError", "message": "precision=fp8: no"}
    assert reason({**failed, "kind": "virtual", "error": refused}) == "failed: ConfigError: precision=fp8: no"
