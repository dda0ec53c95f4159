"""The hardware and software of a run: peaks of its devices, versions, names and commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ptdbench.launch import settings

_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_H100_SXM = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_H100_PCIE = {"fp32": 51.2, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0}
_H100_NVL = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}
_H20 = {"fp32": 44.0, "tf32": 74.0, "bf16": 148.0, "fp16": 148.0, "fp8": 296.0}
_B200 = {"fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_GB200 = {"fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}
_MI300X = {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9}
_V100_SXM = {"fp32": 15.7, "fp16": 125.0}
_V100_PCIE = {"fp32": 14.0, "fp16": 112.0}

#: Dense peak in TFLOP/s by the exact name that ``torch.cuda.get_device_name`` reports.
#:
#: ``fp32`` is without tensor cores, ``tf32`` is fp32 tensors on the tensor cores; 16-bit and 8-bit products accumulate
#: in fp32. Data sheets often print the figure with 2:4 sparsity, twice what dense matrices can reach.
DENSE_PEAKS: dict[str, dict[str, float]] = {
    # NVIDIA Tesla V100 and V100S data sheets (no bf16, no TF32)
    "Tesla V100-SXM2-16GB": _V100_SXM,
    "Tesla V100-SXM2-32GB": _V100_SXM,
    "Tesla V100-SXM3-32GB": _V100_SXM,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla V100S-PCIE-32GB": {"fp32": 16.4, "fp16": 130.0},
    # NVIDIA T4 data sheet
    "Tesla T4": {"fp32": 8.1, "fp16": 65.0},
    # NVIDIA A100 data sheet; SXM and PCIe differ in power, not in peak
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    # NVIDIA A800 data sheet: an A100 with fewer NVLinks
    "NVIDIA A800-SXM4-40GB": _A100,
    "NVIDIA A800-SXM4-80GB": _A100,
    "NVIDIA A800 80GB PCIe": _A100,
    # NVIDIA A10, A30 and A40 data sheets
    "NVIDIA A10": {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0},
    "NVIDIA A30": {"fp32": 10.3, "tf32": 82.0, "bf16": 165.0, "fp16": 165.0},
    "NVIDIA A40": {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7},
    # NVIDIA H100 Tensor Core GPU Architecture white paper (SXM5, PCIe); H100, H200 and GH200 data sheets
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _H100_NVL,
    "NVIDIA GH200 120GB": _H100_SXM,
    "NVIDIA GH200 480GB": _H100_SXM,
    "NVIDIA GH200 144G HBM3e": _H100_SXM,
    # NVIDIA H800 data sheet: an H100 with fewer NVLinks, and less fp64
    "NVIDIA H800": _H100_SXM,
    "NVIDIA H800 PCIe": _H100_PCIE,
    # NVIDIA H20 product brief, as reported by resellers: not on nvidia.com
    "NVIDIA H20": _H20,
    "NVIDIA H20-3e": _H20,
    # NVIDIA HGX B200 and GB200 NVL72 data sheets, divided by 8 and 72 GPUs and by 2 for sparsity
    "NVIDIA B200": _B200,
    "NVIDIA GB200": _GB200,
    # NVIDIA HGX B300 and GB300 NVL72 data sheets, likewise: they differ from the B200 in FP4 and FP64
    "NVIDIA B300 SXM6 AC": _B200,
    "NVIDIA GB300": _GB200,
    # NVIDIA L4, L40 and L40S data sheets
    "NVIDIA L4": {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5},
    "NVIDIA L40": {"fp32": 90.5, "tf32": 90.5, "bf16": 181.05, "fp16": 181.05, "fp8": 362.0},
    "NVIDIA L40S": {"fp32": 91.6, "tf32": 183.0, "bf16": 362.05, "fp16": 362.05, "fp8": 733.0},
    # NVIDIA Ampere GA102, Ada and RTX Blackwell white papers; accumulating in fp32 halves a GeForce
    "NVIDIA RTX A6000": {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8},
    "NVIDIA RTX A5000": {"fp32": 27.8, "tf32": 55.6, "bf16": 111.1, "fp16": 111.1},
    "NVIDIA RTX 6000 Ada Generation": {"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp16": 364.2, "fp8": 728.5},
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": {
        "fp32": 126.0, "tf32": 251.9, "bf16": 503.8, "fp16": 503.8, "fp8": 1007.6,
    },
    "NVIDIA GeForce RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0},
    "NVIDIA GeForce RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
    "NVIDIA GeForce RTX 5090": {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419.0},
    # AMD Instinct MI250X data sheet, halved: torch sees each of its two dies as a device (matrix cores)
    "AMD Instinct MI250X": {"fp32": 47.9, "bf16": 191.5, "fp16": 191.5},
    # AMD Instinct MI300X and MI325X data sheets (matrix cores)
    "AMD Instinct MI300X": _MI300X,
    "AMD Instinct MI325X": _MI300X,
    # AMD Instinct MI355X data sheet (matrix cores; it has no TF32)
    "AMD Instinct MI355X": {"fp32": 157.3, "bf16": 2516.6, "fp16": 2516.6, "fp8": 5033.2},
}  # fmt: skip


def dense_peak(device_name: str, dtype: str) -> tuple[float | None, str | None]:
    """Return the data sheet's dense peak of a device in FLOP/s, which is never guessed from a similar name.

    The name is that of ``torch.cuda.get_device_name``, or ``cpu``; the dtype is a key of :data:`DENSE_PEAKS`.

    Returns:
        ``(FLOP/s, None)``, or ``(None, reason)`` if no figure is on record.
    """
    if device_name == "cpu":
        return None, "a CPU has no data-sheet peak"
    peak = DENSE_PEAKS.get(device_name, {}).get(dtype)
    if peak is None:
        return None, f"no data-sheet peak on record for {device_name} in {dtype}"
    return peak * 1e12, None


def environment(device_type: str) -> dict[str, Any]:
    """Return properties of this machine and installation that a measurement may depend on.

    For the device type ``cpu`` CUDA is not initialized, so that the process can still fork. All values are JSON;
    ``None`` for what does not exist here or cannot be determined.
    """
    import torch

    return {
        "ptdbench": _version("ptdbench"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str
        "torchvision": _version("torchvision"),
        "numpy": _version("numpy"),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        **(_gpus() if device_type == "cuda" else dict.fromkeys(("tf32", "cudnn", "nccl", "driver")) | {"devices": []}),
        **_git(Path(__file__).parents[2]),
        "cpu": _cpu_model(),
        "cores": len(settings.own_cores()),
        "host": platform.node(),
        "os": platform.platform(),
        "settings": settings.recorded(os.environ),
    }


def this_package() -> str:
    """Return the installed version of ptdbench; in a checkout, whose files may be newer, also the commit."""
    git = _git(Path(__file__).parents[2])
    found = f"ptdbench {_version('ptdbench') or '(not installed)'}"
    if git["git_commit"]:
        found += f", checkout at {git['git_commit'][:10]}{' with changes' * git['git_dirty']}"
    return found


def _version(package: str) -> str | None:
    """Read a version from package metadata, as importing the package can take seconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> dict[str, Any]:
    import torch

    # The version of RCCL in a ROCm build; builds without either lack the function too.
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None

    return {
        "tf32": is_tf32_allowed(),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": nccl,
        "driver": _driver(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _driver() -> str | None:
    """Return the GPU driver's version from the kernel module, which is faster than nvidia-smi."""
    with suppress(OSError):
        return Path("/sys/module/amdgpu/version").read_text().strip()
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"Module .*?(\d+\.\d+(?:\.\d+)?) ", text)
        return found[1] if found else None
    return None


def _git(root: Path) -> dict[str, Any]:
    """Return the commit of the checkout at ``root`` and whether files differ from it; ``None`` without a checkout."""
    unknown = {"git_commit": None, "git_dirty": None}
    if not (root / ".git").exists():  # an installed package may be inside another checkout
        return unknown
    command = ["git", "--no-optional-locks", "-C", str(root), "status", "--porcelain=v2", "--branch"]
    try:
        status = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return unknown
    lines = status.stdout.splitlines()
    commit = lines[0].removeprefix("# branch.oid ") if lines else "(initial)"
    if commit == "(initial)":
        return unknown
    return {"git_commit": commit, "git_dirty": any(not line.startswith("#") for line in lines)}


def _cpu_model() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def allow_tf32(on: bool) -> None:
    """Set both TF32 switches of this process: for products and for convolutions of fp32 tensors.

    Their defaults in torch are opposite. This uses the older of torch's two interfaces, which keeps both consistent:
    reading one interface after writing the other raises.
    """
    import torch

    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def is_tf32_allowed() -> bool:
    """Return whether either switch is set; if so, MFU is relative to the higher peak."""
    import torch

    return bool(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)


@contextmanager
def tf32_allowed(on: bool) -> Iterator[None]:
    """Return a context with both switches set."""
    import torch

    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allow_tf32(on)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
