"""A run in containers on a real SLURM, of two nodes.

The image is an empty folder: what Python and torch need is mounted from this machine, and the interpreter is a
script that only the image has, so that a run that ends well was in the container.
"""

import json
import sys
from pathlib import Path

from ptdbench.records import store
from tests.conftest import outputs
from tests.forked import train_py

#: Enough of this machine for its own interpreter.
MOUNTS = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/sys", "/root", "/tmp"]


def test_pyxis_on_two_nodes(tmp_path, slurm):
    (here := tmp_path / "here").mkdir()
    image = tmp_path / "image"
    (python := image / "inside" / "python").parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    machine = dict.fromkeys([*(path for path in MOUNTS if Path(path).exists()), sys.prefix, sys.base_prefix])
    within = [f"image={image}", f"mounts={json.dumps(list(machine))}", "python=/inside/python"]
    options = [*(f"cluster.container.{option}" for option in within), "cluster.ranks_per_node=2", "cluster.nodes=2"]
    done = train_py("cluster=slurm", "workload=hello", "device=cpu", *options, cwd=here, environ=slurm)
    assert done.returncode == 0, done.stderr
    assert "4 ranks on 2 nodes, started by srun" in done.stdout
    assert "PTDBENCH_CONTAINER=…/image" in done.stdout.splitlines()
    (directory,) = outputs(here)
    (result,) = store.read_results(directory)
    assert result.written["config"]["cluster"]["container"]["image"] == str(image)
