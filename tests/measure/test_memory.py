import resource
import weakref
from pathlib import Path

import psutil
import pytest
import torch

from ptdbench.launch import settings
from ptdbench.measure import memory
from ptdbench.measure.memory import HostMemory, host_memory

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_cpu_peak_lasts_until_reset():
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


def test_peak_that_the_kernel_does_not_tell_is_that_of_getrusage(monkeypatch):
    monkeypatch.setattr(memory.Path, "read_text", lambda _: "VmRSS:\t1 kB\n")
    assert memory.peak_bytes(CPU) == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.gpu
def test_gpu_peak_lasts_until_reset():
    device = torch.device("cuda", 0)
    torch.cuda.init()  # as a run has; before, torch has no peak to reset
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


def test_release_frees_cycles_and_caches(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(alive()))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: seen.append(alive()), raising=False)
    for device in ("cpu", "cuda"):
        model = Selfish()
        alive = weakref.ref(model)
        del model
        memory.release(torch.device(device))
        assert alive() is None
    assert seen == [None, None]


GIB = 2**30
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def control_groups(monkeypatch, tmp_path):
    """The folder of control groups, and the file that says which ones this process is in."""
    monkeypatch.setattr(settings, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(settings, "CGROUP_OF_PROCESS", tmp_path / "membership")
    return settings.CGROUPS, settings.CGROUP_OF_PROCESS


@pytest.mark.parametrize(("groups", "membership", "total", "available"), [
    # The tightest counts, and page cache is not in use.
    ({"job": (V2, GIB, GIB // 2, GIB // 4), "job/step": (V2, "max", 1, 0)}, "0::/job/step\n", GIB, GIB * 3 // 4),
    # Version 1 has a hierarchy of its own.
    ({"memory/job_7": (V1, GIB, GIB, 0)}, "9:name=systemd:/\n4:cpuset,memory:/job_7\n0::/\n", GIB, 0),
    # A container that does not see its groups has the limit of its root.
    ({".": (V2, GIB, GIB // 2, 0)}, "0::/../elsewhere\n", GIB, GIB // 2),
])  # fmt: skip
def test_host_memory_has_the_limits_of_control_groups(control_groups, groups, membership, total, available):
    root, said = control_groups
    for path, (names, limit, used, cache) in groups.items():
        folder = root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\nfile 3\n")
    said.write_text(membership)
    assert host_memory() == HostMemory(total, available)


def test_host_memory_without_limits_is_the_machines(control_groups):
    assert host_memory().total == psutil.virtual_memory().total


def test_oom_kills_are_counted_by_group_or_machine(control_groups):
    root, said = control_groups
    (root / "job").mkdir(parents=True)
    (root / "job" / "memory.events").write_text("oom 3\noom_kill 2\n")
    on_machine = memory.oom_kills()
    said.write_text("0::/job/step\n")
    assert memory.oom_kills() == 2
    said.write_text("0::/other\n")
    assert memory.oom_kills() == on_machine
