"""The groups of weights that FSDP gathers, by the messages of a step, in their order."""

import re
from functools import partial
from typing import Any

import pytest

from ptdbench.models.gpt import GPT
from ptdbench.models.llama import Llama
from ptdbench.parallel.strategy import Strategy
from tests.daily import cases, selected
from tests.parallel.made import calls_of, data, laid_out, on_meta, unscaled
from tests.parallel.ranks import each, on_ranks

SHAPE = {"layers": 3, "heads": 2, "width": 16, "sequence_length": 8, "vocabulary": 40}


class OneModule(Llama):
    """A model whose head projects by the embedding itself, so that their weight has one name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head.projection = self.embedding.token


UNTIED = partial(Llama, key_value_heads=2, hidden=24, **SHAPE)
TIED = partial(GPT, **SHAPE)

#: By name: the model, options of FSDP, and what is gathered and reduced in a step of two passes; the root is "".
CASES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    # The head and the last layer are what the backward pass begins with, and it needs no rows of the embedding.
    "untied": (UNTIED, {}, "embedding 0 1 2 head 1 0 " * 2, "head 2 1 0 embedding"),
    "untied, kept": (UNTIED, {"reshard_after_forward": False}, "embedding 0 1 2 head", "head 2 1 0 embedding"),
    "untied, reduced each": (UNTIED, {"reduce_scatter_each_microbatch": True},
                             "embedding 0 1 2 head 1 0 " * 2, "head 2 1 0 embedding " * 2),
    # One weight is in one group: the root has it.
    "tied": (TIED, {}, "root 0 1 2 1 0 " * 2, "2 1 0 root"),
    "tied, one module": (partial(OneModule, key_value_heads=2, hidden=24, **SHAPE), {},
                         "root 0 1 2 1 0 " * 2, "2 1 0 root"),
}  # fmt: skip


def messages(name: str) -> dict[str, list[str]]:
    """In a rank: the modules whose weights are gathered in a step, and those whose gradients are reduced."""
    make, options, *_ = CASES[name]
    engine, layout, _ = laid_out(Strategy(shard="auto", **options), on_meta(make), 4, 1)

    def step() -> None:
        engine.gradients(*data().samples(0, layout.replica_batch), unscaled)
        engine.module.zero_grad()

    step()
    modules: dict[str, list[str]] = {"all_gather": [], "reduce_scatter": []}
    for call in calls_of(step):
        (label,) = [name for name in call.within if re.match(r"FSDP::(all_gather|post_backward_reduce)\b", name)]
        module = label.partition("(")[2].rstrip(")") or "root"
        modules[call.operation].append(module.removeprefix("blocks."))
    return modules


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, list[str]]]]:
    return on_ranks(2, each, messages, sorted(selected(request, "name")))


@pytest.mark.ranks
@cases("name", CASES, daily=["untied", "untied, kept", "untied, reduced each", "tied"])
def test_fsdp_gathers_late_and_rarely(of_ranks, name):
    *_, gathered, reduced = CASES[name]
    for of_rank in of_ranks:
        assert of_rank[name]["all_gather"] == gathered.split()
        assert of_rank[name]["reduce_scatter"] == reduced.split()
