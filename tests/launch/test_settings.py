"""Variables that change what a process does or how fast, and which cores ranks get and keep to."""

import math
import os
import subprocess
import sys

import pytest
import torch

from ptdbench.launch.settings import (
    defer_sanitizer,
    enable_expandable_segments,
    log_errors_only,
    recorded,
    share_of_threads,
)


def test_variables_that_change_results_or_speed_are_recorded_without_secrets_and_paths():
    theirs = {
        "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0", "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    }  # fmt: skip
    others = {"PATH": "/bin", "MY_NCCL_DEBUG": "INFO", "HOME": "/home/a", "SLURM_JOB_ID": "7"}
    assert recorded(others | theirs) == theirs
    assert list(recorded(others | theirs)) == sorted(theirs)
    environ = {
        "AWS_SECRET_ACCESS_KEY": "s", "TORCH_HUB_TOKEN": "s", "NCCL_TOPO_FILE": "/home/a/topo.xml",
        "TORCHINDUCTOR_CACHE_DIR": "~/cache",
    }  # fmt: skip
    assert recorded(environ) == {"NCCL_TOPO_FILE": "…/topo.xml", "TORCHINDUCTOR_CACHE_DIR": "…/cache"}


def test_expandable_segments_are_the_default_where_supported(monkeypatch):
    def grown(environ: dict[str, str]) -> dict[str, str]:
        enable_expandable_segments(environ)
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


def test_sanitizer_is_hidden_from_what_starts_ranks():
    environ = {"TORCH_CUDA_SANITIZER": "1"}
    defer_sanitizer(environ)
    assert "TORCH_CUDA_SANITIZER" not in environ
    assert list(environ.values()) == ["1"]


def test_torch_cpp_logs_errors_unless_a_level_is_set():
    environ = {"TORCH_CPP_LOG_LEVEL": "WARNING"}
    log_errors_only(environ)
    assert environ == {"TORCH_CPP_LOG_LEVEL": "WARNING"}
    log_errors_only(environ := {})
    code = (
        "import ctypes, torch; from pathlib import Path; "
        "library = ctypes.CDLL(str(Path(torch.__file__).parent / 'lib' / 'libc10.so')); "
        "print(ctypes.c_int.in_dll(library, 'FLAGS_caffe2_log_level').value)"
    )
    shown = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, **environ}, text=True)
    assert shown.splitlines()[-1] == "2"  # glog's level of errors
    assert recorded(environ) == {}


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell")
def test_allocator_variable_is_read_after_import():
    """Local ranks are forked from a process that has imported torch."""
    program = (
        "import os, torch; os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'; "
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "expandable_segments:True\n"


FOUR = frozenset({0, 1, 2, 3})
SOCKETS = [frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 1}), frozenset({2, 3})]
OVERLAPPING = [frozenset({0, 1, 2, 3}), frozenset({2, 3, 4, 5})]


@pytest.mark.parametrize(
    ("of_ranks", "wanted", "threads"),
    [
        ([FOUR, FOUR], "auto", 2),
        ([FOUR, FOUR], 3, 3),
        # Ranks that their launcher has bound keep to their cores; here pairs share a socket.
        ([frozenset({0, 1, 2}), frozenset({4, 5, 6})], "auto", 3),
        (SOCKETS, "auto", 1),
        (OVERLAPPING, "auto", 2),
        ([frozenset({7})] * 3, "auto", 1),  # at least
    ],
)
def test_cores_of_a_node_are_shared(of_ranks, wanted, threads):
    shares = [share_of_threads(of_ranks, rank, wanted) for rank in range(len(of_ranks))]
    assert shares == [threads] * len(of_ranks)


@pytest.mark.parametrize(("quota", "threads"), [(math.inf, 2), (3.5, 1), (0.5, 1)])
def test_cpu_quota_is_shared(quota, threads):
    assert share_of_threads([FOUR, FOUR], 1, "auto", quota) == threads
