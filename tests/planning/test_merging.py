"""One record of ranks that were carried out a few at a time."""

from typing import Any

from ptdbench.planning.classes import merged


def part(ranks: list[int], messages: dict[str, Any], kinds: dict[str, list[int]]) -> dict[str, Any]:
    of_each = {name: [10 * rank for rank in ranks] for name in ("allocated_bytes", "reserved_bytes", "communicators")}
    return {
        "status": "ok",
        "virtual": {
            "ranks": ranks, **of_each, "host_seconds": [0.1 for _ in ranks], "reason": None, "messages": messages,
            "kernels": {"product": list(ranks)},
        },
        "memory": {"reason": None, "ranks": kinds, "moments": ["forward" for _ in ranks], "pass_seconds": 1.0},
        "metrics": {"peak_memory_bytes": max(ranks), "peak_reserved_bytes": 2 * max(ranks)},
    }  # fmt: skip


def test_lists_go_on_and_each_rank_counts_for_those_that_it_stands_for() -> None:
    send = {"send": {"calls": 3.0, "bytes": 30.0, "formula_bytes": 40.0}}
    both = send | {"recv": {"calls": 1.0, "bytes": None, "formula_bytes": None}}
    parts = [part([0, 1], send, {"weights": [5, 6]}), part([2], both, {"weights": [7], "other": [8]})]
    found = merged(parts, {0: 1, 1: 1, 2: 6})
    assert found["virtual"]["ranks"] == [0, 1, 2]
    assert found["virtual"]["reserved_bytes"] == [0, 10, 20]
    assert found["virtual"]["kernels"] == {"product": [0, 1, 2]}
    assert found["virtual"]["messages"] == {
        "send": {"calls": 3.0, "bytes": 30.0, "formula_bytes": 40.0},
        "recv": {"calls": 6 / 8, "bytes": None, "formula_bytes": None},
    }
    assert found["memory"]["ranks"] == {"weights": [5, 6, 7], "other": [0, 0, 8]}
    assert found["metrics"] == {"peak_memory_bytes": 2, "peak_reserved_bytes": 4}


def test_what_no_rank_has_looked_at_stays_unknown() -> None:
    """A try of a plan takes no step to look at the host."""
    tries = [part([rank], {}, {"weights": [5]}) for rank in (0, 1)]
    for one in tries:
        one["virtual"]["host_seconds"] = None
    found = merged(tries, {0: 1, 1: 1})["virtual"]
    assert found["ranks"] == [0, 1]
    assert found["host_seconds"] is None
