"""The hardware and software of a run: peaks of its devices, versions, names and commit."""

from __future__ import annotations

import csv
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

#: Dense peak in TFLOP/s by the exact name that ``torch.cuda.get_device_name`` reports; ``peaks.csv`` names the sources.
#:
#: ``fp32`` is without tensor cores, ``tf32`` is fp32 tensors on the tensor cores; 16-bit and 8-bit products accumulate
#: in fp32. Data sheets often print the figure with 2:4 sparsity, twice what dense matrices can reach.
DENSE_PEAKS: dict[str, dict[str, float]] = {
    row["name"]: {dtype: float(row[dtype]) for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8") if row[dtype]}
    for row in csv.DictReader(Path(__file__).with_name("peaks.csv").read_text().splitlines())
}


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
