"""Evaluation on several ranks against what one process makes of the same weights."""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from ptdbench.data.protocol import HeldOutPart
from ptdbench.launch import stop_signal
from ptdbench.models import foreign
from ptdbench.problems import ConfigError
from ptdbench.setup.training_spec import prepare_data
from ptdbench.training import evaluation as module
from ptdbench.training.evaluation import Evaluation, Evaluator
from ptdbench.workloads import train
from tests.conftest import Record, composed, read, run_on_shared_ranks
from tests.daily import cases
from tests.parallel.ranks import on_ranks
from tests.workloads import made_task
from tests.workloads.made_job import job
from tests.workloads.made_task import TASK

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # where one process reads

CUDA = torch.device("cuda")

#: Every strategy on every number of ranks up to three that it takes; ``single`` is what the others are held against.
LAYOUTS = [("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("pdp", 2), ("pdp", 3), ("pdp", 4)]
LAYOUTS += [("hsdp", 4), ("fsdp parallel.pipeline=2", 4)]


def looked(**changes) -> Evaluation:
    fields = {"step": 1, "samples": 10, "loss": 1.0, "top1": None, "top5": None, "bits_per_byte": None, "seconds": 0.1}
    return Evaluation(**{**fields, **changes})


def test_steps_that_a_gpu_still_has_to_do_are_no_part_of_its_duration(monkeypatch):
    wall = SimpleNamespace(now=0.0, queued=7.0)

    def wait(_: torch.device) -> None:
        wall.now, wall.queued = wall.now + wall.queued, 0.0

    def sums(*_: Any) -> Tensor:
        wait(CUDA)
        wall.now += 2.0
        return torch.ones(1, 3)

    data = SimpleNamespace(held_out=made_task.Kept(), example=lambda: (torch.ones(1), torch.ones(1)))
    training = SimpleNamespace(data=data, model=nn.Identity())
    engine = SimpleNamespace(module=nn.Identity(), modes=mock.Mock())
    loop: Any = SimpleNamespace(done=1, engine=engine, mesh=mock.Mock())
    evaluator = Evaluator(SimpleNamespace(device=CUDA, training=training), loop)  # type: ignore[arg-type]
    evaluator._sums = sums  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.random, "fork_rng", nullcontext)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: wall.now))
    assert evaluator._evaluate(lambda _: None).seconds == 2.0


