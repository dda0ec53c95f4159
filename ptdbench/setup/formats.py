"""Which formats of arithmetic a device has."""

from __future__ import annotations

import os

import torch

from ptdbench.problems import Problem, require

#: NVIDIA's libraries read it before what torch asks of them: 0: never TF32.
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


def check(precision: object, device_type: str) -> None:
    """Raise ConfigError for a precision that this kind of device lacks, or that the environment overrides.

    Args:
        precision: The option, which may still be invalid.
        device_type: ``cpu`` or ``cuda``.
    """
    override = os.environ.get(TF32_OVERRIDE)
    if precision == "tf32" and device_type == "cpu":
        require(Problem("precision", precision, "TF32 is a format of GPUs", "try fp32, bf16"))
    if override is None or device_type == "cpu" or precision not in ("fp32", "tf32"):
        return
    if (override == "0") != (precision == "fp32"):
        other = "fp32" if override == "0" else "tf32"
        rule = f"is overridden in NVIDIA's libraries by {TF32_OVERRIDE}={override} in the environment"
        require(Problem("precision", precision, rule, f"unset it, or try {other}"))


def check_gpu(precision: str, device: torch.device) -> None:
    """Raise ConfigError for a precision that this GPU lacks; asking initializes CUDA."""
    if device.type == "cpu" or torch.version.hip:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= (8, 0) or precision not in ("tf32", "bf16"):
        return
    name = torch.cuda.get_device_name(device)
    rule = f"{name} (compute capability {major}.{minor}) has no {precision.upper()} units"
    rule += ", and torch emulates it slowly" if precision == "bf16" else ""
    require(Problem("precision", precision, rule, "try fp16" if precision == "bf16" else "try fp32, fp16"))
