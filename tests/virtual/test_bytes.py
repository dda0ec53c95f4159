"""Bytes of kernels in the log of a virtual GPU."""

from typing import Any

import pytest

from ptdbench.prediction.log import Flag
from tests.virtual.conftest import Start

#: Elements of the tensor of most calls, [64, 512], which is in bf16.
N = 64 * 512

#: Bytes of a row's mean and its standard deviation in fp32.
STATISTICS = 2 * 4

BYTES = {
    "add": [3 * 2 * N],
    "add two types": [(2 + 4 + 4) * N],
    "add a column": [2 * 2 * N + 2 * 64],
    "scale": [2 * 2 * N],
    "compare": [2 * N + 2 * 64 + N],  # a truth has one byte
    "where": [4 * N + N, N + 3 * 4 * N],
    "power": [2 * 4 * N + 8],  # of a number of another type, behind an address in the functor
    "transpose": [2 * 2 * N],
    "narrow": [(4 + 2) * N],
    "widen": [(2 + 4) * N],
    "widen columns": [(2 + 4) * N // 2],
    "multiply complex": [2 * 8 * N + 8 * 512],
    "sum of rows": [2 * N + 2 * 512],
    "mean": [4 * N + 4 * 64],
    "norm": [2 * 2 * N + 64 * STATISTICS + 2 * 2 * 512],
    "norm backward": [3 * 2 * N + 64 * STATISTICS + 2 * 512],
    # The gradients of the weights read the input and its gradient once more.
    "norm and weights backward": [3 * 2 * N + 64 * STATISTICS + 2 * 512, 2 * 2 * N + 64 * STATISTICS + 2 * 2 * 512],
    "softmax": [2 * 4 * 64 * 3000],
    "small softmax": [2 * 2 * N],
    "log softmax backward": [3 * 2 * 64 * 3000],
    "loss": [64 * (4 + 8)],
    "concatenate": [2 * 2 * 64 * (512 + 512 + 100)],
    "look up": [64 * (2 * 4 * 512 + 8)],
    "adam": [3 * 70_000 * 2 * (4 + 3)],  # reads four lists of three tensors, and writes three
    "scale a list": [3 * 70_000 * 2 * 2],
    "norms of a list": [3 * 70_000 * 2],
    "copy a list": [3 * 70_000 * (4 + 2)],
    "split": [2 * 2 * N],
    "chunks": [2 * 2 * N + 2 * 4 * N],  # of two tensors in bf16, to fp32
    "product": [2 * (64 * 512 + 512 * 300 + 64 * 300)],
    "product in fp32": [2 * (64 * 512 + 512 * 300) + 4 * 64 * 300],
    # Queries and results of 8 heads, keys and values of 2, and a number for each query; backward the gradients too.
    "attention": [2 * 2 * (2 * 8 + 2 * 2) * 256 * 64 + 4 * 2 * 8 * 256],
    "attention backward": [2 * 2 * 2 * (2 * 8 + 2 * 2) * 256 * 64 + 4 * 2 * 8 * 256],
    "convolve": [2 * (8 * 64 * 32**2 + 128 * 64 * 3**2 + 8 * 128 * 32**2)],
    "convolve volumes": [2 * (2 * 4 * 6 * 10 * 12 + 8 * 4 * 3**3 + 2 * 8 * 6 * 10 * 12)],
    "drop": [2 * 2 * N + N],
}


@pytest.fixture(scope="module")
def answers(start: Start) -> dict[str, Any]:
    return start("families")


@pytest.mark.parametrize("call", BYTES)
def test_bytes_of_a_call(answers, call):
    """Without what prepares it: casts of a list, and a norm's fill and its last sum, which is a guess."""
    kernels = [size for size, flags, *_ in answers["calls"][call] if not flags & Flag.GUESSED]
    if " list" in call:
        kernels = [max(kernels)]
    assert kernels == BYTES[call]


def test_shapes_of_products_attentions_and_convolutions(answers):
    assert answers["calls"]["convolve"][0][2] == [8, 64, 32, 32, 128, 64, 3, 3]
    assert answers["calls"]["convolve volumes"][0][2] == [2, 4, 6, 10 * 12, 8, 4, 3, 3 * 3]
    assert answers["calls"]["product"][0][2:] == [[300, 64, 512, 1, 0, 0, 0, 0], 0]
    for call, products in (("attention", 2), ("attention backward", 5)):
        ((_, flags, dims, _),) = answers["calls"][call]
        assert flags == Flag.CAUSAL
        assert dims == [2, 8, 256, 64, 256, 2, products, 64]


@pytest.mark.parametrize("layer", ["gpt", "llama"])
def test_layer_moves_what_its_operators_take_and_give(answers, layer):
    of_kernels, of_operators = {}, {}
    for family, (kernels, operators) in answers["layers"][layer].items():
        name = "pointwise" if family == "concatenation" else family  # of five dimensions: by copies
        of_kernels[name] = of_kernels.get(name, 0) + kernels
        of_operators[name] = of_operators.get(name, 0) + operators
    of_operators["norm backward"] += 2 * 2 * 2 * 8 * 256 * 512  # the inputs once more, for the weights, of two norms
    assert of_kernels == pytest.approx(of_operators, rel=0.01)
