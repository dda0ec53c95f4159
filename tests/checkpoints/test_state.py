"""What is saved under one strategy and number of ranks is what is loaded under another, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ptdbench.checkpoints import safe_load
from ptdbench.checkpoints.saver import Saver
from ptdbench.checkpoints.state import TrainingState
from ptdbench.data.synthetic import SyntheticTokens, SyntheticVectors
from ptdbench.models.gpt import GPT
from ptdbench.models.toy import Toy
from ptdbench.parallel.apply import Setting
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError
from tests.optim.made_muon import muon_of
from tests.parallel.ranks import each, mesh_of, on_ranks, pretended
from tests.parallel.splitting import where_split
from tests.refusals import refusal_of
from tests.setup.test_run_spec import Counter
from tests.workloads.made_loop import step_loop

BATCH = 12
STEPS = 3  # until DDP has arranged its buckets, and a momentum is more than one gradient

#: On three ranks a width of 18 and a vocabulary of 44 fall into unequal shards, and 2 outputs leave one rank none.
MODELS = {
    "gpt": lambda **changes: GPT(
        **({"layers": 4, "heads": 2, "width": 18, "sequence_length": 8, "vocabulary": 44} | changes)
    ),
    "toy": lambda **changes: Toy(**({"inputs": 6, "width": 10, "outputs": 2, "layers": 4} | changes)),
}
DATA = {
    "gpt": SyntheticTokens(sequence_length=8, vocabulary=44, seed=0),
    "toy": SyntheticVectors(inputs=6, outputs=2, seed=0),
}
OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "adamw not fused": lambda weights: torch.optim.AdamW(weights, lr=1e-2, amsgrad=True),
    "muon": muon_of(MODELS["gpt"]()),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9, weight_decay=1e-2),
}
#: What is trained: a model and an optimizer.
TRAINED = [("gpt", "adamw"), ("gpt", "momentum"), ("gpt", "muon"), ("toy", "adamw not fused")]
#: How: a number of ranks and a strategy.
LAYOUTS: list[tuple[int, str]] = [
    (1, "single"), (2, "ddp"), (3, "zero1"), (2, "fsdp"), (2, "pdp"), (3, "ddp"), (3, "fsdp"), (3, "pdp"), (4, "pdp"),
    (4, "hsdp"), (4, "stages in shards"), (2, "interleaved"), (4, "zbv in shards"), (4, "tensor in shards"),
    (4, "tensor in stages"),
]  # fmt: skip
#: Forms of their files: whole weights in shares, unequal shards, stages, cut in both dimensions, and stages of shards.
FORMS = [(3, "ddp"), (3, "fsdp"), (4, "pdp"), (4, "tensor in shards"), (4, "stages in shards")]
STRATEGIES = {
    "single": Strategy(),
    "ddp": Strategy(replicate="auto"),
    "zero1": Strategy(replicate="auto", optimizer="zero1"),
    "fsdp": Strategy(shard="auto"),
    "pdp": Strategy(replicate="auto", pipeline="auto", schedule="gpipe"),
    "hsdp": Strategy(replicate=2, shard="auto"),
    "stages in shards": Strategy(shard="auto", pipeline=2, schedule="gpipe"),
    "tensor in shards": Strategy(shard="auto", tensor=2),
    "tensor in stages": Strategy(pipeline=2, tensor=2, schedule="gpipe"),
    "interleaved": Strategy(replicate="auto", pipeline=2, schedule="interleaved1f1b"),
    **where_split({
        "zbv in shards": lambda: Strategy(shard="auto", pipeline=2, schedule="zbv", reshard_after_forward=False),
    }),
}  # fmt: skip
LAYOUTS = [(ranks, name) for ranks, name in LAYOUTS if name in STRATEGIES]


class Run:
    def __init__(self, strategy: str, model: str, optimizer: str, seed: int = 0, **changes: Any) -> None:
        layout = STRATEGIES[strategy].layout(STRATEGIES[strategy].dims(dist.get_world_size()), BATCH, "auto")
        mesh = mesh_of(layout.dims)
        with torch.device("meta"):
            built = MODELS[model](**changes)
        self.engine: Engine = STRATEGIES[strategy](built, Setting(mesh, layout, torch.device("cpu"), seed=seed))
        made = self.engine.optimizer(OPTIMIZERS[optimizer])
        self.state = TrainingState(self.engine.module, made, built.tied(), dist.get_rank())
        replica = mesh.dp.get_local_rank()
        self.first_replica = replica == 0
        self.loop = step_loop(self.engine, made, DATA[model], layout, replica)

    def go(self, *numbers: int) -> None:
        self.loop.losses = [torch.zeros(())] * numbers[0]
        for _ in numbers:
            self.loop.step()

    def tensors(self) -> dict[str, Tensor]:
        return self.state.collect(with_buffers=self.first_replica)

    def restore(self, path: Path, group: dist.ProcessGroup | None) -> None:
        self.state.restore(path, same_layout=False, group=group)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in tensors.items()
        if not name.startswith("rng.")
    }


def save_all(root: Path, strategy: str) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Train, and save while it trains on: what was saved of each training."""
    states = {}
    for trained in TRAINED:
        run = Run(strategy, *trained)
        run.go(*range(STEPS))
        saver = Saver(folder_of(root, (dist.get_world_size(), strategy), trained), keep=1)
        saver.save(STEPS, run.tensors(), {}, {})
        states[trained] = whole(run.tensors())
        run.go(STEPS, STEPS + 1)
        saver.close()
        assert saver.problems == []
    return states


