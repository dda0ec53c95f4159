"""Casts of inputs, loss scaling across ranks, and conversion to fp8, emulated: no CPU has such units."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.saver import Saver
from ptdbench.checkpoints.state import TrainingState
from ptdbench.kernels.copies import Copies
from ptdbench.local_part import local_part
from ptdbench.measure import hardware
from ptdbench.models.gpt import GPT
from ptdbench.parallel import precision
from ptdbench.parallel.precision import AgreedGradScaler, arithmetic, cast_inputs
from ptdbench.parallel.strategy import Strategy
from tests.models.assembled import assembled
from tests.parallel.made import data, gpt, laid_out
from tests.parallel.ranks import each, on_ranks
from tests.workloads.made_loop import step_loop


@pytest.mark.parametrize(("precision", "device", "on", "name"), [
    ("fp32", "cuda", False, "fp32"),
    ("tf32", "cuda", True, "tf32"),
    ("fp32", "cuda", True, "tf32"),  # not as asked for, but as it is
    ("fp32", "cpu", True, "fp32"),
    ("bf16", "cuda", True, "bf16"),
    ("fp16", "cuda", False, "fp16"),
])  # fmt: skip
def test_arithmetic_of_products(precision, device, on, name):
    with hardware.tf32_allowed(on):
        assert arithmetic(precision, device) == name


def remembers(self: Any, inputs: Any, targets: Any = None, **options: Any) -> Any:
    self.seen = {"inputs": inputs, "targets": targets, **options}
    return inputs


def test_inputs_are_cast_except_targets():
    module, floats = assembled(remembers), torch.ones(2)
    cast_inputs(module, [], "bf16")
    tokens = torch.ones(2, dtype=torch.int64)
    for by_place, by_name in (((floats,), {}), ((), {"targets": floats})):
        module((floats, [tokens]), *by_place, mask=floats, size=3, **by_name)
        (inputs, (kept,)), targets = module.seen["inputs"], module.seen["targets"]
        assert inputs.dtype == module.seen["mask"].dtype == torch.bfloat16
        assert targets is floats
        assert kept is tokens
        assert module.seen["size"] == 3


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_fp32_tensors_leave_the_forward_alone(precision):
    layer = nn.Linear(4, 4)
    cast_inputs(layer, [layer], precision)
    assert "forward" not in vars(layer)
    assert type(layer) is nn.Linear


class AllReduces(TorchDispatchMode):
    """Counts them, those that torch takes for DTensors included."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # until it is in operations of its parts
        self.count += "reduce" in str(operation)
        return operation(*args, **(kwargs or {}))


def overflow_on_one_rank(fused: bool, sharded: bool) -> dict[str, Any]:
    """Four steps: in the first and last, rank 1's gradient has overflowed.

    Rank 0 never scales a loss, as an early stage.
    """
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

    def placed(part: Tensor) -> Tensor:
        return DTensor.from_local(part, mesh, [Shard(0)]) if sharded else part

    weight = nn.Parameter(placed(torch.ones(3)))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=fused)
    scaler = AgreedGradScaler("cpu", enabled=True)
    seen: dict[str, Any] = {"scales": [scaler.get_scale()], "weights": [], "gradients": [], "messages": []}
    for overflows in (True, False, False, True):
        gradient = torch.full((3,), torch.inf if overflows and rank == 1 else scaler.get_scale())
        if rank == 1:
            scaler.scale(torch.ones(()))
        weight.grad = placed(gradient.clone())
        with AllReduces() as taken:
            scaler.step(optimizer)
            scaler.update()
        seen["scales"].append(scaler.get_scale())
        seen["weights"].append(local_part(weight.detach()).clone())
        seen["gradients"].append(gradient)
        seen["messages"].append(taken.count)
    return seen


