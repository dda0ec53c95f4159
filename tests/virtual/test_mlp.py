"""A GPT's MLP as it runs on a GPU."""

import pytest

from tests.virtual.conftest import Start


@pytest.mark.thorough
def test_compiled_bias_is_summed_in_the_gradients_kernel(start: Start):
    backward = [name for name in start("mlp")["kernels"] if name.startswith("triton_") and "gelu_backward" in name]
    assert len(backward) == 1, backward
    assert "_sum" in backward[0]
