import torch
from torch import nn

from ptdbench.models.gpt import GPT
from ptdbench.models.materialize import materialize


def meta_gpt():
    with torch.device("meta"):
        return GPT(layers=3, heads=2, width=16, sequence_length=8, vocabulary=30)


def whole(seed=0):
    model = meta_gpt()
    materialize(model, model, device="cpu", seed=seed)
    return model


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)


def test_values_depend_on_seed_and_name():
    before = torch.get_rng_state()
    model = whole()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert_same(whole().state_dict(), model.state_dict())
    weight = model.blocks[0].mlp.up.weight
    assert not torch.equal(weight, whole(seed=1).blocks[0].mlp.up.weight)
    assert not torch.equal(weight, model.blocks[1].mlp.up.weight)


def test_parameters_keep_their_kind():
    model = meta_gpt()
    model.embedding.requires_grad_(False)
    materialize(model, model, device="cpu", seed=0)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad == (not name.startswith("embedding."))
