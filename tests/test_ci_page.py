"""The workflow of docs/ci.md, carried out line by line on a pull request that breaks a model."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from ptdbench import load
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "ci.md").read_text()
WORKFLOW = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
MODEL = """\
from torch import nn


class MyModel(nn.Linear):
    def __init__(self):
        super().__init__(32, 8)
"""
BROKEN = """
    def forward(self, inputs):
        raise RuntimeError("broken")
"""


@pytest.fixture
def repository(tmp_path, environ):
    """A checkout of two commits, with an environment in place of the one that the workflow installs."""
    top = tmp_path / "checkout"
    top.mkdir()
    temporary = tempfile.mkdtemp(prefix="ptdbench-", dir="/tmp")  # short, as the name of a socket in it must be
    environ = {
        **environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PYTHONPATH": str(ROOT),
        "TMPDIR": temporary, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{environ['PATH']}",
    }  # fmt: skip

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=top, env=environ, check=True,
            capture_output=True, text=True, timeout=60,
        ).stdout.strip()  # fmt: skip

    git("init", "--quiet")
    commits = {}
    for name, text in (("base", MODEL), ("head", MODEL + BROKEN)):
        (top / "my_package.py").write_text(text)
        git("add", "my_package.py")
        git("commit", "--quiet", "-m", name)
        commits[name] = git("rev-parse", "HEAD")
    yield top, commits, environ
    shutil.rmtree(temporary)


def tool(path: Path, command: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_pull_request_that_breaks_a_model(repository, tmp_path):
    top, commits, environ = repository
    ptdbench = f"{sys.executable} -m ptdbench"
    fewer = f'case "$1" in compare) exec {ptdbench} "$@" repeat=1 train.steps=2 profile.steps=0 ;; esac'
    tool(top / ".venv" / "bin" / "ptdbench", f'{fewer}\nexec {ptdbench} "$@"')
    tool(tmp_path / "bin" / "gh", f'echo "$@" > {tmp_path}/commented; cat report.md >> {tmp_path}/commented')
    values = {
        "github.event.pull_request.base.sha": commits["base"],
        "github.event.pull_request.head.sha": commits["head"],
        "github.event.pull_request.number": "7",
        "github.token": "secret",
    }

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: values[match[1]], text)

    steps = {step["name"]: step for step in WORKFLOW["jobs"]["compare"]["steps"] if "run" in step}
    assert [*steps] == ["Install", "Compare with the base", "Report", "Comment"]
    del steps["Install"]  # it downloads; tests/newcomer does that
    statuses = {}
    for name, step in steps.items():
        given = {key: filled(value) for key, value in step.get("env", {}).items()}
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", filled(step["run"])], cwd=top, env={**environ, **given},
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        statuses[name] = done.returncode
        if name == "Compare with the base":
            assert "fails" in done.stdout, done.stderr
        assert done.returncode == 0 or step.get("if") != "always()", done.stderr
    assert statuses == {"Compare with the base": 1, "Report": 0, "Comment": 0}
    (folder,) = (top / "outputs").glob("*_compare")
    assert {run["status"] for run in load(folder / "before")} == {"ok"}
    command, *comment = (tmp_path / "commented").read_text().splitlines()
    assert command == "pr comment 7 --edit-last --create-if-none --body-file report.md"
    assert any("RuntimeError: broken" in line for line in comment)
    artifacts = [step["with"]["path"] for step in WORKFLOW["jobs"]["compare"]["steps"] if "artifact" in str(step)]
    assert artifacts == ["report.html"]
    assert (top / "report.html").stat().st_size > 100_000