def load_all(root: Path, strategy: str) -> dict[Any, dict[str, Tensor]]:
    """What checkpoints leave in a fresh run under ``strategy``."""
    states = {}
    group = dist.new_group(backend="gloo")
    for saved_by, trained in pairs((dist.get_world_size(), strategy)):
        run = Run(strategy, *trained, seed=1)
        run.restore(path_of(root, saved_by, trained), group)
        states[saved_by, trained] = whole(run.tensors())
    return states


def pairs(layout: tuple[int, str]) -> list[tuple[tuple[int, str], tuple[str, str]]]:
    """What a layout loads: all that it saved itself, and one of the trainings, by turns, from other layouts.

    These are one of each form of file, and the two before it in the list: another layout loads each file.
    """
    offset = LAYOUTS.index(layout)
    others = dict.fromkeys([*FORMS, LAYOUTS[offset - 1], LAYOUTS[offset - 2]])
    by_turns = [(other, TRAINED[(offset + number) % len(TRAINED)]) for number, other in enumerate(others)]
    return [(layout, trained) for trained in TRAINED] + [pair for pair in by_turns if pair[0] != layout]


def saving(folder: Path, step: int, tensors: dict[str, Tensor]) -> tuple[Saver, Path]:
    """What has saved these, and where."""
    saver = Saver(folder, keep=1)
    saver.save(step, tensors, {}, {})
    saver.wait()
    return saver, folder / "checkpoints" / f"step-{step:08d}"


def folder_of(root: Path, layout: tuple[int, str], trained: tuple[str, str]) -> Path:
    return root / "-".join(map(str, (*layout, *trained)))


def path_of(root: Path, layout: tuple[int, str], trained: tuple[str, str]) -> Path:
    return folder_of(root, layout, trained) / "checkpoints" / f"step-{STEPS:08d}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def of_layouts(body: Callable[[Path, str], Any], root: Path) -> dict[tuple[int, str], list[Any]]:
    """What ``body`` returns under each layout, by rank; the layouts of as many ranks share them."""
    results = {}
    for size in dict(LAYOUTS):
        names = [name for ranks, name in LAYOUTS if ranks == size]
        of_ranks = on_ranks(size, each, body, [(root, name) for name in names])
        results |= {(size, name): [of_rank[root, name] for of_rank in of_ranks] for name in names}
    return results


@pytest.fixture(scope="module")
def saved(root: Path) -> dict[tuple[int, str], list[Any]]:
    return of_layouts(save_all, root)


def together(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for tensors in of_ranks:
        for name, tensor in tensors.items():
            assert torch.equal(merged.setdefault(name, tensor), tensor), name
    return merged


@pytest.fixture(scope="module")
def loaded(saved: dict[tuple[int, str], Any], root: Path) -> dict[tuple[int, str], list[Any]]:
    """By layout and rank."""
    return of_layouts(load_all, root)


@pytest.mark.thorough
@pytest.mark.ranks
class TestEveryStrategyLoadsWhatOthersSaved:
    """tests/test_resume.py has the losses that follow."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_state_is_loaded_bit_for_bit(self, saved, loaded, layout):
        for saved_by, trained in pairs(layout):
            expected = together([of_rank[trained] for of_rank in saved[saved_by]])
            loaded_tensors = together([of_rank[saved_by, trained] for of_rank in loaded[layout]])
            assert loaded_tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(loaded_tensors[name], tensor), (saved_by, trained, name)

    def test_names_are_those_of_the_whole_model(self, saved, root):
        names = safe_load.names(path_of(root, (2, "pdp"), ("gpt", "adamw")))
        assert names.keys() == safe_load.names(path_of(root, (2, "ddp"), ("gpt", "adamw"))).keys()
        model = MODELS["gpt"]()
        weights = {name: (weight.size(), torch.float32) for name, weight in model.named_parameters()}
        assert {name: names[f"model.{name}"] for name in weights} == weights
        assert {f"optimizer.{name}.{key}" for name in weights for key in ("step", "exp_avg", "exp_avg_sq")} < set(names)
        assert not any("head.projection.weight" in name for name in names)  # which is the embedding's


def refusals(folder: Path) -> list[str]:
    """What the ranks hear that resume with something else than what they saved; every rank hears all of it."""
    run = Run("pdp", "gpt", "adamw")
    run.go(0)
    saver, path = saving(folder, STEPS, run.tensors())

    def refusal(other: Run) -> str:
        return refusal_of(other.restore, path, saver.group)

    others: list[dict[str, Any]] = [{"width": 20}, {"layers": 5}, {"layers": 3}, {"tie_weights": False}]
    told = [refusal(Run("pdp", "gpt", "adamw", **changes)) for changes in others]
    told.append(refusal(Run("pdp", "gpt", "momentum")))
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
    replica = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    replica(torch.full((2, 4), float(rank)) + torch.arange(8).reshape(2, 4)).sum().backward()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = TrainingState(module, optimizer, [], rank)
    saver, path = saving(folder, 1, state.collect(with_buffers=rank == 0))
    state.restore(path, same_layout=True, group=saver.group)
    saver.close()
    return before, dict(module.named_buffers()), set(safe_load.names(path))


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
