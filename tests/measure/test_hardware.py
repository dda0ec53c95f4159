import json
import platform
import shutil
import subprocess
from types import SimpleNamespace

import numpy
import pytest
import torch

from ptdbench.measure import hardware, node_state
from ptdbench.measure.hardware import environment

NVIDIA = "/proc/driver/nvidia/version"


def test_environment_of_a_cpu_leaves_cuda_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialized"))
    facts = environment("cpu")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    expected = {**versions, "host": platform.node(), "devices": []}
    assert {name: facts[name] for name in expected} == expected
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.gpu
def test_environment_of_a_gpu():
    facts = environment("cuda")
    assert facts["devices"] == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert facts["nccl"].count(".") >= 2
    assert json.loads(json.dumps(facts)) == facts


def test_rocm_build_calls_nothing_of_nvidia(monkeypatch):
    """RCCL answers for NCCL where it is built in, and MIOpen for cuDNN."""
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: pytest.fail("there is no NCCL"))
    monkeypatch.setattr(node_state.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    facts = environment("cuda")
    assert (facts["cuda"], facts["rocm"], facts["nccl"]) == (None, "6.4.1", None)
    assert facts["devices"] == ["AMD Instinct MI300X"]
    assert node_state.inspect_gpus().reason == "NVML supports only NVIDIA GPUs, not AMD's"
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    assert node_state.gpu_identity(torch.device("cuda", 0)) == "PCI-0:c1:0"


@pytest.mark.parametrize(("path", "text", "version"), [
    ("/sys/module/amdgpu/version", "6.12.12\n", "6.12.12"),
    (NVIDIA, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23 2024\nGCC", "550.54.15"),
    (NVIDIA, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release (root@n)", "550.54.15"),
])  # fmt: skip
def test_driver_version_is_read_from_the_kernel_module(path, text, version, monkeypatch):
    def read(asked):
        if str(asked) != path:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(hardware.Path, "read_text", read)
    assert hardware._driver() == version


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_state_is_that_of_the_packages_own_checkout(tmp_path):
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
def test_tf32_is_set_in_both_interfaces(as_before, on):
    """The newer one speaks of ieee, or of none where nothing else is set."""
    hardware.allow_tf32(on)
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == hardware.is_tf32_allowed() == on
    assert {name: switch.fp32_precision == "tf32" for name, switch in SWITCHES.items()} == dict.fromkeys(SWITCHES, on)
    assert torch.get_float32_matmul_precision() == ("high" if on else "highest")  # what the compiler reads


def test_tf32_convolutions_count_as_tf32(as_before):
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    assert hardware.is_tf32_allowed()
    with hardware.tf32_allowed(False):
        assert not hardware.is_tf32_allowed()
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32
