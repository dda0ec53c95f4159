from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ptdbench.measure.host_memory import host_memory

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


def test_without_limits_it_is_that_of_the_machine(tmp_path):
    found = host_memory(tmp_path, member(tmp_path, "0::/\n"))
    assert found.total == psutil.virtual_memory().total
    assert 0 < found.available <= found.total


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
