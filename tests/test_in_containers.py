"""Runs in containers on a real SLURM, through each way into one.

The image is an empty folder: what Python and torch need is mounted from this machine, and the interpreter is a
script that only the image has, so that a run that ends well was in the container.
"""

import json
import sys
from pathlib import Path

import pytest

from ptdbench.records import store
from tests.conftest import outputs
from tests.forked import train_py

#: Enough of this machine for its own interpreter.
MOUNTS = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/sys", "/root", "/tmp"]


@pytest.fixture
def image(tmp_path):
    python = tmp_path / "image" / "inside" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python.parent.parent


@pytest.fixture
def hello(tmp_path, slurm):
    """Lists the ranks of a job in a container; returns the result and the sweep's record."""
    (tmp_path / "here").mkdir()
    machine = dict.fromkeys([*(path for path in MOUNTS if Path(path).exists()), sys.prefix, sys.base_prefix])

    def it(image: Path, *overrides: str):
        within = [f"image={image}", f"mounts={json.dumps(list(machine))}", "python=/inside/python"]
        options = [*(f"cluster.container.{option}" for option in within), "cluster.ranks_per_node=2"]
        words = ("cluster=slurm", "workload=hello", "device=cpu", *options, *overrides)
        done = train_py(*words, cwd=tmp_path / "here", environ=slurm)
        (directory,) = outputs(tmp_path / "here")
        (record,) = store.read_results(directory)
        return done, record.written

    return it


def test_pyxis_on_two_nodes(hello, image):
    done, record = hello(image, "cluster.nodes=2")
    assert done.returncode == 0, done.stderr
    assert "4 ranks on 2 nodes, started by srun" in done.stdout
    assert "PTDBENCH_CONTAINER=…/image" in done.stdout.splitlines()
    assert record["config"]["cluster"]["container"]["image"] == str(image)


@pytest.mark.thorough
def test_an_image_that_does_not_exist_is_a_row_with_the_steps_own_error(hello, tmp_path):
    done, record = hello(tmp_path / "none")
    assert (done.returncode, record["status"]) == (1, "failed")
    assert f"pyxis: {tmp_path / 'none'}: No such file or directory; its output is in" in record["error"]["message"]
