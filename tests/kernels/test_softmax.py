"""Kernels of logits, by Triton's interpreter; what they are without it is in ``test_linear_cross_entropy.py``."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from ptdbench.kernels import softmax
from tests.conftest import ROOT

#: In roundings of an fp32 of size 1: a sum of 1e4 exponentials, and a logarithm.
MOST = 8


@pytest.fixture(scope="module")
def results(environ):
    if find_spec("triton") is None:
        pytest.skip("left out: Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        cwd=ROOT, env={**environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("of", ["ordinary", "extreme", "shared"])
def test_kernels_equal_fp64_up_to_rounding(results, of):
    """Of fp32, bf16 and fp16, of vocabularies of several blocks, and with logits at the ends of what a dtype holds."""
    assert len(results[of]) in (3, 9)
    assert {case: worst for case, worst in results[of].items() if not max(worst) <= MOST} == {}


def test_invalid_target_has_a_nan_loss(results):
    assert results["outside"] == [False, True, False]


def test_head_is_equal_eager_and_compiled(results):
    assert set(results["whole"]) == {"eager", "graph", "share", "graph of a share"}
    assert max(results["whole"].values()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocabulary"), [(7, 5), (33, 50257), (9, 128256), (17000, 128256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gpu_kernels_equal_torch(dtype, rows, vocabulary):
    """Up to more elements than 2**31, of which the last rows are looked at."""
    if dtype == torch.float32 and rows * vocabulary > 2**31:
        pytest.skip("takes the memory of large GPUs")
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator, device="cuda", dtype=dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator, device="cuda")
    last = logits[-32:].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(last, targets[-32:], reduction="none")
    expected.sum().backward()
    losses, gradient = softmax.cross_entropy_(logits, targets, None, gradient=True)
    torch.testing.assert_close(losses[-32:].double(), expected.detach(), rtol=1e-5, atol=1e-5)
    off = (gradient[-32:].double() - last.grad).norm() / last.grad.norm()
    assert off < {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]


def test_kernels_need_ampere_and_triton(monkeypatch):
    class Properties:
        major = 8

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(softmax, "_has_triton", lambda device: True)
    assert [softmax.has_kernels(device) for device in (torch.device("cpu"), torch.device("meta"), gpu)] == [
        False, False, True,
    ]  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not softmax.has_kernels(gpu)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(Properties, "major", 7)
    assert not softmax.has_kernels(gpu)


def test_missing_triton_warns():
    softmax._has_triton.cache_clear()
    with pytest.warns(UserWarning, match=r"without its Triton kernel, which does not run here: \S"):
        assert not softmax._has_triton(torch.device("cpu"))
    softmax._has_triton.cache_clear()
