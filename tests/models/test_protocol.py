"""What every built-in model must keep of the protocol, family by family."""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torchvision.models.resnet import Bottleneck

from ptdbench.kernels.copies import Copies
from ptdbench.models.gpt import GPT
from ptdbench.models.llama import Llama
from ptdbench.models.moe import MoE
from ptdbench.models.protocol import Model, default_loss
from ptdbench.models.resnet import ResNet
from ptdbench.models.toy import Toy
from ptdbench.parallel import tensor
from ptdbench.parallel.precision import DTYPES, cast_inputs
from tests.models.made import filled, small_resnet
from tests.parallel.ranks import on_ranks
from tests.refusals import refusal_of


def of_tokens(family, **options):
    model = filled(family, layers=3, width=16, sequence_length=12, vocabulary=40, **options)
    return model, torch.randint(40, (3, 12)), torch.randint(40, (3, 12))


def llama(**options):
    return of_tokens(Llama, key_value_heads=2, hidden=24, **options)


def of_images(side, **options):
    model = small_resnet(classes=10, image_size=side, **options)
    return model, torch.randn(3, 3, side, side), torch.randint(10, (3,))


def toy():
    return filled(Toy, inputs=6, width=4, outputs=4, layers=3), torch.randn(3, 6)


FAMILIES = {
    "gpt": lambda: of_tokens(GPT, heads=2),
    "untied_gpt": lambda: of_tokens(GPT, heads=2, tie_weights=False),
    "llama": lambda: llama(heads=4, rope_factor=8.0),
    "tied_llama": lambda: llama(heads=2, tie_weights=True),
    "resnet": lambda: of_images(45),
    "bottleneck_resnet": lambda: of_images(8, block=Bottleneck, stem="small"),
    "toy_of_numbers": lambda: (*toy(), torch.randn(3, 4)),
    "toy_of_classes": lambda: (*toy(), torch.randint(4, (3,))),
}


@pytest.fixture(params=FAMILIES)
def case(request):
    """A model on the CPU with a batch of inputs and targets."""
    torch.manual_seed(0)
    return FAMILIES[request.param]()


def test_parts_hold_every_tensor_once(case):
    model, *_ = case
    assert isinstance(model, Model)
    order = list(model.modules())
    positions = [order.index(layer) for layer in model.layers()]
    assert len(positions) >= 3
    assert positions == sorted(positions)
    assert list(model.train_flops()) == list(model.parts())
    held = []
    for name, part in model.parts().items():
        assert model.get_submodule(name) is part
        held += [f"{name}.{tensor}" for tensor in part.state_dict()]
    assert sorted(held) == sorted(model.state_dict())


def test_a_llama_compiles_without_a_graph_break():
    """Other models: ``tests/parallel/test_compile.py``."""
    model, tokens, targets = FAMILIES["llama"]()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, targets), model(tokens, targets))


