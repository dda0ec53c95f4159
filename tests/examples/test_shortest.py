"""The shortest programs, each under every launcher: what their ranks say is what it must be."""

import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.conftest import ROOT
from tests.daily import cases

HOST = socket.gethostname()
NAMES = ("hello", "send_recv", "all_reduce")


def expected(name: str, ranks: int, local_size: int) -> list[str]:
    """What each rank must say, from what the programs are for and not from what they print."""
    if name == "hello":
        places = [(rank % local_size, local_size) for rank in range(ranks)]
        return [
            f"hello from rank {rank} of {ranks}, {local} of {size} on its node {HOST}"
            for rank, (local, size) in enumerate(places)
        ]
    if name == "send_recv":  # each has what those before it have added, and rank 0 what all have
        held = [sum(range(ranks)), *(sum(range(rank + 1)) for rank in range(1, ranks))]
        return [f"rank {rank} of {ranks} has {held[rank]}" for rank in range(ranks)]
    mean = sum(range(1, ranks + 1)) / ranks
    return [f"rank {rank} of {ranks}: the mean is [{mean}, {10 * mean}]" for rank in range(ranks)]


def said(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    done = subprocess.run(
        command, env={**environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines(), key=lambda line: int(re.findall(r"rank (\d+)", line)[0]))


def program(name: str) -> list[str]:
    return ["-m", f"ptdbench.examples.{name}"]


@pytest.mark.ranks
class TestUnder:
    """Each with local ranks, and, as all begin alike, one under each launcher."""

    @cases("name", NAMES, daily=["all_reduce"])
    def test_nothing(self, name, environ):
        assert said([sys.executable, *program(name)], environ) == expected(name, 2, 2)

    @pytest.mark.thorough
    def test_torchrun(self, environ):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
        assert said([*launcher, *program("all_reduce")], environ) == expected("all_reduce", 3, 3)

    @pytest.mark.thorough
    def test_mpirun(self, environ, mpirun):
        launcher = [*mpirun, "-np", "3", sys.executable]
        assert said([*launcher, *program("send_recv")], environ) == expected("send_recv", 3, 3)

    @pytest.mark.thorough
    def test_srun(self, slurm):
        launcher = ["srun", "-N2", "--ntasks-per-node=2", sys.executable]
        assert said([*launcher, *program("hello")], slurm) == expected("hello", 4, 2)