@pytest.mark.ranks
def test_overflow_on_one_rank_skips_step_everywhere():
    first, other = on_ranks(2, each, overflow_on_one_rank, [(False, False), (True, False), (False, True), (True, True)])
    assert all(seen["gradients"][0].isfinite().all() for seen in first.values())
    assert all(seen["gradients"][0].isinf().all() for seen in other.values())
    for seen in (*first.values(), *other.values()):
        assert seen["scales"] == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**14]  # halved after the overflows
        assert torch.equal(seen["weights"][0], torch.ones(3))
        # The gradient is 1 once it is unscaled; Adam's first steps then have the length of the learning rate.
        torch.testing.assert_close(seen["weights"][1], torch.full((3,), 0.9))
        assert seen["messages"] == [1] * 4


WEIGHTS = [
    f"blocks.{block}.{name}.weight"
    for block in range(3)
    for name in ("attention.query_key_value", "attention.output", "mlp.up", "mlp.down")
]

needs_torchao = pytest.mark.skipif(not precision.has_torchao(), reason="torchao is not installed")


@pytest.mark.parametrize(("module", "suits"), [
    (nn.Linear(512, 1024), True),
    (nn.Linear(512, 1024, bias=False), True),
    (nn.Linear(496, 1024), False),  # small
    (nn.Linear(1024, 520), False),  # no multiple of 16
    (nn.Bilinear(512, 512, 1), False),
    (type("Other", (nn.Linear,), {})(512, 512), False),  # may compute something else
])  # fmt: skip
def test_which_layers_suit(module, suits):
    assert precision.suits_fp8(module) == suits


@needs_torchao
def test_only_blocks_are_converted(monkeypatch):
    monkeypatch.setattr(precision, "FP8_SMALLEST", 64)
    torch.manual_seed(0)
    model = GPT(layers=2, heads=2, width=64, sequence_length=16, vocabulary=128)
    wide, names = copy.deepcopy(model), list(model.state_dict())
    precision.convert_to_fp8(model.layers(), "fp8", sharded=False, emulate=True)
    converted = [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    linear = ("attention.query_key_value", "attention.output", "mlp.up", "mlp.down")
    assert converted == [f"blocks.{block}.{name}" for block in range(2) for name in linear]
    assert list(model.state_dict()) == names
    assert model.head.projection.weight is model.embedding.token.weight

    tokens, targets = torch.randint(128, (2, 2, 16))
    losses = {}
    for name, net in (("fp8", model), ("bf16", copy.deepcopy(wide)), ("fp32", wide)):
        cast_inputs(net, net.layers(), name)
        if name != "fp32":
            Copies(net, net.layers(), torch.bfloat16)
        loss = net(tokens, targets)
        loss.backward()
        losses[name] = loss.item()
        assert {weight.grad.dtype for weight in net.parameters()} == {torch.float32}
    assert losses["fp8"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["fp8"] != losses["bf16"]  # it is another arithmetic
    for got, want in zip(model.parameters(), wide.parameters(), strict=True):
        assert torch.cosine_similarity(got.grad.flatten(), want.grad.flatten(), dim=0) > 0.99


def test_layers_and_shared_weights_stay_unconverted():
    alone, shared = nn.Linear(512, 512), nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 512))
    shared[1].weight = shared[0].weight
    layers = [alone, shared]
    assert precision.fp8_layers(layers, "bf16", sharded=True) == []
    assert precision.fp8_layers(layers, "fp8", sharded=True) == [*shared]
    assert precision.fp8_layers(layers, "fp8_tensorwise", sharded=False) == [*shared]
    assert precision.fp8_layers(layers, "fp8_tensorwise", sharded=True) == [shared[2]]


@needs_torchao
@pytest.mark.parametrize(("rows", "pads"), [(32, False), (33, True)])
def test_an_uneven_number_of_vectors_is_padded(rows, pads):
    block = nn.Sequential(nn.Linear(512, 512))
    precision.convert_to_fp8([block], "fp8", sharded=False, rows=rows)
    assert block[0].linear_mm_config.grad_weight.pad_inner_dim is pads


