"""Carry out a command of Python's on GPUs that are not there, which it takes for real ones.

    python benchmarks/on_virtual.py h100 1 -m benchmarks.gpu_check --part numbers
    python benchmarks/on_virtual.py h100 4 -m benchmarks.gpu_cluster

Unlike ``virtual=h100``, which a run of ptdbench knows of, this has every process that the command starts see the GPUs,
whoever starts it, and take the ways of a run on real ones. They take their time, and what is kept of them goes into a
cache of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from tempfile import TemporaryDirectory

from benchmarks.script import read
from ptdbench.setup import choices


def main(name: str, count: str, *command: str) -> int:
    """Return the exit status of the command."""
    machine = choices.virtual(read(f"virtual={name}", "virtual.real_time=true"))
    assert machine is not None  # what virtual= names is one
    with TemporaryDirectory() as cache:
        environ = {**os.environ, **machine.environment(int(count)), "XDG_CACHE_HOME": cache}
        return subprocess.run([sys.executable, *command], env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 3 else __doc__)
