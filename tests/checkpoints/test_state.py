"""The state of a training in checkpoints, and what refuses it; tests/test_resume.py has layouts under others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ptdbench.checkpoints.saver import Saver
from ptdbench.checkpoints.state import TrainingState, stored_tensors
from ptdbench.data.synthetic import SyntheticTokens
from ptdbench.models.gpt import GPT
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.options import Setting
from ptdbench.parallel.replicas import _OWN_BUFFERS
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError
from tests.parallel.ranks import mesh_of, on_ranks, pretended
from tests.refusals import refusal_of
from tests.setup.test_run_spec import Counter
from tests.workloads.made_loop import step_loop

BATCH = 12
DATA = SyntheticTokens(sequence_length=8, vocabulary=44, seed=0)
OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9, weight_decay=1e-2),
}
STRATEGIES = {
    "single": Strategy(),
    "ddp": Strategy(replicate="auto"),
    "pdp": Strategy(replicate="auto", pipeline="auto", schedule="gpipe"),
    "hsdp": Strategy(replicate=2, shard="auto"),
    "stages in shards": Strategy(shard="auto", pipeline=2, schedule="gpipe"),
}


def gpt(**changes: Any) -> GPT:
    return GPT(**({"layers": 4, "heads": 2, "width": 18, "sequence_length": 8, "vocabulary": 44} | changes))


class Run:
    def __init__(self, strategy: str, optimizer: str = "adamw", **changes: Any) -> None:
        layout = STRATEGIES[strategy].layout(STRATEGIES[strategy].dims(dist.get_world_size()), BATCH, "auto")
        mesh = mesh_of(layout.dims)
        with torch.device("meta"):
            built = gpt(**changes)
        self.engine: Engine = STRATEGIES[strategy](built, Setting(mesh, layout, torch.device("cpu"), seed=0))
        made = self.engine.optimizer(OPTIMIZERS[optimizer])
        self.state = TrainingState(self.engine.module, made, built.tied(), dist.get_rank())
        replica = mesh.dp.get_local_rank()
        self.first_replica = replica == 0
        self.loop = step_loop(self.engine, made, DATA, layout, replica)

    def go(self, *numbers: int) -> None:
        self.loop.losses = [torch.zeros(())] * numbers[0]
        for _ in numbers:
            self.loop.step()

    def tensors(self) -> dict[str, Tensor]:
        return self.state.collect(with_buffers=self.first_replica)

    def restore(self, path: Path, group: dist.ProcessGroup | None) -> None:
        self.state.restore(path, same_layout=False, group=group)


def saving(folder: Path, step: int, tensors: dict[str, Tensor]) -> tuple[Saver, Path]:
    """What has saved these, and where."""
    saver = Saver(folder, keep=1)
    saver.save(step, tensors, {}, {})
    saver.wait()
    return saver, folder / "checkpoints" / f"step-{step:08d}"


def refusals(folder: Path) -> list[str]:
    """What the ranks hear that resume with something else than what they saved; every rank hears all of it."""
    run = Run("pdp")
    run.go(0)
    saver, path = saving(folder, 3, run.tensors())

    def refusal(other: Run) -> str:
        return refusal_of(other.restore, path, saver.group)

    others: list[dict[str, Any]] = [{"width": 20}, {"layers": 5}, {"layers": 3}, {"tie_weights": False}]
    told = [refusal(Run("pdp", **changes)) for changes in others]
    told.append(refusal(Run("pdp", "momentum")))
    saver.close()
    return told


@pytest.mark.ranks
def test_other_model_is_refused_with_the_difference(tmp_path):
    first, second = on_ranks(2, refusals, tmp_path)
    assert first == second
    wider, deeper, shallower, untied, other_optimizer = first
    assert wider.startswith(f"resume={tmp_path}/checkpoints/step-00000003: is of another model or optimizer: ")
    assert "is [18] float32 there and [20] float32 here; " in wider
    assert wider.count(" there and ") == 3
    assert " more; resume with its model and optimizer" in wider
    assert "is missing there and [18] float32 here" in deeper
    assert "is [18] float32 there and missing here" in shallower
    assert "model.head.projection.weight is missing there and [44, 18] float32 here" in untied
    assert "exp_avg is [18] float32 there and missing here" in other_optimizer


@pytest.mark.parametrize("owned", [{"first", "second"}, {"first"}, {"second"}])
def test_tied_copies_on_one_rank_are_both_restored(tmp_path, owned):
    """As under ZeRO-1, which divides the weights of each stage among replicas."""

    def made(owned: set[str]) -> tuple[nn.ParameterDict, torch.optim.Optimizer, TrainingState]:
        copies = nn.ParameterDict({"first": torch.zeros(2), "second": torch.zeros(2)})
        optimizer = torch.optim.AdamW(copies.parameters())
        for name in copies.keys() - owned:
            optimizer.register_step_pre_hook(lambda *_, name=name: setattr(copies[name], "grad", None))
        return copies, optimizer, TrainingState(copies, optimizer, [("first", "second")], 0)

    with pretended(1):
        saved, optimizer, state = made({"first", "second"})
        for weight in saved.values():
            weight.grad = torch.ones(2)
        optimizer.step()
        saver, path = saving(tmp_path, 1, state.collect(with_buffers=True))
        loaded, its_optimizer, its_state = made(owned)
        its_state.restore(path, same_layout=True, group=saver.group)
        saver.close()
    for name, weight in loaded.items():
        assert torch.equal(weight, saved[name])
        kept = optimizer.state[saved[name]] if name in owned else {}
        torch.testing.assert_close(its_optimizer.state[weight], kept, rtol=0, atol=0)


def buffers(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
    """The averages of this rank before they are saved, and after they are loaded."""
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    replica = DistributedDataParallel(module, **_OWN_BUFFERS)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    replica(torch.full((2, 4), float(rank)) + torch.arange(8).reshape(2, 4)).sum().backward()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = TrainingState(module, optimizer, [], rank)
    saver, path = saving(folder, 1, state.collect(with_buffers=rank == 0))
    state.restore(path, same_layout=True, group=saver.group)
    saver.close()
    return before, dict(module.named_buffers()), set(stored_tensors(path))


@pytest.mark.ranks
def test_buffers_of_the_first_replica_go_to_all(tmp_path):
    (first, loaded, names), (second, loaded_too, _) = on_ranks(2, buffers, tmp_path)
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"])
    assert first["1.num_batches_tracked"] == 1
    for name, buffer in first.items():
        assert torch.equal(loaded[name], buffer)
        assert torch.equal(loaded_too[name], buffer)
    assert "model.1.running_var" in names
    assert "model.scratch" not in names


def test_optimizer_with_other_state_than_tensors_is_refused():
    model = nn.Linear(2, 2)
    optimizer = Counter(model.parameters(), lr=0.1)
    state = TrainingState(model, optimizer, [], 0)
    assert "model.bias" in state.collect(with_buffers=True)
    optimizer.step()
    with pytest.raises(ConfigError, match="optimizer=Counter: keeps steps as int, but checkpoints hold only tensors"):
        state.collect(with_buffers=True)


class Late(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if self.state[weight]:
                self.state[weight]["late"] = self.state[weight].get("late", torch.zeros_like(weight)) + 1
        super().step()


def test_optimizer_state_of_later_steps_is_loaded(tmp_path):
    def begun() -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
        model = nn.Linear(2, 2)
        optimizer = Late(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, TrainingState(model, optimizer, [], 0)

    with pretended(1):
        model, optimizer, state = begun()
        for _ in range(3):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        saver, path = saving(tmp_path, 1, state.collect(with_buffers=True))
        other, restored, state = begun()
        state.restore(path, same_layout=True, group=saver.group)
        saver.close()
    for weight in other.parameters():
        assert torch.equal(restored.state[weight]["late"], torch.full_like(weight, 2))


def test_batch_norm_statistics_are_not_steady():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    state = TrainingState(module, optimizer, [], 0)
    tensors = state.collect(with_buffers=True, local={"buffer.mask": torch.ones(2)})
    steady = state.steady(tensors)
    assert {name for name in tensors if name not in steady} == {
        "model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked", "rng.cpu.0", "own.0.buffer.mask"
    }  # fmt: skip
    assert {"model.1.weight", "optimizer.1.weight.momentum_buffer"} <= steady


def test_frozen_weights_are_not_steady():
    """A forward pass may change them, as those of a momentum encoder."""
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    state = TrainingState(module, torch.optim.SGD([module.bias]), [], 0)
    assert state.steady(["model.weight", "model.bias"]) == {"model.bias"}
