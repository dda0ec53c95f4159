import resource
import sys
import weakref
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from ptdbench.measure import memory
from ptdbench.measure.memory import host_memory

CPU = torch.device("cpu")
MIB = 2**20


def test_cpu_peak_is_that_of_the_process():
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory.reset_peak(CPU)
    block = bytearray(b"x") * (200 * MIB)
    peak = memory.peak_bytes(CPU)
    assert len(block) < peak < kilobytes * 1024 + 2 * len(block)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_cpu_peak_outlives_its_memory_until_it_is_reset():
    memory.reset_peak(CPU)
    before = memory.peak_bytes(CPU)
    block = bytearray(b"x") * (300 * MIB)
    del block
    assert memory.peak_bytes(CPU) > before + 250 * MIB
    memory.reset_peak(CPU)
    assert memory.peak_bytes(CPU) < before + 50 * MIB


def test_cpu_memory_in_use_rises_and_falls():
    in_use = memory.in_use(CPU)
    before = in_use()
    block = bytearray(b"x") * (200 * MIB)
    assert in_use() > before + 150 * MIB
    del block
    assert in_use() < before + 50 * MIB


def test_without_proc_memory_in_use_is_the_peak_and_the_peak_that_of_getrusage(monkeypatch):
    missing = mock.Mock(side_effect=FileNotFoundError("/proc"))
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", missing)
        in_use = memory.in_use(CPU)
    block = bytearray(b"x") * (200 * MIB)
    del block
    before = memory.peak_bytes(CPU)
    assert before <= in_use() <= memory.peak_bytes(CPU)
    monkeypatch.setattr(memory.Path, "read_text", missing)
    monkeypatch.setattr(sys, "platform", "linux")
    assert memory.peak_bytes(CPU) == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_peak_counts_tensors_until_it_is_reset():
    device = torch.device("cuda", 0)
    memory.reset_peak(device)
    before = memory.peak_bytes(device)
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert memory.in_use(device)() >= before + 64 * MIB
    del block
    assert memory.peak_bytes(device) >= before + 64 * MIB
    memory.reset_peak(device)
    assert memory.peak_bytes(device) < before + 64 * MIB


class Selfish:
    """Refers to itself, as a model with a wrapped forward does."""

    def __init__(self) -> None:
        self.forward = self.__init__


class TestRelease:
    def test_what_refers_to_itself_is_freed(self):
        model = Selfish()
        alive = weakref.ref(model)
        del model
        memory.release(CPU)
        assert alive() is None

    def test_a_gpu_gives_its_cache_back_after_the_garbage_is_gone(self, monkeypatch):
        model = Selfish()
        alive, seen = weakref.ref(model), []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(alive()))
        del model
        memory.release(torch.device("cuda", 0))
        assert seen == [None]


GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path):
    """Makes a control group with so many bytes as its limit, in use, and of those in the page cache."""

    def make(path: str, names: tuple[str, str, str], limit: int | str, used: int, cache: int) -> None:
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\nfile 3\n")

    return make


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def member(tmp_path: Path, text: str) -> Path:
    (tmp_path / "cgroup").write_text(text)
    return tmp_path / "cgroup"


def test_the_tightest_group_counts_and_page_cache_is_not_in_use(tmp_path, groups):
    groups("job", V2, GIB, GIB // 2, GIB // 4)
    groups("job/step", V2, "max", GIB // 2, 0)
    found = host_memory(tmp_path, member(tmp_path, "0::/job/step\n"))
    assert (found.total, found.available) == (GIB, GIB - GIB // 4)


def test_version_1_has_a_hierarchy_of_its_own(tmp_path, groups):
    groups("memory/slurm/job_7", V1, GIB, GIB, 0)
    text = "9:name=systemd:/\n4:cpuset,memory:/slurm/job_7\n0::/\n"
    found = host_memory(tmp_path, member(tmp_path, text))
    assert (found.total, found.available) == (GIB, 0)


def test_a_container_that_does_not_see_its_groups_has_the_limit_of_its_root(tmp_path, groups):
    groups(".", V2, GIB, 0, 0)
    found = host_memory(tmp_path, member(tmp_path, "0::/../elsewhere\n"))
    assert found.total == GIB


def test_elsewhere_than_linux(tmp_path):
    assert host_memory(tmp_path, tmp_path / "none").total == psutil.virtual_memory().total
