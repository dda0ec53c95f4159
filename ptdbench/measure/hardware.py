"""The hardware and software of a run: versions, names and commit."""

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


def environment(device_type: str) -> dict[str, Any]:
    """Return properties of this machine and installation that a measurement may depend on, as JSON.

    For the device type ``cpu`` CUDA is not initialized, so that the process can fork. ``None``: absent or unknown.
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
    """Return the installed version of ptdbench, and in a checkout, whose files may be newer, the commit."""
    git = _git(Path(__file__).parents[2])
    package = f"ptdbench {_version('ptdbench') or '(not installed)'}"
    if git["git_commit"]:
        package += f", checkout at {git['git_commit'][:10]}{' with changes' * git['git_dirty']}"
    return package


def _version(package: str) -> str | None:
    """Read a version from package metadata, as importing the package can take seconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> dict[str, Any]:
    import torch

    # RCCL's version in a ROCm build; builds without either do not have the function.
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
        if match := re.search(r"Module .*?(\d+\.\d+(?:\.\d+)?) ", text):
            return match[1]
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
    oid, *lines = status.stdout.splitlines() or [""]
    commit = oid.removeprefix("# branch.oid ")
    if commit in ("", "(initial)"):
        return unknown
    return {"git_commit": commit, "git_dirty": any(not line.startswith("#") for line in lines)}


def _cpu_model() -> str:
    with suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()


def allow_tf32(on: bool) -> None:
    """Set both TF32 switches of this process, whose defaults differ: for products and for convolutions.

    By the older of torch's two interfaces: reading one interface after writing the other raises.
    """
    import torch

    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def is_tf32_allowed() -> bool:
    """Return whether either switch is set; MFU is then relative to TF32's peak."""
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
