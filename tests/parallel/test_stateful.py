"""A model that keeps state outside of its weights trains the same under every layout and lever."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from ptdbench.models import foreign
from ptdbench.models.protocol import module_of
from ptdbench.models.state import Modes
from ptdbench.parallel.mesh import Mesh
from ptdbench.setup import config, training_spec
from tests.conftest import Record, composed, run_on_shared_ranks
from tests.daily import cases
from tests.parallel.made import CPU, unscaled, whole
from tests.parallel.ranks import each, on_ranks

pytestmark = pytest.mark.ranks

COMMON = (
    "model=custom", "model._target_=tests.parallel.stateful.Stateful", "data=digits", "train.global_batch=16",
    "train.steps=6", "optimizer.lr=1e-2", "device=cpu", "cluster.cpus_per_rank=1",
)  # fmt: skip
SAVES, EVALUATES = "checkpoint.every_steps=2", "eval.every=2"

Runs = Callable[..., Record]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    @cache
    def run(*options: str) -> Record:
        record = run_on_shared_ranks(tmp_path_factory.mktemp("reference"), *COMMON, *options)
        assert record["status"] == "ok", record["error"]
        return record

    return run


#: Ranks, options of a layout, and the passes of each layer in a step, which it counts; of several, each is of the same
#: samples as one rank's.
LAYOUTS = [
    (2, "parallel=ddp", 1),
    (2, "parallel=fsdp", 1),
    (2, "parallel=tp", 1),
    (2, "parallel=pdp parallel.microbatches=4", 4),
    (4, "parallel=hsdp", 1),
    (2, "parallel=tp train.micro_batch=4 activations=selective", 4),
    (2, "parallel=fsdp activations=recompute", 1),
    (2, "parallel=pdp parallel.microbatches=4 activations=recompute", 4),
    (2, "parallel=pdp parallel.schedule=interleaved1f1b parallel.microbatches=4", 4),
    (3, "parallel=pdp parallel.microbatches=4", 4),
    (2, "parallel=ddp parallel.optimizer=zero1", 1),
]


@cases(("ranks", "options", "passes"), LAYOUTS, daily=[*LAYOUTS[:4], LAYOUTS[6]])
def test_stateful_model_follows_one_rank(shared_run, reference, ranks, options, passes):
    record = shared_run(*COMMON, f"cluster.ranks_per_node={ranks}", *options.split())
    assert record["status"] == "ok", record["error"]
    expected = reference("parallel=single", f"train.micro_batch={16 // passes}")
    assert record["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_the_oracle_sees_a_pass_too_many(reference):
    once, twice = (reference("parallel=single", f"train.micro_batch={size}")["losses"] for size in (16, 8))
    assert abs(twice[0] / once[0] - 1) > 1e-4  # ten times the tolerance


LEVERS = ["activations=recompute", "activations=selective", "activations=offload", SAVES, EVALUATES]
PRODUCTS = [(layout, lever) for layout in ("single", "ddp", "fsdp", "pdp") for lever in LEVERS]


@cases(("layout", "lever"), PRODUCTS, daily=[("single", LEVERS[0]), *((one, EVALUATES) for one in ("ddp", "pdp"))])
def test_levers_keep_losses_with_dropout(shared_run, reference, layout, lever):
    options = (f"parallel={layout}", "+model.dropout=0.2")
    record = shared_run(*COMMON, *options, lever)
    assert record["status"] == "ok", record["error"]
    assert record["losses"] == reference(*options)["losses"]


@cases("compiled", ["layers", "whole"], daily=[])
def test_compiled_it_trains_the_same(shared_run, reference, compiled):
    """Without a count in Python, for which torch would compile again in each step."""
    options = ("parallel=single", "+model.counts=false", "+model.in_place=false")
    record = shared_run(*COMMON, *options, f"compile={compiled}", SAVES)
    assert record["status"] == "ok", record["error"]
    assert record["losses"] == pytest.approx(reference(*options)["losses"], rel=1e-5)


@cases("layout", ["single", "ddp", "fsdp", "pdp", "tp"], daily=["ddp", "pdp"])
def test_a_resumed_run_is_the_uninterrupted_one(shared_run, reference, layout):
    """But for what is counted in Python, which no checkpoint holds."""
    options = (f"parallel={layout}", "+model.counts=false", "+model.dropout=0.2", SAVES, EVALUATES)
    begun = shared_run(*COMMON, *options, "train.steps=4")
    assert begun["status"] == "ok", begun["error"]
    resumed = shared_run(*COMMON, *options, f"resume={begun['directory']}")
    assert resumed["status"] == "ok", resumed["error"]
    assert resumed["losses"] == reference(*options)["losses"]
    assert resumed["evaluations"][-1]["loss"] == reference(*options)["evaluations"][-1]["loss"]


def unlike_fresh(fresh: nn.Module, module: nn.Module) -> list[str]:
    """In a rank: the names of what differs in a module, laid out or not, from one that was just built."""
    weights, buffers, parts = map(dict, (fresh.named_parameters(), fresh.named_buffers(), fresh.named_modules()))
    names = [name for name, weight in module.named_parameters() if weight.grad is not None]
    names += [name for name, weight in module.named_parameters() if not torch.equal(whole(weight), weights[name])]
    names += [name for name, buffer in module.named_buffers() if not torch.equal(buffer, buffers[name])]
    for name, part in module.named_modules():
        keys = ("training", "passes", "history") if hasattr(part, "passes") else ("training",)
        if not name.endswith("module") and type(part) is not nn.Module:  # a stage has holders of its own
            names += [f"{name}.{key}" for key in keys if getattr(part, key) != getattr(parts[name], key)]
    return names


def before_the_first_step(*options: str) -> list[str]:
    """In a rank: what differs from a fresh module after all trials, and after the layout and a rehearsal."""
    read = config.read(composed(*COMMON, "parallel=ddp", SAVES, *options))
    spec = training_spec.specify(read, lambda _: torch.distributed.get_world_size())
    call = read.call("model").described
    fresh = module_of(foreign.build(call, seed=read.general.seed, example=spec.data.example))
    after_trials = unlike_fresh(fresh, module_of(spec.model))
    engine = spec.engine(Mesh(spec.layout.dims, "cpu"), CPU)
    Modes(fresh).train()
    spec.data.prepare()
    engine.rehearse(*spec.data.samples(*spec.layout.rows(0, replica=0)), unscaled)
    return after_trials + unlike_fresh(fresh, engine.module)


STARTS: list[Any] = [
    (), ("train.micro_batch=2",), ("parallel=fsdp",), ("parallel=tp",), ("parallel=pdp", "parallel.microbatches=4"),
    ("activations=recompute",), ("parallel=fsdp", "activations=selective"), ("activations=offload",),
    ("precision=bf16",), ("parallel=fsdp", "precision=bf16"), ("parallel.optimizer=zero1",),
    ("parallel.static_graph=find_unused",),
]  # fmt: skip


def test_module_is_fresh_before_the_first_step():
    for differing in on_ranks(2, each, before_the_first_step, STARTS):
        assert not any(differing.values()), differing