def test_every_part_can_begin_a_stage(case):
    """A stage receives a leaf tensor that requires a gradient, and must give that gradient back."""
    model, inputs, targets = case
    *chain, last = model.parts().values()
    expected = gradients(model, lambda: model(inputs, targets))

    def staged():
        received, sent, x = [], [], inputs
        for part in chain:
            sent.append(part(x))
            x = sent[-1].detach().requires_grad_()
            received.append(x)
        loss = last(x, targets)
        torch.testing.assert_close(loss, model(inputs, targets), rtol=0, atol=0)
        torch.testing.assert_close(last(x), model(inputs), rtol=0, atol=0)
        loss.backward()
        for output, leaf in zip(reversed(sent), reversed(received), strict=True):
            output.backward(leaf.grad)

    for got, want in zip(gradients(model, staged), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def gradients(model, step):
    model.zero_grad()
    loss = step()
    if loss is not None:
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_loss_equals_default_loss(case):
    model, inputs, targets = case
    expected = gradients(model, lambda: default_loss(model(inputs), targets))
    torch.testing.assert_close(model(inputs, targets), default_loss(model(inputs), targets))
    for got, want in zip(gradients(model, lambda: model(inputs, targets)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_loss_is_fp32_in_low_precision(case, precision):
    model, inputs, targets = case
    exact = model(inputs, targets)
    cast_inputs(model, model.layers(), precision)
    Copies(model, model.layers(), DTYPES[precision])
    loss = model(inputs, targets)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    # Batch norm over three images of a few pixels multiplies what rounding did.
    rtol = 0.3 if isinstance(model, ResNet) else 0.03
    torch.testing.assert_close(loss, exact, rtol=rtol, atol=0)


SPARSE = {"key_value_heads": 2, "experts": 4, "active": 1, "expert_hidden": 64, "shared_experts": 1, "head_norm": True}


@pytest.mark.parametrize(("family", "options"), [(GPT, {}), (MoE, SPARSE)])
def test_initial_values_of_a_decoder(family, options):
    """As GPT-2 has them: of what is added to the stream they are smaller by √(2 · layers)."""
    model = filled(family, layers=8, heads=4, width=256, sequence_length=24, vocabulary=1000, **options)
    small = ("attention.output.weight", "mlp.down.weight", "shared.down.weight", "experts.down")
    for name, values in model.state_dict().items():
        if name.endswith("bias"):
            assert not values.any()
        elif "norm" in name:
            assert (values == 1).all()
        elif name.endswith("load"):
            assert (values == 1 / 4).all()
        else:
            std = 0.02 / 4 if name.endswith(small) else 0.02
            tolerance = 5 / math.sqrt(values.numel())  # five standard errors of a mean
            assert values.std().item() == pytest.approx(std, rel=tolerance), name
            assert abs(values.mean().item()) < tolerance * std, name
    tokens, targets = torch.randint(1000, (2, 4, 24))
    assert model(tokens, targets).item() == pytest.approx(math.log(1000), rel=0.02)


@pytest.mark.parametrize(("family", "options", "lines"), [
    (GPT, {"layers": 0, "heads": 5, "width": 32, "sequence_length": "long", "vocabulary": 1}, [
        "layers=0: must be a whole number of at least 1",
        "sequence_length=long: must be a whole number of at least 1",
        "vocabulary=1: must be a whole number of at least 2",
        "heads=5: must divide width=32; try 2, 4, 8",
    ]),
    (GPT, {"layers": 1, "heads": 0, "width": 32}, ["heads=0: must be a whole number of at least 1"]),
    (Llama, {"layers": 0, "heads": 6, "key_value_heads": 4, "width": 32, "hidden": 48, "rope_theta": 1,
             "rope_factor": 0.5}, [
        "layers=0: must be a whole number of at least 1",
        "heads=6: must divide width=32 into heads with an even number of features, which are rotated in pairs; "
        "try 2, 4, 8",
        "key_value_heads=4: must divide heads=6; try 2, 3, 6",
        "rope_theta=1: must be greater than 1",
        "rope_factor=0.5: must be at least 1 (no scaling)",
    ]),
    (ResNet, {"depth": 51, "classes": 1, "image_size": 16}, [
        "depth=51: is not the depth of a ResNet; try 18, 34, 50, 101, 152",
        "classes=1: must be a whole number of at least 2",
        "image_size=16: must be a whole number of at least 32",
    ]),
    (Toy, {"inputs": 0, "width": 1.5, "outputs": True, "layers": 1}, [
        "inputs=0: must be a whole number of at least 1", "width=1.5: must be a whole number of at least 1",
        "outputs=true: must be a whole number of at least 1", "layers=1: must be a whole number of at least 2",
    ]),
])  # fmt: skip
def test_all_refused_options_come_at_once(family, options, lines):
    assert refusal_of(family, **options).splitlines() == lines


class TestDefaultLoss:
    @pytest.mark.parametrize(("shape", "dim"), [((2, 5, 7), -1), ((2, 7, 5), 1)])
    def test_classes_last_or_second(self, shape, dim):
        outputs, targets = torch.randn(shape), torch.randint(7, (2, 5))
        expected = -outputs.log_softmax(dim).gather(dim, targets.unsqueeze(dim)).mean()
        torch.testing.assert_close(default_loss(outputs, targets), expected)

    def test_numbers(self):
        assert default_loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 2.0]])).item() == 2.0
        with pytest.raises(ValueError, match=r"\(2, 1\).*\(2,\)"):
            default_loss(torch.zeros(2, 1), torch.zeros(2))


def divided_among_ranks() -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """What each model that has roles computes whole, and divided by them; the weights of cut layers are halves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    outputs_of = {}
    for family, sequence in product(FAMILIES, (False, True)):
        torch.manual_seed(0)
        model, inputs, targets = FAMILIES[family]()
        kinds = {role.kind for role in model.roles().values()}
        if not kinds or (sequence and "scatter" not in kinds):
            continue
        whole = model(inputs).detach(), model(inputs, targets).detach()
        size = {name: weight.numel() for name, weight in model.named_parameters()}
        tensor.parallelize(model, model, mesh, sequence=sequence)
        cut = {name for name, weight in model.named_parameters() if weight.to_local().numel() * 2 == size[name]}
        roles = {name for name, role in model.roles().items() if role.kind in ("colwise", "rowwise", "vocabulary")}
        tied = {second.removesuffix(".weight") for _, second in model.tied()}
        assert {f"{name}.weight" for name in roles - tied} <= cut
        with loss_parallel():
            divided = model(inputs).detach(), model(inputs, targets).detach()
        outputs_of[f"{family}, {sequence}"] = [*zip(whole, divided, strict=True)]
    return outputs_of


@pytest.mark.ranks
def test_roles_keep_outputs():
    for of_rank in on_ranks(2, divided_among_ranks):
        with_stream = {"gpt", "untied_gpt", "llama", "tied_llama"}
        names = {f"{name}, False" for name in with_stream | {"toy_of_numbers", "toy_of_classes"}}
        assert set(of_rank) == names | {f"{name}, True" for name in with_stream}
        for pairs in of_rank.values():
            for whole, divided in pairs:
                torch.testing.assert_close(divided, whole)
