"""Plans of tensor parallelism: what words and structure make of the layers of a user's module."""

import pytest
import torch
from torch import nn

from ptdbench.models import foreign, plans
from ptdbench.models.protocol import Role
from tests.models import users
from tests.models.assembled import assembled
from tests.refusals import Abridged, refusal_of

TOKENS = torch.zeros(1, 6, dtype=torch.int64, device="meta")
ATTENTION = {"blocks.*.attn.qkv": "colwise", "blocks.*.attn.proj": "rowwise"}
MLP = {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}


def adapted(module, plan=None):
    return foreign.Adapted(module, lambda: (TOKENS, TOKENS), plan)


def of_block(module, plan=None):
    """The roles of the first block, by name in it."""
    prefix = "module.blocks.0."
    return {n.removeprefix(prefix): role for n, role in adapted(module, plan).roles().items() if n.startswith(prefix)}


OF_MLP = {"fc1": Role("colwise"), "fc2": Role("rowwise")}
#: A fused product is reshaped by the number of all heads: what it is for gets all outputs.
FUSED = {"attn.qkv": Role("colwise_gather_output"), "attn.proj": Role("rowwise_split_input")}
#: Four heads of queries share two of keys and values.
APART = {f"attn.{name}": Role("rowwise" if name == "o" else "colwise", 2, "heads") for name in "qkvo"}


@pytest.mark.parametrize(("kind", "plan", "roles"), [
    (users.Attention, None, FUSED | OF_MLP), (users.Attention, ATTENTION | MLP, FUSED | OF_MLP),
    (users.Attention, MLP, OF_MLP), (users.Apart, None, APART | OF_MLP),
])  # fmt: skip
def test_roles_of_a_block(kind, plan, roles):
    assert of_block(users.Tokens(kind=kind), plan) == roles


def test_what_cannot_be_split_says_why():
    model = adapted(assembled(lambda self, inputs: self.embed(inputs), embed=nn.Embedding(12, 12)))
    assert model.roles() == {}
    assert model.undivided == "it has no tp_plan, and no linear layers of which one takes the output of the other"
    theirs = users.Tokens()
    theirs._tp_plan = {"absent.*": "moe_tp_experts", "blocks.*.fc1": "packed_colwise"}
    assert (model := adapted(theirs)).roles() == {}
    assert model.undivided == Abridged("tp_plan[blocks.*.fc1]=packed_colwise: is not a split that …")


@pytest.mark.parametrize(("plan", "refusal"), [
    ({"blocks.*.fc3": "colwise"}, "tp_plan[blocks.*.fc3]=colwise: names no module; try blocks.*.fc…"),
    ({"head.weight": "colwise"}, "tp_plan[head.weight]=colwise: names a weight…"),
    ({"blocks.*.fc1": "mla_kv_a_proj"}, "tp_plan[blocks.*.fc1]=mla_kv_a_proj: is not a split …; try colwise, …"),
    ({"blocks.*.norm1": "rowwise"}, "….norm1]=rowwise: blocks.0.norm1 is of class LayerNorm, which …"),
])  # fmt: skip
def test_plans_that_do_not_fit_are_refused(plan, refusal):
    assert refusal_of(plans.expand, users.Tokens(), plan) == Abridged(refusal)
