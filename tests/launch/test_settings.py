"""Variables that change what a process does or how fast, and which cores ranks get and keep to."""

import json
import math
import os
import subprocess
import sys
import threading

import pytest
import torch

from ptdbench.launch import settings
from ptdbench.launch.settings import (
    bind_cores,
    defer_sanitizer,
    enable_expandable_segments,
    log_errors_only,
    own_cores,
    recorded,
    share_cores,
)
from tests.conftest import ROOT


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

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert grown({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert grown({name: "max_split_size_mb:64"}) == {name: "max_split_size_mb:64"}
    for owner, name, value in ((torch.cuda, "device_count", lambda: 0), (torch.version, "hip", "7.0")):
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


FOUR, ODD = frozenset({0, 1, 2, 3}), frozenset({9, 1, 5, 13})
SOCKETS = [frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 1}), frozenset({2, 3})]
OVERLAPPING = [frozenset({0, 1, 2, 3}), frozenset({2, 3, 4, 5})]


@pytest.mark.parametrize(
    ("of_ranks", "wanted", "shares"),
    [
        # Ranks that are free divide the threads and stay free, but for a number that is asked for.
        ([FOUR, FOUR], "auto", [(2, None)] * 2),
        ([FOUR, FOUR], 2, [(2, {0, 1}), (2, {2, 3})]),
        ([FOUR, FOUR], 1, [(1, {0}), (1, {1})]),
        ([ODD, ODD], 2, [(2, {1, 5}), (2, {9, 13})]),
        # Ranks that their launcher has bound keep to their cores; here pairs share a socket.
        ([frozenset({0, 1, 2}), frozenset({4, 5, 6})], "auto", [(3, None)] * 2),
        ([frozenset({0, 1, 2}), frozenset({4, 5, 6})], 2, [(2, {0, 1}), (2, {4, 5})]),
        (SOCKETS, "auto", [(1, None)] * 4),
        (SOCKETS, 1, [(1, {0}), (1, {2}), (1, {1}), (1, {3})]),
        # Where cores overlap in part two ranks might be bound to the same core, each counting in its own set.
        (OVERLAPPING, "auto", [(2, None)] * 2),
        (OVERLAPPING, 2, [(2, None)] * 2),
        # Where there are too few nobody is bound, and a rank has one thread at least.
        ([FOUR, FOUR, FOUR], 2, [(2, None)] * 3),
        ([frozenset({0})], 4, [(4, None)]),
        ([frozenset({7})] * 3, "auto", [(1, None)] * 3),
    ],
)
def test_cores_of_a_node_are_shared(of_ranks, wanted, shares):
    assert [share_cores(of_ranks, rank, wanted) for rank in range(len(of_ranks))] == shares


@pytest.mark.parametrize(("quota", "threads"), [(math.inf, 2), (3.5, 1), (0.5, 1)])
def test_cpu_quota_is_shared(quota, threads):
    assert share_cores([FOUR, FOUR], 1, "auto", quota) == (threads, None)


@pytest.mark.parametrize(("membership", "files", "cores"), [
    ("0::/pod/one\n", {"pod/one/cpu.max": "250000 100000\n", "pod/cpu.max": "max 100000\n"}, 2.5),
    ("0::/pod/one\n", {"pod/one/cpu.max": "max 100000\n", "pod/cpu.max": "50000 100000\n"}, 0.5),
    ("0::/\n", {"cpu.max": "800000 100000\n"}, 8),
    (
        "4:cpu,cpuacct:/job\n0::/\n",
        {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n",
         "cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        4,
    ),
    ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "1\n"}, math.inf),
    (None, {}, math.inf),
])  # fmt: skip
def test_cpu_quota_is_the_least_of_all_groups(tmp_path, monkeypatch, membership, files, cores):
    monkeypatch.setattr(settings, "CGROUPS", tmp_path)
    monkeypatch.setattr(settings, "CGROUP_OF_PROCESS", tmp_path / "membership")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    assert settings.cpu_quota() == cores


binds = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")

#: Binds itself while a thread of its own runs, not at all and then to a core, and tells where each thread may run then.
BINDS = """
import json, os, sys, threading
from ptdbench.launch import settings

go_on = threading.Event()
threading.Thread(target=go_on.wait, daemon=True).start()
for wish in (None, frozenset(json.loads(sys.argv[1]))):
    settings.bind_cores(3, wish)
    import torch
    threads = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
    everywhere, told = [], threading.Event()
    # It lives to the end: one that is joined may still be listed, and is gone when it is asked.
    work = lambda: (settings.unbind_thread(), everywhere.extend(os.sched_getaffinity(0)), told.set(), go_on.wait())
    threading.Thread(target=work, daemon=True).start()
    told.wait()
    main = sorted(os.sched_getaffinity(0))
    print(json.dumps([torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], threads, sorted(everywhere), main]))
go_on.set()
"""


@binds
def test_all_threads_are_bound_and_one_can_be_unbound(environ):
    cores = sorted(own_cores())
    command = [sys.executable, "-c", BINDS, json.dumps(cores[-1:])]
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    for line, allowed in zip(done.stdout.splitlines(), (cores, cores[-1:]), strict=True):
        threads, variable, affinities, everywhere, main = json.loads(line)
        assert (threads, variable) == (3, "3")
        assert len(affinities) >= 2
        assert affinities == [allowed] * len(affinities)
        assert (everywhere, main) == (cores, allowed)


@binds
def test_ended_thread_is_skipped_while_binding(monkeypatch):
    bound, go_on = [], threading.Event()

    def bind(thread, cores):
        if thread == threading.get_native_id():
            raise ProcessLookupError
        bound.append(thread)

    other = threading.Thread(target=go_on.wait)
    other.start()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    try:
        bind_cores(torch.get_num_threads(), own_cores())
    finally:
        go_on.set()
        other.join()
    assert other.native_id in bound
