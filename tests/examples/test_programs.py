"""The shortest programs, by themselves: what launchers bring about is in ``tests/test_launchers.py``."""

import re
import socket
import sys

import pytest

from tests.conftest import ROOT
from tests.daily import cases
from tests.programs import call

HOST = socket.gethostname()


def program(name, environ):
    return call(sys.executable, "-m", f"ptdbench.examples.{name}", cwd=ROOT, environ=environ)


@pytest.mark.ranks
@cases(("name", "said"), [
    pytest.param("hello", [f"{rank} of 2, {rank} of 2 on its node {HOST}" for rank in (0, 1)], id="hello"),
    pytest.param("send_recv", ["0 of 2 has 1", "1 of 2 has 1"], id="send_recv"),  # 0, then 0 + 1, which 0 gets
    pytest.param("all_reduce", [f"{rank} of 2: the mean is [1.5, 15.0]" for rank in (0, 1)], id="all_reduce"),
], daily=["all_reduce"])  # fmt: skip
def test_two_ranks_say_what_they_have(name, said, environ):
    done = program(name, environ)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{'hello from ' * (name == 'hello')}rank {line}" for line in said]


@pytest.mark.ranks
def test_two_ranks_train(environ):
    done = program("toy", environ)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"rank (\d) of 2  step (\d+)  loss (\S+)", done.stdout)
    losses = {(int(rank), int(step)): float(loss) for rank, step, loss in lines}
    assert set(losses) == {(rank, step) for rank in (0, 1) for step in (10, 20, 30, 40, 50)}
    assert all(losses[rank, 50] < losses[rank, 10] / 100 for rank in (0, 1))


def test_a_rank_of_torchrun_starts_no_ranks(environ):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}
    done = program("toy", {**environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert done.returncode == 1
    assert "torchrun has started 2 ranks already" in done.stderr
    assert not done.stdout