@needs_torchao
def test_a_converted_block_is_one_graph(monkeypatch):
    monkeypatch.setattr(precision, "FP8_SMALLEST", 64)
    block = GPT(layers=1, heads=2, width=64, sequence_length=16, vocabulary=128).blocks[0]
    precision.convert_to_fp8([block], "fp8", sharded=False, emulate=True)
    cast_inputs(block, [block], "fp8")
    inputs = torch.randn(2, 16, 64)
    compiled = torch.compile(block.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), block(inputs))
    torch._dynamo.reset()


def model():
    return gpt(layers=3, heads=2, width=32, vocabulary=41)


def loop_of(name, seed=0):
    """The loop that trains a model whose weights are sharded over two ranks."""
    engine, *where = laid_out(Strategy(shard=2), model(), 4, 2, precision=name, seed=seed)
    optimizer = engine.optimizer(lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True))
    return step_loop(engine, optimizer, data(41), *where)


def train(loop, steps=4):
    for _ in range(steps):
        loop.step()
    return [loss.item() for loss in loop.losses[-steps:]]


def gathered(module, name):
    """A weight as FSDP gathers it, and by definition: its largest entry becomes the largest number."""
    weight = module.get_parameter(name).full_tensor()
    block = module.get_submodule(".".join(name.split(".")[:2]))
    block.unshard()
    narrow = module.get_parameter(name).to_original_precision()
    block.reshard()
    scale = (torch.finfo(torch.float8_e4m3fn).max / weight.abs().max().double()).float()
    return narrow.detach(), ((weight * scale).to(torch.float8_e4m3fn).float() / scale).to(narrow.dtype).detach()


def in_rank(folder):
    """What is trained with weights gathered in fp8, and in bf16, and what is saved of the first."""
    precision.FP8_SMALLEST, precision.convert_to_fp8 = 32, partial(precision.convert_to_fp8, emulate=True)
    loop = loop_of("fp8_tensorwise")
    losses, saver, module = train(loop), Saver(folder, keep=1), loop.engine.module
    tied, rank = model().tied(), dist.get_rank()
    saved = TrainingState(module, loop.update.optimizer, tied, rank).collect(with_buffers=True)
    saver.save(4, saved, {}, {})
    saver.wait()
    weights = [gathered(module, name) for name in WEIGHTS]  # after an update: not by the scales of the step
    precision.agree_on_scales(module)
    weights += [gathered(module, name) for name in WEIGHTS]
    precision.forget_scales(module)
    going_on, path = train(loop), checkpoint_dir.newest(folder).checkpoint.path
    other = loop_of("fp8_tensorwise", seed=1)
    state = TrainingState(other.engine.module, other.update.optimizer, tied, rank)
    state.restore(path, same_layout=True, group=saver.group)
    other.first_step = 4
    saver.close()
    resumed = train(other)
    precision.gathers_fp8 = lambda *_, **__: False
    return {
        "fp8": losses, "gathered in bf16": train(loop_of("fp8_tensorwise")), "weights": weights,
        "problems": saver.problems, "saved": {type(local_part(tensor)) for tensor in saved.values()},
        "going on": going_on, "resumed": resumed,
    }  # fmt: skip


@needs_torchao
@pytest.mark.ranks
def test_weights_gathered_in_fp8(tmp_path):
    for of_rank in on_ranks(2, in_rank, tmp_path):
        for narrow, want in of_rank["weights"]:
            torch.testing.assert_close(narrow, want, rtol=2**-8, atol=0)  # of bf16
        assert of_rank["fp8"] == pytest.approx(of_rank["gathered in bf16"], rel=5e-3)
        assert of_rank["fp8"] != of_rank["gathered in bf16"]  # which are rounded twice
        assert of_rank["saved"] == {torch.Tensor}  # a checkpoint is that of any precision
        assert of_rank["problems"] == []
        assert of_rank["resumed"] == of_rank["going on"]
