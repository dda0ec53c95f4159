"""Muon for a model, without a configuration around it."""

from functools import partial
from typing import Any

from torch import nn

from ptdbench.optim.groups import in_groups
from ptdbench.optim.muon import Muon
from ptdbench.parallel.engine import MakeOptimizer


def muon_of(model: nn.Module, **options: Any) -> MakeOptimizer:
    """As ``optimizer=muon precision=fp32``, of a model that is not laid out yet."""
    return in_groups(
        partial(Muon, **{"lr": 1e-2, "adamw_lr": 1e-2, "ns_precision": "fp32", **options}), model, ["vectors"]
    )
