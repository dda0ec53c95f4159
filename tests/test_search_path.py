"""Modules beside a command: none hides one of Python's own, or of a package that is needed, in any process."""

import os
import sys
from pathlib import Path

import pytest

from ptdbench import search_path
from tests.programs import call
from tests.refusals import Abridged, refusal_of

#: Modules that Python, multiprocessing, torch and ptdbench import while a process starts, or later.
NAMES = ["calendar", "copy", "enum", "heapq", "json", "queue", "random", "shutil", "statistics", "token", "types"]

#: Starts a process as a pool does.
SPAWNED = """
import multiprocessing, os, sys
from ptdbench import search_path

here, before = os.getcwd(), os.environ.copy()
search_path.add_current()
with search_path.safe():
    process = multiprocessing.get_context("spawn").Process(target=os.chdir, args=(here,))
    process.start()
process.join()
import mine
print(process.exitcode, os.getcwd() == here, os.environ == before, sys.path.index(here) < len(sys.path) - 1)
"""


def hide_modules(folder: Path) -> None:
    for name in NAMES:
        (folder / f"{name}.py").write_text("raise ImportError('it hides one of the same name')")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A current folder with such files, which fail, and a module of a user's own."""
    hide_modules(tmp_path)
    (tmp_path / "mine.py").touch()
    return tmp_path


@pytest.mark.parametrize(("words", "said"), [
    (["-c", f"{search_path.LAST}\n{SPAWNED}"], "0 True True True\n"),
    ([*search_path.module("platform"), "--terse"], None),
    ([*search_path.module("ptdbench"), "status", "."], ""),
])  # fmt: skip
def test_other_processes_start_beside_files_named_like_modules(folder, environ, words, said):
    done = call(sys.executable, *words, cwd=folder, environ=environ)
    assert done.returncode == (said == ""), done.stderr
    assert said in (None, done.stdout)


@pytest.mark.parametrize("name", ["torch.py", "yaml.py", "omegaconf/__init__.py"])
def test_module_hiding_a_package_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    package = name.partition("/")[0].removesuffix(".py")
    told = f"{package}={tmp_path / name}: ranks started here would import it instead of /…; rename it, or …"
    assert refusal_of(search_path.add_current) == Abridged(told)


@pytest.mark.parametrize("command", ["train", "plan", "run", "sbatch"])
def test_deleted_current_folder_is_refused(tmp_path, environ, command):
    (tmp_path / "gone").mkdir()
    given = tmp_path / "run" if command == "run" else "model=toy"
    script = f'rmdir "$PWD" && exec {sys.executable} -m ptdbench {command} {given}'
    done = call("sh", "-c", script, cwd=tmp_path / "gone", environ=environ)
    said = "current directory=.: was deleted; change to another one, also if one of its name exists again\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert os.listdir(tmp_path) == []


def test_other_processes_find_the_modules_that_this_one_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/repository/train.py"])
    monkeypatch.setenv("PYTHONPATH", "/mine")
    folder = {"PTDBENCH_FOLDER": str(tmp_path)}
    assert search_path.inherited() == {**folder, "PYTHONPATH": f"/repository{os.pathsep}/mine"}
    monkeypatch.setattr(sys, "argv", ["/bin/ptdbench"])
    monkeypatch.delenv("PYTHONPATH")
    assert search_path.inherited() == folder
