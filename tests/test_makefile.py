"""The Makefile, where it meets a machine that lacks something."""

import shutil
import subprocess

import pytest

from tests.conftest import ROOT

#: Makes the folder, and then fails, as Python does on a Debian without python3-venv.
PYTHON = """#!/bin/sh
[ "$2" = venv ] || exit 0
mkdir -p $3/bin
touch $3/bin/python
exit 1
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_an_environment_that_could_not_be_made_is_no_environment(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        ["make", ".venv/bin/python", "PYTHON=./python"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert not (tmp_path / ".venv" / "bin" / "python").exists()
