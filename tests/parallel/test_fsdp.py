"""The groups of weights that FSDP gathers, by the messages of a step, in their order."""

from __future__ import annotations

import re
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import record_function

from ptdbench.data.synthetic import SyntheticTokens
from ptdbench.models.gpt import GPT
from ptdbench.models.llama import Llama
from ptdbench.parallel.apply import Setting
from ptdbench.parallel.strategy import Strategy
from ptdbench.profiling import trace
from ptdbench.training.profile import profiled
from tests.daily import cases, selected
from tests.parallel.ranks import mesh_of, on_ranks

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
    "untied, kept between": (UNTIED, {"reshard_between_microbatches": False},
                             "embedding 0 1 2 head 1 0 1 0", "head 2 1 0 embedding"),
    # One weight is in one group: the root has it.
    "tied": (TIED, {}, "root 0 1 2 1 0 " * 2, "2 1 0 root"),
    "tied, one module": (partial(OneModule, key_value_heads=2, hidden=24, **SHAPE), {},
                         "root 0 1 2 1 0 " * 2, "2 1 0 root"),
}  # fmt: skip


def messages(make: Any, options: dict[str, Any]) -> dict[str, list[str]]:
    """In a rank: the modules whose weights are gathered in a step, and those whose gradients are reduced."""
    with torch.device("meta"):
        model = make()
    strategy, device = Strategy(shard="auto", **options), torch.device("cpu")
    layout = strategy.layout(strategy.dims(2), 4, 1)
    engine = strategy(model, Setting(mesh_of(layout.dims), layout, device))
    data = SyntheticTokens(sequence_length=8, vocabulary=40, seed=0)

    def step() -> None:
        engine.gradients(*data.samples(0, layout.replica_batch), lambda loss: loss)
        engine.module.zero_grad()

    step()
    with tempfile.TemporaryDirectory() as folder:
        with profiled(device) as taken, record_function(trace.STEP):
            step()
        taken.export_chrome_trace(f"{folder}/trace.json")
        calls = trace.read(Path(folder) / "trace.json").calls
    found: dict[str, list[str]] = {"all_gather": [], "reduce_scatter": []}
    for call in calls:
        (label,) = [name for name in call.within if re.match(r"FSDP::(all_gather|post_backward_reduce)\b", name)]
        module = label.partition("(")[2].rstrip(")") or "root"
        found[call.operation].append(module.removeprefix("blocks."))
    return found


def of_cases(names: set[str]) -> dict[str, dict[str, list[str]]]:
    return {name: messages(make, options) for name, (make, options, *_) in CASES.items() if name in names}


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, list[str]]]]:
    return on_ranks(2, of_cases, selected(request, "name"))


@pytest.mark.ranks
@cases("name", CASES, daily=["untied", "tied"])
def test_weights_are_gathered_as_late_as_they_can_and_no_more_often_than_needed(of_ranks, name):
    *_, gathered, reduced = CASES[name]
    for of_rank in of_ranks:
        assert of_rank[name]["all_gather"] == gathered.split()
        assert of_rank[name]["reduce_scatter"] == reduced.split()


def warned_of() -> list[str]:
    """In a rank: what torch warns of where it shards the rows of a table that tensor parallelism cuts, too."""
    with torch.device("meta"):
        model = UNTIED()
    strategy = Strategy(shard="auto", tensor=2)
    layout = strategy.layout(strategy.dims(4), 4, 2)
    with warnings.catch_warnings(record=True) as warned:
        engine = strategy(model, Setting(mesh_of(layout.dims), layout, torch.device("cpu")))
        data = SyntheticTokens(sequence_length=8, vocabulary=40, seed=0)
        engine.gradients(*data.samples(0, layout.replica_batch), lambda loss: loss)
    return [str(one.message) for one in warned]


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_user_is_not_warned_of_what_is_done_for_them():
    assert on_ranks(4, warned_of) == [[]] * 4
