"""What a newcomer has on a new machine: the wheel, an empty environment, a folder with files of their own."""

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.programs import active

#: The user's own module, which the pages call my_package.
MY_PACKAGE = Path(__file__).with_name("my_package.py")


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    """The folder ``bin`` of an environment of its own in which the wheel was installed, with all that it depends on."""
    with tempfile.TemporaryDirectory(prefix="ptdbench-newcomer-") as folder:  # gigabytes, not to be kept as tmp_path is
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT], check=True
        )
        (wheel,) = Path(folder).glob("*.whl")
        venv.create(Path(folder, "environment"), with_pip=True)
        bin_folder = Path(folder, "environment", "bin")
        extras = f"ptdbench[huggingface,optuna,wandb] @ {wheel.as_uri()}"
        subprocess.run([bin_folder / "pip", "install", "--quiet", extras], check=True)
        yield bin_folder


@pytest.fixture(scope="session")
def shell(programs, environ) -> dict[str, str]:
    """The environment of a shell in which that environment is active."""
    return active(programs, environ)


@pytest.fixture
def home(tmp_path) -> Path:
    """A folder with a module of the user's own, and the choices that name what is in it."""
    shutil.copy(MY_PACKAGE, tmp_path)
    for choice, target in (("model", "Mine"), ("data", "Sines"), ("optimizer", "SignSGD")):
        file = tmp_path / "my_conf" / choice / "mine.yaml"
        file.parent.mkdir(parents=True)
        partial = "_partial_: true\nlr: 0.001\n" if choice == "optimizer" else ""
        file.write_text(f"name: mine\n_target_: my_package.{target}\n{partial}")
    return tmp_path
