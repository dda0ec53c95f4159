"""Batch normalization over two ranks is that of one process over the joined batch."""

import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ptdbench.kernels.batchnorm import over_ranks, synchronize_batchnorm
from tests.parallel.ranks import on_ranks

pytestmark = pytest.mark.ranks


class Rectified(nn.BatchNorm2d):
    """As timm's BatchNormAct2d, which also counts batches itself."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        running, affine = (self.running_mean, self.running_var), (self.weight, self.bias)
        return F.batch_norm(input, *running, *affine, self.training, self.momentum, self.eps).relu()


class Doubled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {}, "average of all batches": {"momentum": None}, "nothing to train": {"affine": False},
    "nothing tracked": {"track_running_stats": False}, "rectified": {"kind": Rectified}, "doubled": {"kind": Doubled},
}  # fmt: skip


def layer(options: dict[str, Any]) -> nn.BatchNorm2d:
    made = options.get("kind", nn.BatchNorm2d)(3, **{name: options[name] for name in options if name != "kind"})
    if made.affine:
        with torch.no_grad():
            made.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
            made.bias.copy_(torch.tensor([0.0, -1.0, 3.0]))
    return made


def batches() -> list[tuple[Tensor, Tensor]]:
    """Three batches and what their outputs are weighed with; the ranks' halves differ, and their mean is large."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 4, 3, 5, 5, generator=generator) * torch.arange(1, 5).view(4, 1, 1, 1) + 100
    return list(zip(inputs, torch.randn(3, 4, 3, 5, 5, generator=generator), strict=True))


def trained(norm: nn.BatchNorm2d, rows: slice) -> dict[str, Any]:
    """Outputs, gradients and statistics of three steps, and what the layer then does outside of training."""
    outputs, gradients = [], []
    for whole, weights in batches():
        inputs = whole[rows].clone().requires_grad_()
        result = norm(inputs)
        (result * weights[rows]).sum().backward()
        outputs.append(result.detach())
        gradients.append(inputs.grad)
    weight_gradients = [parameter.grad for parameter in norm.parameters()]
    norm.eval()
    outside = norm(batches()[0][0][rows]).detach()
    return {
        "outputs": outputs, "input gradients": gradients, "outside of training": outside,
        "weight gradients": weight_gradients, "statistics": {n: b.clone() for n, b in norm.named_buffers()},
    }  # fmt: skip


def in_rank() -> dict[Any, Any]:
    rank, seen = dist.get_rank(), {"narrow": narrow_input(), "compiled": compiled()}
    for name, options in LAYERS.items():
        model = nn.Sequential(layer(options))
        synchronize_batchnorm(model, dist.group.WORLD, torch.device("cpu"))
        seen[name] = trained(model[0], slice(2 * rank, 2 * rank + 2))
    return seen


def compiled() -> tuple[Tensor, Tensor]:
    """The gradient of an input with and without ``torch.compile``, which makes one graph; a warning is an error."""
    inputs, weights = batches()[dist.get_rank()]
    normalize = partial(over_ranks, dist.group.WORLD, running_mean=None, running_var=None, training=True)
    gradients = []
    for function in (normalize, torch.compile(normalize, fullgraph=True, backend="aot_eager")):
        leaf = inputs.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "torch.distributed")
            (function(leaf) * weights).sum().backward()
        gradients.append(leaf.grad)
    return gradients[0], gradients[1]


def test_compiled_as_one_graph():
    for of_rank in of_ranks():
        torch.testing.assert_close(*of_rank["compiled"], rtol=1e-4, atol=1e-4)


def test_on_gpus_the_layer_is_torchs(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    model = nn.Sequential(norm := layer({}))
    synchronize_batchnorm(model, "the group", torch.device("cuda"))
    assert (model[0], type(norm), norm.process_group) == (norm, nn.SyncBatchNorm, "the group")
    synchronize_batchnorm(other := Rectified(3), "the group", torch.device("cuda"))
    assert Rectified in type(other).__bases__  # whose forward it keeps


@cache
def of_ranks() -> list[dict[Any, Any]]:
    return on_ranks(2, in_rank)


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_equal_one_process_with_all_samples(name):
    expected = trained(layer(LAYERS[name]), slice(0, 4))
    ours = [of_rank[name] for of_rank in of_ranks()]
    close = {"rtol": 1e-4, "atol": 1e-4}  # inputs of 100 leave five digits of what lies around them
    for what in ("outputs", "input gradients"):
        joined = [torch.cat(pair) for pair in zip(ours[0][what], ours[1][what], strict=True)]
        torch.testing.assert_close(joined, expected[what], **close)
    for both in zip(
        ours[0]["weight gradients"], ours[1]["weight gradients"], expected["weight gradients"], strict=True
    ):
        torch.testing.assert_close(both[0] + both[1], both[2], **close)
    for rank, rows in enumerate((slice(0, 2), slice(2, 4))):
        torch.testing.assert_close(ours[rank]["statistics"], expected["statistics"], **close)
        if name != "nothing tracked":
            torch.testing.assert_close(
                ours[rank]["outside of training"], expected["outside of training"][rows], **close
            )


def test_halves_alone_differ():
    """Or the comparison above would say nothing."""
    whole, half = trained(layer({}), slice(0, 4)), trained(layer({}), slice(0, 2))
    assert (whole["outputs"][0][:2] - half["outputs"][0]).abs().max() > 0.1


def test_narrow_inputs_have_fp32_statistics():
    """Inputs around 100, of which bf16 keeps two digits: their squares and sums are fp32, and the output is bf16."""
    for inputs, outputs, mean, variance in (of_rank["narrow"] for of_rank in of_ranks()):
        assert outputs.dtype == torch.bfloat16
        assert mean.dtype == variance.dtype == torch.float32
        expected = nn.BatchNorm2d(3, momentum=1.0)
        want = expected(inputs.float())
        torch.testing.assert_close(mean, expected.running_mean, rtol=1e-5, atol=0)
        torch.testing.assert_close(variance, expected.running_var, rtol=1e-4, atol=0)
        torch.testing.assert_close(outputs.float(), want[: len(outputs)], rtol=1e-2, atol=1e-2)


def narrow_input() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same samples on both ranks, so that the statistics of two copies are those of one, but for the count."""
    torch.manual_seed(0)
    half = (torch.randn(4, 3, 5, 5) + 100).bfloat16()
    norm = nn.BatchNorm2d(3, momentum=1.0)
    synchronize_batchnorm(norm, dist.group.WORLD, torch.device("cpu"))
    outputs = norm(half).detach()
    return torch.cat([half, half]), outputs, norm.running_mean, norm.running_var
