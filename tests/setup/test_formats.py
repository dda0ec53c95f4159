from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ptdbench.problems import ConfigError
from ptdbench.setup import checks

GPU = torch.device("cuda", 0)


def refused(call, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_cpu_has_no_tf32(monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert refused(checks.check_precision, "tf32", "cpu") == "precision=tf32: TF32 is a format of GPUs; try fp32, bf16"
    for precision in ("fp32", "bf16", "fp16", "nonsense"):  # which is refused elsewhere
        checks.check_precision(precision, "cpu")
    checks.check_precision("tf32", "cuda")


@pytest.mark.parametrize(("override", "wrong", "right"), [("0", "tf32", "fp32"), ("1", "fp32", "tf32")])
def test_what_the_environment_overrides_is_refused(monkeypatch, override, wrong, right):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    assert refused(checks.check_precision, wrong, "cuda") == (
        f"precision={wrong}: is overridden in NVIDIA's libraries by NVIDIA_TF32_OVERRIDE={override} in the "
        f"environment; unset it, or try {right}"
    )
    for precision in (right, "bf16", "fp16"):
        checks.check_precision(precision, "cuda")
    checks.check_precision("fp32", "cpu")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a compute capability."""

    def be(name: str, *capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)

    return be


def test_bf16_and_tf32_are_refused_where_they_are_emulated(gpu):
    gpu("Tesla V100-SXM2-32GB", 7, 0)
    assert refused(checks.check_gpu_precision, "bf16", GPU) == (
        "precision=bf16: Tesla V100-SXM2-32GB (compute capability 7.0) has no BF16 units, and torch emulates it "
        "slowly; try fp16"
    )
    assert "has no TF32 units; try fp32, fp16" in refused(checks.check_gpu_precision, "tf32", GPU)
    for precision in ("fp32", "fp16"):
        checks.check_gpu_precision(precision, GPU)
    gpu("NVIDIA A100-SXM4-80GB", 8, 0)
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        checks.check_gpu_precision(precision, GPU)


def test_capabilities_of_amd_are_other_numbers(gpu, monkeypatch):
    gpu("AMD Instinct MI100", 9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    checks.check_gpu_precision("bf16", GPU)


def test_fp8_is_refused_without_a_gpu_its_units_or_torchao(gpu, monkeypatch):
    assert refused(checks.check_precision, "fp8", "cpu") == "precision=fp8: FP8 is a format of GPUs; try fp32, bf16"
    monkeypatch.setattr(checks.fp8, "is_installed", lambda: False)
    assert refused(checks.check_precision, "fp8", "cuda") == (
        "precision=fp8: needs the package torchao, which is not installed; try pip install 'ptdbench[fp8]', or bf16"
    )
    monkeypatch.setattr(checks.fp8, "is_installed", lambda: True)
    checks.check_precision("fp8", "cuda")
    gpu("NVIDIA A100-SXM4-80GB", 8, 0)
    assert refused(checks.check_gpu_precision, "fp8", GPU) == (
        "precision=fp8: NVIDIA A100-SXM4-80GB (compute capability 8.0) has no FP8 units; try fp16, bf16"
    )
    for name, capability in (("NVIDIA L4", (8, 9)), ("NVIDIA H200", (9, 0))):
        gpu(name, *capability)
        checks.check_gpu_precision("fp8", GPU)


def test_fp8_on_amd_goes_by_the_architecture(gpu, monkeypatch):
    gpu("AMD Instinct MI250X", 9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    architecture = "gfx90a:sramecc+:xnack-"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=architecture))
    assert (
        refused(checks.check_gpu_precision, "fp8", GPU)
        == "precision=fp8: AMD Instinct MI250X has no FP8 units; try bf16"
    )
    architecture = "gfx942:sramecc+:xnack-"
    checks.check_gpu_precision("fp8", GPU)


def test_a_cpu_is_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: pytest.fail("asked"))
    checks.check_gpu_precision("bf16", torch.device("cpu"))
