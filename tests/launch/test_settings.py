import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ptdbench.launch.settings import (
    leave_sanitizer_to_ranks,
    let_segments_grow,
    log_errors_only,
    settings,
)


def test_what_changes_results_or_speed_is_told():
    theirs = {
        "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0", "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    }  # fmt: skip
    others = {"PATH": "/bin", "MY_NCCL_DEBUG": "INFO", "HOME": "/home/a", "SLURM_JOB_ID": "7"}
    assert settings(others | theirs) == theirs
    assert list(settings(others | theirs)) == sorted(theirs)


def test_nothing_that_is_secret_or_of_somebodys_home_is_told():
    environ = {
        "AWS_SECRET_ACCESS_KEY": "s", "TORCH_HUB_TOKEN": "s", "NCCL_TOPO_FILE": "/home/a/topo.xml",
        "TORCHINDUCTOR_CACHE_DIR": "~/cache",
    }  # fmt: skip
    assert settings(environ) == {"NCCL_TOPO_FILE": "…/topo.xml", "TORCHINDUCTOR_CACHE_DIR": "…/cache"}


def test_segments_grow_where_they_can_and_nobody_has_said_otherwise(monkeypatch):
    def grown(environ: dict[str, str]) -> dict[str, str]:
        let_segments_grow(environ)
        return environ

    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert grown({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert grown({name: "max_split_size_mb:64"}) == {name: "max_split_size_mb:64"}
    for owner, name, value in (
        (torch.cuda, "device_count", lambda: 0), (torch.version, "hip", "7.0"), (sys, "platform", "win32"),
    ):  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            assert grown({}) == {}


def test_the_sanitizer_is_for_ranks_and_not_for_what_starts_them():
    environ = {"TORCH_CUDA_SANITIZER": "1"}
    leave_sanitizer_to_ranks(environ)
    assert "TORCH_CUDA_SANITIZER" not in environ
    assert list(environ.values()) == ["1"]


def test_torchs_cpp_warns_only_where_a_person_asks_for_it():
    level = ctypes.c_int.in_dll(
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "FLAGS_caffe2_log_level"
    )
    before, level.value = level.value, 1
    try:
        log_errors_only({"TORCH_CPP_LOG_LEVEL": "WARNING"})
        assert level.value == 1
        log_errors_only({})
        assert level.value == 2
    finally:
        level.value = before


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell")
def test_torch_reads_the_variable_after_it_is_imported():
    """Local ranks are forked from a process that has imported torch."""
    program = (
        "import os, torch; os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'; "
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "expandable_segments:True\n"
