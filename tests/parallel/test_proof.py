"""Proofs of plans: what is equal on two ranks, and faults that a proof sees."""

import os
import signal
import sys
import threading
import time

import psutil
import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ptdbench.parallel import proof
from tests.models import users
from tests.models.test_plans import ATTENTION, MLP, TOKENS, adapted
from tests.programs import until
from tests.refusals import Abridged

TIED = {"embed": "embedding_rowwise", "head": "colwise_rep"}


@pytest.fixture(scope="module", autouse=True)
def process():
    """The tests share the process that proves, unless they end it."""
    with proof.in_one_process():
        yield


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path)


def proven(plan=None, kind=users.Attention, ranks=2, change=lambda _: None):
    part = adapted(users.Tokens(kind=kind), plan).shortened()
    change(part.module)
    return proof.prove(part, (TOKENS, TOKENS), ranks)


@pytest.mark.parametrize(
    ("plan", "kind", "ranks"),
    [(ATTENTION | MLP | TIED, users.Attention, 2), (None, users.Apart, 2), (MLP, users.Attention, 4)],
)
def test_a_right_plan_is_equal_and_proven_once(plan, kind, ranks, monkeypatch):
    assert proven(plan, kind, ranks) is None
    monkeypatch.setattr(proof._Prover, "ask", lambda *_: "run again")
    assert proven(plan, kind, ranks) is None
    assert proven({"blocks.*.fc1": "colwise_rep"}) == "run again"  # another plan


def test_rounding_that_a_model_enlarges_is_no_fault():
    def enlarge(model):
        model.head.register_forward_hook(lambda _module, _inputs, logits: (1e4 * logits).sin())

    assert proven(ATTENTION | MLP, change=enlarge) is None  # in fp32 the logits differ by 9e-3


class BiasOnEachRank(users.Attention):
    """Its bias is added on each rank: once too often on two."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.bias = nn.Parameter(self.proj.bias.detach())

    def forward(self, x):
        return super().forward(x) + self.bias * (dist.get_world_size() if dist.is_initialized() else 1)


class CutTwice(nn.Linear):
    """It keeps its own part of a weight that ranks split, and cannot be tied again."""

    def register_parameter(self, name, param):
        if not isinstance(self._parameters.get(name), DTensor):
            super().register_parameter(name, param)


def cut_twice(model):
    model.head.__class__ = CutTwice


@pytest.mark.parametrize(
    ("plan", "fault", "difference"),
    [
        # What a whole norm passes on is whole: its gradients would be summed once too often.
        (
            MLP | {"blocks.*.norm1": "replicated_with_grad_allreduce"},
            {},
            "the gradient of …norm1.weight differs by 1…",
        ),
        ({"blocks.*.fc1": "colwise"}, {}, "a rank fails: …"),
        (MLP, {"kind": BiasOnEachRank}, "the output of module.blocks.0.attn differs by …"),
        (TIED, {"change": cut_twice}, "the gradient of module.embed.weight …"),
    ],
)
def test_faults_are_seen(plan, fault, difference):
    assert proven(plan, **fault) == Abridged(difference)
    assert dist.is_initialized() is False


def on_ranks(action):
    """A change of a model, whose pass does this on each of several ranks."""
    return lambda model: model.register_forward_pre_hook(lambda *_: (dist.is_initialized() and action()) or None)


def test_crashes_and_hangs_are_told_and_leave_no_process(monkeypatch, tmp_path):
    def hang():
        (tmp_path / f"{os.getpid()}.pid").touch()
        time.sleep(60)

    crash = on_ranks(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    assert proven(MLP, change=crash) == "a rank is ended by SIGSEGV: Fatal Python error: Segmentation fault"
    assert proven(MLP, change=on_ranks(lambda: sys.exit("no"))) == "a rank fails: no"
    assert proven(MLP, change=lambda model: setattr(model, "lock", threading.Lock())) == Abridged(
        "the process of the proof fails: cannot pickle '_thread.lock' …"
    )
    assert proven(MLP) is None  # the process still proves, or another one
    monkeypatch.setattr(proof, "DEADLINE", 5.0)
    assert proven(ATTENTION, change=on_ranks(hang)) == "the proof is not done after 5 s"
    ranks = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(ranks) == 2
    until(lambda: not any(psutil.pid_exists(rank) for rank in ranks), 30)
