"""Processes that stand in for ``python train.py`` in other tests leave as little behind."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests import forked
from tests.launch.patient import patient


@pytest.mark.ranks
def test_a_run_ends_with_its_test_and_its_ranks_with_it(tmp_path):
    words = (*patient(tmp_path / "waits"), "parallel=ddp", "train.steps=1000000", "train.max_minutes=null")
    deadline = time.monotonic() + 200
    with forked.started(*words, cwd=tmp_path) as process:
        while len(family := psutil.Process(process.pid).children(recursive=True)) < 3:  # a fork server and its ranks
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert process.poll() == -signal.SIGKILL
    assert psutil.wait_procs(family, timeout=60)[1] == []
