import json
import platform
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch

from ptdbench.measure import gpu_state, hardware
from ptdbench.measure.hardware import DENSE_PEAKS, dense_peak, environment


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156), ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H200", "fp8", 1978.9), ("NVIDIA B300 SXM6 AC", "fp8", 4500), ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("AMD Instinct MI250X", "bf16", 191.5),  # of a die
    ],
)  # fmt: skip
def test_known_peaks(name, dtype, tflops):
    assert dense_peak(name, dtype) == (pytest.approx(tflops * 1e12), None)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA H100", "bf16"),  # no device says just this
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),  # a slice is not the device
        ("NVIDIA A100-SXM-64GB", "bf16"),  # another chip than the A100 of the data sheet
        ("Tesla V100-SXM2-32GB", "bf16"),  # a known device without such units
        ("CPU", "fp32"),
    ],
)
def test_nothing_is_guessed(name, dtype):
    peak, reason = dense_peak(name.lower() if name == "CPU" else name, dtype)
    assert (peak, name in reason, name == "CPU" or dtype in reason) == (None, True, True)


@pytest.mark.parametrize("name", DENSE_PEAKS)
def test_peaks_are_dense_and_ordered(name):
    peaks = DENSE_PEAKS[name]
    assert set(peaks) <= {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert peaks.get("fp8", 2 * peaks["fp16"]) == pytest.approx(2 * peaks["fp16"], rel=0.02)  # everywhere so far
    assert peaks["fp32"] <= peaks.get("tf32", peaks["fp32"]) < peaks["fp16"] == peaks.get("bf16", peaks["fp16"])


def test_environment_says_what_runs_here():
    found = environment("cpu")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    expected = {**versions, "host": platform.node(), "devices": []}
    assert {name: found[name] for name in expected} == expected
    assert found["cores"] >= 1
    assert found["cpu"]
    assert json.loads(json.dumps(found)) == found


def test_environment_of_a_cpu_leaves_cuda_alone():
    code = "from ptdbench.measure.hardware import environment; environment('cpu')\nimport torch\n"
    code += "raise SystemExit(torch.cuda.is_initialized())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_environment_of_a_gpu():
    found = environment("cuda")
    assert found["devices"] == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert found["nccl"].count(".") >= 2
    assert json.loads(json.dumps(found)) == found


def test_a_rocm_build_is_asked_for_nothing_of_nvidias(monkeypatch):
    """RCCL answers for NCCL where it is built in, and MIOpen for cuDNN."""
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: pytest.fail("there is no NCCL"))
    monkeypatch.setattr(gpu_state.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    found = environment("cuda")
    assert (found["cuda"], found["rocm"], found["nccl"]) == (None, "6.4.1", None)
    assert found["devices"] == ["AMD Instinct MI300X"]
    assert gpu_state.inspect()["reason"] == "NVML knows NVIDIA's GPUs, and these are AMD's"
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    assert gpu_state.identity(torch.device("cuda", 0)) == "PCI-0:c1:0"


def test_the_driver_of_amd(monkeypatch, tmp_path):
    read = {"/sys/module/amdgpu/version": "6.12.12\n"}
    monkeypatch.setattr(hardware.Path, "read_text", lambda path: read[str(path)])
    assert hardware._driver() == "6.12.12"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 12.2",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (root@host)",
    ],
)
def test_driver_version_is_read_from_the_kernel_module(text, monkeypatch):
    def read(path):
        if "amdgpu" in str(path):
            raise FileNotFoundError
        return text

    monkeypatch.setattr(hardware.Path, "read_text", read)
    assert hardware._driver() == "550.54.15"


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")

    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        done = subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    return tmp_path, git


def test_git_commit_and_dirt(checkout):
    root, git = checkout
    assert hardware._git(root) == {"git_commit": None, "git_dirty": None}  # nothing committed yet
    (root / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert hardware._git(root) == {"git_commit": git("rev-parse", "HEAD"), "git_dirty": False}
    (root / "file").write_text("two")
    assert hardware._git(root)["git_dirty"] is True


def test_git_is_not_asked_for_a_package_installed_inside_another_checkout(checkout):
    root, git = checkout
    git("commit", "-q", "--allow-empty", "-m", "one")
    packages = root / "site-packages"
    packages.mkdir()
    assert hardware._git(packages) == {"git_commit": None, "git_dirty": None}
