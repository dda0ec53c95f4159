"""Proofs of plans: what is equal on two ranks, and faults that a proof sees."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from ptdbench import cache
from ptdbench.parallel import proof, tensor
from tests.models import users
from tests.models.test_plans import ATTENTION, MLP, TOKENS, adapted
from tests.refusals import Abridged

pytestmark = pytest.mark.skipif(
    torch.__version__ < proof.PROVES_SINCE, reason=f"needs torch {proof.PROVES_SINCE} to prove a plan"
)

TIED = {"embed": "embedding_rowwise", "head": "colwise_rep"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "user_cache_path", lambda _: tmp_path)


def proven(plan=None, kind=users.Attention, ranks=2):
    return proof.prove(adapted(users.Tokens(kind=kind), plan).shortened(), (TOKENS, TOKENS), ranks)


@pytest.mark.parametrize(
    ("plan", "kind", "ranks"),
    [(ATTENTION | MLP | TIED, users.Attention, 2), (None, users.Apart, 2), (MLP, users.Attention, 4)],
)
def test_a_right_plan_is_equal_and_proven_once(plan, kind, ranks, monkeypatch):
    assert proven(plan, kind, ranks) is None
    monkeypatch.setattr(proof, "_on_ranks", lambda *_: "run again")
    assert proven(plan, kind, ranks) is None
    assert proven({"blocks.*.fc1": "colwise_rep"}) == "run again"  # another plan


def bias_on_each_rank(module, mesh):
    for part in module.modules():
        if isinstance(part, users.Block):
            part.fc2.bias = nn.Parameter(DTensor.from_local(part.fc2.bias.to_local(), mesh, [Partial()]))


@pytest.mark.parametrize(("plan", "fault", "told"), [
    # What a whole norm passes on is whole: its gradients would be summed once too often.
    (
        MLP | {"blocks.*.norm1": "replicated_with_grad_allreduce"},
        None,
        "the gradient of …norm1.weight differs by 1…",
    ),
    ({"blocks.*.fc1": "colwise"}, None, "a rank fails: …"),
    (MLP, "bias on each rank", "the output of module.blocks.0.fc2 differs by …"),
    (TIED, "tied weight cut twice", "the gradient of module.embed.weight …"),
])  # fmt: skip
def test_faults_are_seen(plan, fault, told, monkeypatch):
    parallelize = tensor.parallelize

    def faulty(model, module, mesh, *, sequence):
        parallelize(model, module, mesh, sequence=sequence)
        bias_on_each_rank(module, mesh)

    if fault == "bias on each rank":
        monkeypatch.setattr(proof, "tensor", SimpleNamespace(**vars(tensor) | {"parallelize": faulty}))
        monkeypatch.setattr(proof.inspect, "getsource", lambda _: "")
    if fault == "tied weight cut twice":
        monkeypatch.setattr(tensor, "_tie", lambda *_: None)
    assert proven(plan) == Abridged(told)
    assert torch.distributed.is_initialized() is False
