"""Which ranks are carried out, for how many each stands, and one record of ranks that were carried out in turn."""

from typing import Any

import pytest

from ptdbench.planning.classes import classes, merged
from ptdbench.setup import run_spec
from tests.conftest import read

#: A model whose weights can be cut evenly into 2, 4 and 8.
EVEN = ("model=llama_tiny", "virtual=h100", "data=synthetic_tokens", "train.global_batch=64")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("parallel=ddp cluster.ranks_per_node=8", {0: 8}),
        ("parallel=fsdp cluster.ranks_per_node=8", {0: 8}),
        ("parallel=tp parallel.tensor=2 cluster.ranks_per_node=8", {0: 8}),
        ("parallel=fsdp model.vocabulary=257 cluster.ranks_per_node=8", {0: 7, 7: 1}),
        ("parallel=hsdp parallel.shard=4 model.vocabulary=257 cluster.ranks_per_node=8", {0: 6, 3: 2}),
        ("parallel=pdp parallel.pipeline=2 cluster.ranks_per_node=8", {0: 4, 1: 4}),
        ("parallel=3d parallel.tensor=2 parallel.pipeline=2 cluster.ranks_per_node=8", {0: 4, 4: 4}),
        ("parallel=pdp parallel.pipeline=8 model.layers=8 cluster.ranks_per_node=8", {0: 1, 1: 5, 6: 1, 7: 1}),
        (  # activations are largest in the stages with fewest weights
            "model=resnet50 data=synthetic_images parallel=pdp parallel.pipeline=6 cluster.ranks_per_node=6",
            dict.fromkeys(range(6), 1),
        ),
        # Two have the state of weights of the same shapes.
        ("parallel=ddp parallel.optimizer=zero1 cluster.ranks_per_node=4", {0: 1, 1: 1, 2: 2}),
        ("parallel=ddp parallel.optimizer=zero1 parallel.context=2 cluster.ranks_per_node=4", {0: 1, 1: 1, 2: 2}),
    ],
)
def test_one_rank_of_each_class(words: str, expected: dict[int, int]) -> None:
    training = run_spec.specify(read(*EVEN, *words.split()), None).training
    found = classes(training)
    assert found == expected
    assert sum(found.values()) == training.layout.dims.world_size


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
