"""Limits of control groups; those of memory are tested with ``measure.memory``."""

import math

import pytest

from ptdbench.launch import cgroups


@pytest.mark.parametrize(("membership", "files", "found"), [
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
def test_cpu_quota_is_the_least_of_all_groups(tmp_path, monkeypatch, membership, files, found):
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    assert cgroups.cpus() == found
