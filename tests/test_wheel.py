"""The wheel, in an environment of its own: nothing of this checkout is there, as for whoever installs it.

Only what it depends on is borrowed from the tests' environment: PyTorch alone takes gigabytes.
"""

import json
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT, records
from tests.programs import active

#: As pyproject.toml has it; Python 3.10 cannot read TOML.
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

#: A model of the user's own, its choice of the group ``model`` in a folder of the user's own.
MODEL = """
from torch import nn


class Model(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(8, width), nn.Linear(width, 4))
"""
CHOICE = "name: mine\n_target_: mine.Model\nwidth: 8\n"
VECTORS = ("data=synthetic_vectors", "data.inputs=8", "data.outputs=4")
MINE = ("--config-dir", "choices", "model=mine", *VECTORS, "device=cpu")


def call(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200, check=False)


def checked(*command: str | Path, cwd: Path) -> str:
    done = call(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    checked(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (found,) = folder.glob("*.whl")
    checked(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir(), cwd=folder)
    return found


@pytest.fixture(scope="session")
def programs(wheel, tmp_path_factory) -> Path:
    """The folder ``bin`` of an environment with the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-index", "--no-deps")
    checked(*pip, wheel, cwd=folder)
    # Files like this one are not read in the folder that it names: no editable installation is found through it.
    packages = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    Path(packages, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def shell(programs, environ) -> dict[str, str]:
    return active(programs, environ)


@pytest.fixture
def home(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "choices" / "model").mkdir(parents=True)
    (tmp_path / "choices" / "model" / "mine.yaml").write_text(CHOICE)
    return tmp_path


def test_wheel_has_every_file(programs):
    (shipped,) = programs.parent.glob("lib/python*/site-packages/ptdbench")
    files = {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").glob("**/*.yaml")}
    assert {path.relative_to(shipped / "conf") for path in (shipped / "conf").glob("**/*.*")} == files
    assert (shipped / "py.typed").is_file()
    assert shipped.with_name("hydra_plugins").joinpath("ptdbench_launcher.py").is_file()
    assert json.loads((shipped / "record.schema.json").read_text())["$ref"] == "#/$defs/Record"
    for kind in ("py", "html", "css", "js", "c", "h", "csv"):
        made = {path.relative_to(ROOT / "ptdbench") for path in (ROOT / "ptdbench").glob(f"**/*.{kind}")}
        assert made
        assert made <= {path.relative_to(shipped) for path in shipped.glob(f"**/*.{kind}")}


def test_version_and_help_name_the_program(programs, shell, tmp_path):
    assert call("ptdbench", "--version", cwd=tmp_path, env=shell).stdout == f"ptdbench {VERSION}\n"
    helped = call("ptdbench", cwd=tmp_path, env=shell)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert all(f"    {command}" in helped.stdout for command in ("train", "sbatch", "status"))
    helped = call("ptdbench", "train", "--help", cwd=tmp_path, env=shell)
    assert "ptdbench train parallel=pdp --cfg job" in helped.stdout
    assert "--nproc_per_node=2 -m ptdbench train parallel=fsdp" in helped.stdout
    assert "train.py" not in helped.stdout


def test_other_ptdbench_in_the_current_folder_is_refused(shell, tmp_path):
    """The fork server and jobs look there first."""
    (tmp_path / "ptdbench").mkdir()
    (tmp_path / "ptdbench" / "__init__.py").touch()
    done = call("ptdbench", "train", "model=toy", cwd=tmp_path, env=shell)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ptdbench={tmp_path}/ptdbench/__init__.py: ranks started here would import it instead of ")


@pytest.mark.ranks
def test_sweep_over_a_users_model_runs(shell, home):
    done = call("ptdbench", "train", "-m", *MINE, "train.steps=2,3", cwd=home, env=shell)
    assert done.returncode == 0, done.stderr
    found = [(record["model"], record["status"], record["steps"]) for record in records(home)]
    assert found == [("mine", "ok", 2), ("mine", "ok", 3)]
    environment = records(home)[0]["environment"]
    assert (environment["ptdbench"], environment["git_commit"]) == (VERSION, None)  # no checkout's
