"""Head and MLP of a language model as they run on a GPU: kernels compiled for sm_90, and one chunk of the head."""

import pytest

from tests.virtual.conftest import Start
from tests.virtual.head import ROWS, VOCABULARY, WIDTH

#: What torch gives cuBLAS on Hopper: from 2.15 on for the time of each product.
WORKSPACE = 32 << 20


@pytest.mark.thorough  # runs on virtual GPUs launch the kernel too
@pytest.mark.parametrize("of", ["whole", "share"])
@pytest.mark.parametrize("how", ["", " compiled"])
def test_head_has_one_chunk_of_logits_and_its_kernels(start: Start, of, how):
    answers = start("head")[f"{of}{how}"]
    kernels = answers["kernels"]
    ours = {name: number for name, number in kernels.items() if name.startswith("_softmax_")}
    assert ours == (
        {"_softmax_cross_entropy": 2} if of == "whole" else {"_softmax_statistics": 2, "_softmax_gradient": 2}
    )
    products = {name: number for name, number in kernels.items() if "gemm" in name.lower() or "nvjet" in name}
    assert sum(products.values()) == 6  # three for each of two chunks
    chunk, weight = ROWS // 2 * VOCABULARY * 2, VOCABULARY * WIDTH * 4
    assert chunk < answers["peak"] < chunk + 3 * weight + WORKSPACE


@pytest.mark.thorough
def test_compiled_bias_is_summed_in_the_gradients_kernel(start: Start):
    backward = {name: n for name, n in start("head")["mlp"].items() if name.startswith("triton_") and "gelu_b" in name}
    assert list(backward.values()) == [1], backward
    assert "_sum" in next(iter(backward))
