"""A decoder with experts, by hand and by its own slower product."""

import pytest
import torch
from torch import nn

from ptdbench.models.experts import Experts, Router, RouterOptions, places_in, take
from ptdbench.models.materialize import parameter_count
from ptdbench.models.moe import MoE
from ptdbench.problems import ConfigError
from tests.models.made import filled

SIZES = {
    "layers": 2, "heads": 4, "key_value_heads": 2, "width": 32, "experts": 6, "active": 2, "expert_hidden": 24,
    "sequence_length": 24, "vocabulary": 60,
}  # fmt: skip


def moe(**options):
    return filled(MoE, **SIZES | options)


def test_parameters_and_flops_by_hand():
    """Per block: attention 32 · 64 + 32 · 32, router 6 · 32, an expert 3 · 32 · 24, shared ones 2 of these, an MLP."""
    model = moe(layers=3, dense_layers=1, hidden=40, shared_experts=2)
    attention, router, expert, mlp, ends = 3072, 192, 2304, 3840, 2 * 60 * 32
    norms = 7 * 32
    total = ends + norms + 3 * attention + mlp + 2 * (router + (6 + 2) * expert)
    assert parameter_count(model) == total
    pairs = 3 * 4 * 24 * 24 * 32  # scores and mixing, three passes
    sparse = 6 * 24 * (attention + router + (2 + 2) * expert) + pairs
    dense = 6 * 24 * (attention + mlp) + pairs
    head = 6 * 24 * 32 * 60
    assert model.train_flops() == {
        "embedding": 0, "blocks.0": dense, "blocks.1": sparse, "blocks.2": sparse, "head": head
    }  # fmt: skip
    assert model.masked_flops() == 3 * pairs / 2


def test_latent_attention_is_causal():
    model = moe(latent_width=16, rotary_width=4, head_width=8)
    tokens = torch.randint(60, (1, 24), generator=torch.Generator().manual_seed(1))
    changed = torch.cat([tokens[:, :12], 59 - tokens[:, 12:]], dim=1)
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 0], [0, 8, 0]])
def test_grouped_equals_loop(sizes):
    results = []
    for product in ("grouped", "loop"):
        torch.manual_seed(0)
        experts = Experts(3, 8, 16, product)
        for weight in experts.parameters():
            nn.init.normal_(weight)
        tokens = torch.randn(sum(sizes), 8, requires_grad=True)
        outputs = experts(tokens, torch.tensor(sizes))
        (outputs * torch.arange(8)).sum().backward()
        results.append([outputs.detach(), tokens.grad, *(weight.grad for weight in experts.parameters())])
    torch.testing.assert_close(*results)
    assert all(gradient.abs().sum() > 0 for gradient in results[0][1:] if gradient.numel()) == (sum(sizes) > 0)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 8), (torch.float16, 8)])
def test_grouped_kernel_takes_smallest_sizes(dtype, size):
    experts = Experts(2, size, size, "grouped").to(dtype)
    for weight in experts.parameters():
        nn.init.ones_(weight)
    tokens = torch.ones(3, size, dtype=dtype, requires_grad=True)
    experts(tokens, torch.tensor([1, 2])).square().sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in experts.parameters())


@pytest.mark.parametrize("numbers", [[3, 0, 5, 1, 2, 4], [4, 1, 0], []])
def test_take_equals_indexing(numbers):
    """Of three rows two copies each, of which some are taken; those that are not come back as zeros."""
    order, rows = torch.tensor(numbers, dtype=torch.int64), torch.randn(3, 4, dtype=torch.float64)
    ours, plain = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    places, weights = places_in(order, 6), torch.randn(6, 4, dtype=torch.float64)
    taken = take(take(ours, order, places, copies=2).square(), places, order)
    expected = torch.zeros(6, 4, dtype=torch.float64).index_copy(0, order, plain[order // 2].square())
    assert torch.equal(taken, expected)
    for result in (taken, expected):
        (result * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def router(capacity=None, tokens=40, **options):
    torch.manual_seed(3)
    routing = Router(8, 4, 2, capacity, RouterOptions(**options))
    nn.init.normal_(routing.weight)
    nn.init.constant_(routing.load, 0.25)
    nn.init.zeros_(routing.bias)
    return routing, torch.randn(2, tokens // 2, 8, requires_grad=True)


def test_choices_are_sorted_and_counted_once():
    chooses, tokens = router()
    weights, order, counts = chooses(tokens)
    scores = (tokens.flatten(0, 1) @ chooses.weight.T).softmax(-1)
    best = scores.topk(2)
    torch.testing.assert_close(weights, best.values / best.values.sum(-1, keepdim=True))
    experts = best.indices.flatten()[order]
    assert experts.tolist() == sorted(experts.tolist())
    assert counts.tolist() == [(experts == expert).sum().item() for expert in range(4)]
    assert not chooses.counts  # nothing has been trained by it yet
    (weights**2).sum().backward()
    assert [counted.tolist() for counted in chooses.counts] == [[*counts.tolist(), 0]]


def test_capacity_drops_the_last_choices():
    chooses, tokens = router(capacity=1.0)
    weights, order, counts = chooses(tokens)
    everything = router()[0](tokens)
    assert counts.tolist() == [min(count, 20) for count in everything[2].tolist()]  # 40 · 2 / 4
    assert set(order.tolist()) < set(everything[1].tolist())
    (weights**2).sum().backward()
    assert chooses.counts[0].tolist() == [*everything[2].tolist(), 80 - counts.sum().item()]


def test_auxiliary_loss_equals_switchs():
    load, coefficient = torch.tensor([0.4, 0.3, 0.2, 0.1]), 0.5
    chooses, tokens = router(coefficient=coefficient)
    chooses.load.copy_(load)
    chooses.share = 2.0
    (chooses(tokens)[0] * 0).sum().backward()
    other, same = router()
    scores = (same.flatten(0, 1) @ other.weight.T).softmax(-1)
    (2 * coefficient * 4 * (load * scores.mean(0)).sum()).backward()
    torch.testing.assert_close(chooses.weight.grad, other.weight.grad)
    torch.testing.assert_close(tokens.grad, same.grad)


def test_bias_moves_against_the_load():
    chooses, tokens = router(balance="bias", bias_rate=0.1)
    before = chooses(tokens)[0]
    chooses.balance(torch.tensor([40.0, 20.0, 10.0, 10.0]))
    torch.testing.assert_close(chooses.bias, torch.tensor([-0.1, 0.0, 0.1, 0.1]))
    chooses.bias.copy_(torch.tensor([1e-6, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(chooses(tokens)[0], before)
    chooses.bias.copy_(torch.tensor([5.0, 5.0, 0.0, 0.0]))
    assert chooses(tokens)[2].tolist() == [40, 40, 0, 0]


def test_forced_experts_take_turns():
    chooses, tokens = router(balance="forced")
    _, _, counts = chooses(tokens)
    assert counts.tolist() == [20, 20, 20, 20]


def test_all_refused_options_come_at_once():
    with pytest.raises(ConfigError) as error:
        moe(active=7, dense_layers=2, capacity=0)
    assert [problem.option for problem in error.value.problems] == ["hidden", "active", "dense_layers", "capacity"]
    with pytest.raises(ConfigError, match="must be none, loss, bias, forced"):
        moe(router={"balance": "lost"})
