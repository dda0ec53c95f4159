import json
import platform
import shutil
import subprocess
from types import SimpleNamespace

import numpy
import pytest
import torch

from ptdbench.measure import gpu_state, hardware
from ptdbench.measure.hardware import DENSE_PEAKS, dense_peak, environment

NVIDIA = "/proc/driver/nvidia/version"


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


def test_nothing_is_guessed():
    unknown = [
        "NVIDIA H100",  # no device says just this
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice is not the device
        "NVIDIA A100-SXM-64GB",  # another chip than the A100 of the data sheet
        "Tesla V100-SXM2-32GB",  # a known device without such units
    ]
    for name in unknown:
        assert dense_peak(name, "bf16") == (None, f"no data-sheet peak on record for {name} in bf16")
    assert dense_peak("cpu", "fp32") == (None, "a CPU has no data-sheet peak")


@pytest.mark.parametrize("name", DENSE_PEAKS)
def test_peaks_are_dense_and_ordered(name):
    peaks = DENSE_PEAKS[name]
    assert set(peaks) <= {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert peaks.get("fp8", 2 * peaks["fp16"]) == pytest.approx(2 * peaks["fp16"], rel=0.02)  # everywhere so far
    assert peaks["fp32"] <= peaks.get("tf32", peaks["fp32"]) < peaks["fp16"] == peaks.get("bf16", peaks["fp16"])


def test_environment_says_what_runs_here_and_leaves_cuda_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialized"))
    found = environment("cpu")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    expected = {**versions, "host": platform.node(), "devices": []}
    assert {name: found[name] for name in expected} == expected
    assert found["cores"] >= 1
    assert found["cpu"]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.gpu
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
    assert gpu_state.inspect().reason == "NVML supports only NVIDIA GPUs, and these are AMD's"
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    assert gpu_state.identity(torch.device("cuda", 0)) == "PCI-0:c1:0"


@pytest.mark.parametrize(
    ("path", "text", "version"),
    [
        ("/sys/module/amdgpu/version", "6.12.12\n", "6.12.12"),
        (NVIDIA, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23 2024\nGCC", "550.54.15"),
        (NVIDIA, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release (root@n)", "550.54.15"),
    ],
)
def test_driver_version_is_read_from_the_kernel_module(path, text, version, monkeypatch):
    def read(asked):
        if str(asked) != path:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(hardware.Path, "read_text", read)
    assert hardware._driver() == version


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_commit_and_dirt_but_not_of_a_checkout_around_an_installed_package(tmp_path):
    def git(*arguments):
        words = ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e@example.org", *arguments]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    unknown = {"git_commit": None, "git_dirty": None}
    git("init", "-q")
    assert hardware._git(tmp_path) == unknown  # nothing committed yet
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "file").write_text("one")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    assert hardware._git(tmp_path) == {"git_commit": git("rev-parse", "HEAD"), "git_dirty": False}
    assert hardware._git(tmp_path / "packages") == unknown
    (tmp_path / "packages" / "file").write_text("two")
    assert hardware._git(tmp_path)["git_dirty"] is True


SWITCHES = {"products": torch.backends.cuda.matmul, "convolutions": torch.backends.cudnn.conv}


@pytest.fixture
def as_before():
    with hardware.tf32_allowed(True):
        yield


@pytest.mark.parametrize("on", [False, True])
def test_both_switches_of_tf32_are_set_in_both_of_torchs_interfaces(as_before, on):
    """The newer one speaks of ieee, or of none where nothing else is set."""
    hardware.allow_tf32(on)
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == hardware.is_tf32_allowed() == on
    assert {name: switch.fp32_precision == "tf32" for name, switch in SWITCHES.items()} == dict.fromkeys(SWITCHES, on)
    assert torch.get_float32_matmul_precision() == ("high" if on else "highest")  # what the compiler reads


def test_torchs_own_default_is_not_fp32(as_before):
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    assert hardware.is_tf32_allowed()
    with hardware.tf32_allowed(False):
        assert not hardware.is_tf32_allowed()
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32
