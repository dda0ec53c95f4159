"""Training state as it is foreseen, without ranks; what they really hold: ``test_traffic.py``."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ptdbench.models.foreign import adapt
from ptdbench.models.gpt import GPT
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.footprint import StateBytes, footprints
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError
from tests.parallel.made import gpt, on_meta

ADAMW = partial(torch.optim.AdamW, fused=True)


def uneven() -> GPT:
    """No number is a multiple of four shards, nor its half of two."""
    return gpt(heads=2, width=14, sequence_length=6, vocabulary=42)


def test_replicas_divide_the_state():
    strategy = Strategy(replicate="auto", optimizer="zero1")
    (whole,), (divided,) = (
        footprints(uneven(), ADAMW, options, strategy.dims(4)) for options in (Strategy(), strategy)
    )
    assert whole.optimizer / 4 < divided.optimizer < whole.optimizer / 3


def test_only_fused_kernels_keep_narrow_copies():
    (wide,), (fused,), (plain,) = (
        footprints(uneven(), ADAMW, precision=precision, kernels=kernels)
        for precision, kernels in (("fp32", "fused"), ("bf16", "fused"), ("bf16", "torch"))
    )
    assert plain == wide
    assert fused.weights == wide.weights * 3 // 2


def test_footprint_of_a_users_stages():
    """Its parts are pieces, which hold none themselves."""
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model = adapt(module, lambda: (torch.empty(1, 6, device="meta"), torch.empty(1, 4, device="meta")))
    stages = footprints(model, ADAMW, Strategy(pipeline=2), Dims(pipeline=2))
    assert [stage.weights for stage in stages] == [stage.gradients for stage in stages] == [4 * 7 * 8, 4 * 9 * 4]


def test_what_cannot_be_foreseen_is_refused_and_a_trillion_allocates_nothing():
    class Reader(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return self.param_groups[0]["params"][0].sum().item()

    with pytest.raises(ConfigError, match="optimizer=Reader: its memory cannot be predicted, as its step fails"):
        footprints(uneven(), Reader)
    model = on_meta(nn.Linear, in_features=10**6, out_features=10**6, bias=False)
    (footprint,) = footprints(model, ADAMW, Strategy(shard=8), Dims(shard=8))
    assert footprint == StateBytes(5 * 10**11, 5 * 10**11, 10**12 + 4)


def test_torch_pins_powers_of_two():
    """As ``tests/virtual/one_rank.py`` finds; the optimizer's state is not pinned."""
    model = on_meta(nn.Linear, in_features=1600, out_features=1600, bias=False)
    (plain,), (pinned,) = (
        footprints(model, ADAMW, Strategy(shard=2), Dims(shard=2), pinned=is_pinned) for is_pinned in (False, True)
    )
    assert pinned == StateBytes(8 << 20, 8 << 20, plain.optimizer)
