"""The shortest program does what it says, and refuses to start ranks of ranks."""

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks
TOY = ["-m", "ptdbench.examples.toy"]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_two_ranks_train():
    done = python(*TOY)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"rank (\d) of 2  step (\d+)  loss (\S+)", done.stdout)
    losses = {(int(rank), int(step)): float(loss) for rank, step, loss in lines}
    assert set(losses) == {(rank, step) for rank in (0, 1) for step in (10, 20, 30, 40, 50)}
    assert all(losses[rank, 50] < losses[rank, 10] / 100 for rank in (0, 1))


@pytest.mark.thorough
def test_under_torchrun_it_says_so():
    done = python("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *TOY)
    assert done.returncode == 1
    assert "torchrun has started 2 ranks already" in done.stderr
    assert "rank 0 of" not in done.stdout
