import pytest
import torch
from torch import nn

from ptdbench.models.gpt import GPT
from ptdbench.models.resnet import ResNet
from ptdbench.optim.groups import DECAYED, in_groups, rules
from ptdbench.setup import run_spec
from tests.conftest import read


def by_name(model: nn.Module) -> dict[str, str]:
    of_weight = rules(model)
    return {name: of_weight[weight] for name, weight in model.named_parameters(remove_duplicate=False)}


class TestRules:
    @pytest.mark.parametrize("tied", [True, False])
    def test_of_a_decoder(self, tied):
        model = GPT(layers=1, heads=1, width=4, sequence_length=3, vocabulary=5, tie_weights=tied)
        of_name = by_name(model)
        assert {name: rule for name, rule in of_name.items() if rule not in ("matrices", "vectors")} == {
            "embedding.token.weight": "embeddings",
            "embedding.position.weight": "embeddings",
            "head.projection.weight": "embeddings" if tied else "head",
        }
        assert [name for name, rule in of_name.items() if rule == "matrices"] == [
            f"blocks.0.{name}.weight"
            for name in ("attention.query_key_value", "attention.output", "mlp.up", "mlp.down")
        ]
        assert of_name["head.norm.weight"] == of_name["blocks.0.mlp.up.bias"] == "vectors"

    def test_of_convolutions_and_models_without_known_names(self):
        of_name = by_name(ResNet(depth=18, classes=10))
        assert {of_name[name] for name in of_name if name.endswith("bias")} == {"vectors"}
        assert set(of_name.values()) == {"kernels", "head", "vectors"}
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2), nn.Softmax(-1))
        of_name = by_name(model)
        assert [of_name[f"{number}.weight"] for number in range(4)] == ["embeddings", "matrices", "vectors", "head"]


class TestGroups:
    def test_copies_share_a_rule_and_frozen_weights_and_empty_groups_are_omitted(self):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        model[0].weight.requires_grad = False
        model[1].requires_grad_(False)
        groups = in_groups(torch.optim.SGD, model, ["vectors"])(model.named_parameters()).param_groups
        assert [(group["rule"], group["params"], group["weight_decay"]) for group in groups] == [
            ("vectors", [model[0].bias], 0.0)
        ]
        model = GPT(layers=1, heads=1, width=4, sequence_length=3, vocabulary=5)
        make = in_groups(torch.optim.SGD, model, [])
        copy = nn.Parameter(torch.zeros(5, 4))
        assert make([("head.projection.weight", copy)]).param_groups[0]["rule"] == "embeddings"


def decays(*overrides: str) -> dict[str, float]:
    training = run_spec.specify(read("model=resnet18", *overrides), None).training
    model = ResNet(depth=18, classes=1000)
    return {group["rule"]: group["weight_decay"] for group in training.optimizer(model.named_parameters()).param_groups}


def test_the_option_chooses_by_the_table():
    of_all = dict.fromkeys(("kernels", "head", "vectors"), 0.3)
    assert decays("optimizer.weight_decay=0.3", "train.decay=all") == of_all
    assert decays("optimizer.weight_decay=0.3") == {rule: 0.3 * DECAYED[rule] for rule in of_all}
