"""Which formats of arithmetic a device has."""

from __future__ import annotations

import os
from typing import Any

import torch

from ptdbench.parallel import fp8
from ptdbench.problems import Problem, require, try_these

#: NVIDIA's libraries read it before what torch asks of them: 0: never TF32.
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"

#: The lowest compute capability with units for a format, and what to try below.
_SINCE = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
_OTHERS = {"tf32": ("fp32", "fp16"), "bf16": ("fp16",), "fp8": ("fp16", "bf16")}


def check(precision: object, device_type: str) -> None:
    """Raise ConfigError for a precision that this kind of device lacks, or that the environment overrides.

    Args:
        precision: The option, which may still be invalid.
        device_type: ``cpu`` or ``cuda``.
    """
    override = os.environ.get(TF32_OVERRIDE)
    if precision == "fp8" and device_type == "cpu":
        require(Problem("precision", precision, "FP8 is a format of GPUs", "try fp32, bf16"))
    if precision == "fp8" and not fp8.is_installed():
        rule = "needs the package torchao, which is not installed"
        require(Problem("precision", precision, rule, "try pip install 'ptdbench[fp8]', or bf16"))
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
    if device.type == "cpu":
        return
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:  # capabilities are other numbers there
        properties: Any = torch.cuda.get_device_properties(device) if precision == "fp8" else None
        if properties and not properties.gcnArchName.startswith(("gfx94", "gfx95")):
            require(Problem("precision", precision, f"{name} has no FP8 units", "try bf16"))
        return
    check_capability(precision, name, torch.cuda.get_device_capability(device))


def check_capability(precision: object, name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a precision that an NVIDIA GPU of this name and compute capability lacks."""
    if not isinstance(precision, str) or precision not in _SINCE or capability >= _SINCE[precision]:
        return
    rule = f"{name} (compute capability {capability[0]}.{capability[1]}) has no {precision.upper()} units"
    rule += ", and torch emulates it slowly" if precision == "bf16" else ""
    require(Problem("precision", precision, rule, try_these(_OTHERS[precision])))
