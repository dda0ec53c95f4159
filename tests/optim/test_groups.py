from __future__ import annotations

import torch
from torch import nn

from ptdbench.optim.groups import decay_groups
from ptdbench.setup import config, run_spec
from tests.conftest import composed


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3))
    matrices, vectors = decay_groups(model.parameters())
    assert {id(p) for p in matrices["params"]} == {id(model[0].weight), id(model[2].weight)}
    assert "weight_decay" not in matrices
    assert vectors["weight_decay"] == 0.0
    assert len(vectors["params"]) == 4


def test_frozen_weights_are_left_out_and_empty_groups_too():
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad = False
    assert decay_groups(layer.parameters()) == [{"params": [layer.bias], "weight_decay": 0.0}]


def optimizer_of(*overrides: str) -> torch.optim.Optimizer:
    training = run_spec.specify(config.read(composed("model=toy", *overrides)), None).training
    assert training
    return training.optimizer(nn.Linear(2, 3).parameters())


def test_the_option_chooses():
    assert [g["weight_decay"] for g in optimizer_of("optimizer.weight_decay=0.3").param_groups] == [0.3, 0.0]
    assert [g["weight_decay"] for g in optimizer_of("optimizer.weight_decay=0.3", "train.decay=all").param_groups] == [
        0.3
    ]


def test_without_decay_there_is_one_group():
    assert len(optimizer_of("optimizer.weight_decay=0").param_groups) == 1