def test_replicas_take_the_first_ones_buffers_of_any_type_and_strides(monkeypatch):
    """NCCL refuses some, and gloo writes as many elements as an expanded tensor shows."""

    def broadcast(tensor: Tensor, **_: Any) -> None:
        assert (tensor.dtype, tensor.is_contiguous()) == (torch.uint8, True)
        tensor.zero_()  # what the first one has

    monkeypatch.setattr(dist, "broadcast", broadcast)
    memory, last = torch.ones(12), nn.Module()
    last.register_buffer("expanded", memory[:4].expand(3, 4))
    last.register_buffer("columns", torch.ones(2, 3).t())
    last.register_buffer("narrow", torch.ones(3, dtype=torch.int16))
    last.register_buffer("steps", torch.tensor(1))
    last.register_buffer("repeated", torch.tensor(1.0).expand(2))
    module.broadcast_buffers(last, mock.Mock())
    assert not any(buffer.any() for buffer in last.buffers())
    assert memory.tolist() == [0.0] * 4 + [1.0] * 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained for some steps and has not looked at what is held out."""
    directory = tmp_path_factory.mktemp("trained")
    steps = ("train.steps=20", "checkpoint.every_steps=20")
    assert run_on_shared_ranks(directory, *TASK, *steps, "parallel=single")["status"] == "ok"
    return directory


def judged(shared_run: Callable[..., Record], trained: Path, *overrides: str) -> dict[str, Any]:
    record = shared_run(*TASK, "train.steps=20", "eval.every=7", f"resume={trained}", *overrides)
    assert record["status"] == "ok", record["error"]
    (evaluation,) = record["evaluations"]
    assert evaluation.pop("seconds") > 0
    return evaluation


@pytest.fixture(scope="module")
def expected(trained: Path) -> dict[str, Any]:
    """The same, from the checkpoint and all samples at once, as one would write it by hand."""
    model = made_task.Net()
    weights = {name: torch.empty_like(weight) for name, weight in model.named_parameters()}
    buffers = {f"model.{name}": buffer for name, buffer in model.named_buffers()}
    wanted = {f"model.{name}": weight for name, weight in weights.items()}
    dcp.load({**buffers, **wanted}, checkpoint_id=trained / "checkpoints" / "step-00000020", no_dist=True)
    model.load_state_dict(weights, strict=False)
    inputs, targets = made_task.Kept().samples(0, made_task.HELD_OUT)
    with torch.no_grad():
        outputs = model.eval()(inputs)
    in_order = outputs.argsort(dim=1, descending=True)
    top1, top5 = ((in_order[:, :k] == targets[:, None]).any(1).sum().item() / made_task.HELD_OUT for k in (1, 5))
    assert 0.3 < top1 < top5  # it has learned, and makes mistakes
    loss = pytest.approx(F.cross_entropy(outputs.double(), targets).item(), rel=1e-6)
    sizes = {"step": 20, "samples": made_task.HELD_OUT}
    return {**sizes, "loss": loss, "top1": top1, "top5": top5, "bits_per_byte": None}


@pytest.mark.ranks
@cases(
    ("strategy", "ranks", "micro_batch"),
    [
        ("single", 1, 1000), *((*layout, 10) for layout in LAYOUTS), ("fsdp", 3, 60),
    ],  # in the last one rank has no sample
    daily=[("single", 1, 1000), ("fsdp parallel.pipeline=2", 4, 10), ("fsdp", 3, 60)],
)  # fmt: skip
def test_every_layout_says_what_a_plain_loop_says(shared_run, trained, expected, strategy, ranks, micro_batch):
    options = (*f"parallel={strategy}".split(), f"cluster.ranks_per_node={ranks}", f"eval.micro_batch={micro_batch}")
    assert judged(shared_run, trained, *options) == expected


@pytest.mark.ranks
@cases(
    "strategy",
    ["ddp", "fsdp", "fsdp parallel.reshard_after_forward=false", "pdp +model.replaces=false"],
    daily=["fsdp"],
)
def test_training_goes_on_as_if_nobody_had_looked(shared_run, strategy):
    scaled = f"model._target_={made_task.__name__}.Scaled"
    options = (*TASK, scaled, *f"parallel={strategy}".split(), "train.steps=5")
    quiet, looked_at = (shared_run(*options, f"eval.every={n}") for n in ("null", "2"))
    assert looked_at["status"] == "ok", looked_at["error"]
    assert quiet["losses"] == looked_at["losses"]
    assert not quiet["evaluations"]


@pytest.mark.ranks
@cases("strategy", ["ddp", "fsdp"], daily=["ddp"])
def test_final_evaluation_equals_one_ranks_of_the_checkpoint(shared_run, strategy):
    # Replicas' batch norms have seen different samples: all must judge with those that are saved.
    steps = ("train.steps=5", "eval.every=5", "eval.micro_batch=10")
    there = shared_run(*TASK, *steps, *f"parallel={strategy}".split(), "checkpoint.every_steps=5")
    (evaluation,) = there["evaluations"]
    here = shared_run(*TASK, *steps, "parallel=single", f"resume={there['directory']}")
    (again,) = here["evaluations"]
    assert (again["top1"], again["loss"]) == (evaluation["top1"], pytest.approx(evaluation["loss"], rel=1e-6))


@pytest.mark.ranks
@cases("kind", ["Margin", "OneLogit", "WithTargets", "OnlyLoss"], daily=["OneLogit", "OnlyLoss", "WithTargets"])
def test_a_model_is_judged_by_its_own_loss_and_by_an_accuracy_if_it_tells_classes(shared_run, kind):
    options = (f"model._target_={made_task.__name__}.{kind}", "optimizer.lr=0", "train.steps=1", "eval.every=1")
    record = shared_run(*TASK, *options, "parallel=ddp", "eval.micro_batch=10")
    assert record["error"] is None
    (evaluation,) = record["evaluations"]
    model = foreign.build(
        {"_target_": f"{made_task.__name__}.{kind}"}, seed=record["config"]["seed"], example=lambda: ()
    )
    inputs, targets = made_task.Kept().samples(0, made_task.HELD_OUT)
    with torch.no_grad():
        assert evaluation["loss"] == pytest.approx(model(inputs, targets).item(), rel=1e-6)
        if kind in ("Margin", "WithTargets"):
            in_order = model(inputs).argsort(dim=1, descending=True)
            hits = [(in_order[:, :k] == targets[:, None]).any(1).sum().item() for k in (1, 5)]
            assert (evaluation["top1"], evaluation["top5"]) == (
                hits[0] / made_task.HELD_OUT,
                hits[1] / made_task.HELD_OUT,
            )
        else:
            assert (evaluation["top1"], evaluation["top5"]) == (None, None)


@pytest.mark.parametrize("held_out", [None, HeldOutPart(0, lambda start, stop: made_task.Kept().samples(start, stop))])
def test_data_that_keep_nothing_are_refused(monkeypatch, held_out):
    monkeypatch.setattr(made_task.Largest, "held_out", held_out)
    with pytest.raises(ConfigError, match=r"^eval.every=2: data=synthetic_vectors has no held-out samples; try null"):
        prepare_data(read(*TASK, "eval.every=2"))


def test_batches_are_copied_to_the_device_like_those_of_steps(monkeypatch):
    copied = []
    feed = SimpleNamespace(to_device=lambda batch: (copied.append(len(batch[0])), batch)[1])
    monkeypatch.setattr(module, "total", lambda sums: sums)
    data, model = made_task.Largest(seed=0), made_task.Margin()
    training = SimpleNamespace(data=data, model=model, layout=SimpleNamespace(replicas=1))
    config = SimpleNamespace(eval=SimpleNamespace(micro_batch=50))
    job: Any = SimpleNamespace(device=torch.device("cpu"), training=training, spec=SimpleNamespace(config=config))
    loop: Any = SimpleNamespace(replica=0, engine=SimpleNamespace(outputs=model), feed=feed)
    assert Evaluator(job, loop)._sums(made_task.Kept(), lambda _: None) is not None
    assert copied == [50, 50, 1]


class Seen(NamedTuple):
    """What a run of two ranks has done, in which rank 1 gets a signal while it evaluates."""

    stopped: str | None
    evaluated: list[int]
    batches: int
    saved: list[str]


def interrupted(directory: Path, composed: DictConfig, evaluation: int) -> Seen:
    """Train until a signal comes to one rank in the second batch of an evaluation, counted from 1; 0: none comes."""
    begun, batches, last = 0, 0, made_task.HELD_OUT
    saved: list[str] = []
    samples = made_task.Kept.samples

    def interrupting(self: made_task.Kept, start: int, stop: int) -> tuple[Tensor, Tensor]:
        nonlocal begun, batches, last, saved
        begun, batches, last = (begun + 1, 1, start) if start < last else (begun, batches + 1, start)
        if (begun, batches) == (evaluation, 2):
            saved = sorted(path.name for path in directory.glob("checkpoints/step-????????"))
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return samples(self, start, stop)

    of_rank = job(directory, composed)
    with (
        mock.patch.object(made_task.Kept, "samples", interrupting),
        mock.patch.object(stop_signal, "CHECK_SECONDS", 0.0),  # asked after each batch
    ):
        outcome = train.Train()(of_rank)
    evaluated = [evaluation.step for evaluation in outcome.evaluations]
    return Seen(outcome.stopped, evaluated, batches, saved)


def interrupted_twice(directory: Path, composed: DictConfig) -> list[Seen]:
    """Once after a step, then after the last one, and at last to the end."""
    return [interrupted(directory, composed, evaluation) for evaluation in (2, 2, 0)]


@pytest.mark.ranks
@cases("strategy", ["ddp", "fsdp", "pdp"], daily=["fsdp"])
def test_all_ranks_stop_after_a_batch_with_the_checkpoint_and_without_the_evaluation(tmp_path, strategy):
    """What goes on evaluates first."""
    options = (
        *TASK, "cluster.ranks_per_node=2", "train.steps=5", "eval.every=2", "eval.micro_batch=10",
        "checkpoint.every_steps=2", "checkpoint.asynchronous=false", "profile.steps=0",
    )  # fmt: skip
    assert made_task.HELD_OUT / 20 > 2
    made = composed(*options, f"parallel={strategy}")
    saved = ["step-00000002", "step-00000004"]  # both, ahead of the evaluation
    for after_a_step, at_end, gone_on in on_ranks(2, interrupted_twice, tmp_path / "run", made):
        assert after_a_step == ("SIGTERM after step 4 of 5", [2], 2, saved)
        assert at_end == ("SIGTERM after step 5 of 5", [2, 4], 2, [*saved, "step-00000005"])
        assert (gone_on.stopped, gone_on.evaluated) == (None, [2, 4, 5])
