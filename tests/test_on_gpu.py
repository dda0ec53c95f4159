"""GPUs are hidden from tests, but for those that need one."""

import os
import re
import sys

import pytest

from tests.conftest import ENVIRON_WITH_GPUS, ROOT
from tests.programs import call

#: The device files of GPUs of NVIDIA and AMD; torch would be asked in a process that may use them.
HAS_GPU = any(re.fullmatch(r"nvidia\d+|kfd", name) for name in os.listdir("/dev"))


def test_programs_and_ranks_see_none(environ):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_those_that_need_one_pass_on_it():
    """In a process of their own: a driver reads once which GPUs it may show."""
    asked = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    done = call(*asked, cwd=ROOT, environ=ENVIRON_WITH_GPUS, timeout=500)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
