"""The way of a run, from the command line to its work, by its directory alone."""

import json
import os
import re
import sys
import traceback
from pathlib import Path

import pytest

import ptdbench
from ptdbench import entry
from ptdbench.launch import local
from ptdbench.records import store
from ptdbench.run import door
from tests import forked
from tests.conftest import composed
from tests.shared_ranks import opened

PACKAGE = Path(ptdbench.__file__).parent

#: Raises where the work of a run begins.
GUEST = """
class Guest:
    trains = False

    def check(self, world_size, device_type, backend):
        pass

    def __call__(self, job):
        raise RuntimeError("here")
"""


def ours(frames: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The functions of ptdbench among files and names, without the lambdas between them."""
    return [(file, name) for file, name in frames if Path(file).is_relative_to(PACKAGE) and name[0] != "<"]


def before_the_ranks(tmp_path, monkeypatch) -> list[tuple[str, str]]:
    """The functions that a command line calls from ``entry.main`` to the start of its ranks."""
    frames = []

    def start(*_, **__):
        frames.extend((frame.filename, frame.name) for frame in traceback.extract_stack())
        raise local.LaunchError("far enough")

    monkeypatch.setattr(local, "start", start)
    monkeypatch.setattr(entry, "prepare_ranks", lambda _: None)
    monkeypatch.setattr(entry.lifetime, "exit_soon", lambda: None)
    monkeypatch.setattr(local, "stop_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "model=toy", "device=cpu"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        entry.main()
    start = next(place for place, (file, name) in enumerate(frames) if (Path(file).name, name) == ("entry.py", "main"))
    return ours(frames[start:])


@pytest.mark.ranks
def test_from_the_command_line_to_the_work_a_run_passes_few_functions(tmp_path, monkeypatch):
    """Who follows it reads twenty of them, in a dozen files."""
    (tmp_path / "guest.py").write_text(GUEST)
    words = ("workload._target_=guest.Guest", "device=cpu", "hydra.run.dir=run")
    assert forked.with_ranks(*words, cwd=tmp_path).returncode == 1
    raised = json.loads((tmp_path / "run" / "record.json").read_text())["error"]["traceback"]
    in_rank = ours(re.findall(r'File "(.*)", line \d+, in (\w+)', raised))
    assert in_rank[0][1] == "take_part"
    between = [("launch/local.py", "start"), ("launch/local.py", "_begin"), ("run/ranks.py", "_as_rank")]
    path = [
        *before_the_ranks(tmp_path, monkeypatch), *((str(PACKAGE / file), name) for file, name in between), *in_rank,
    ]  # fmt: skip
    assert len(path) <= 20, path
    assert len({file for file, _ in path}) <= 12


def test_a_run_takes_its_ranks_and_its_variables_from_its_record(tmp_path, monkeypatch):
    starts = []
    monkeypatch.setattr(local, "start", lambda _, size, *__, **___: starts.append((size, os.environ.get("OF_THE_RUN"))))
    words = ("model=toy", "device=cpu", "cluster.ranks_per_node=3", "train.global_batch=9")
    assert opened(composed(*words), tmp_path, None)
    store.write_record(tmp_path, store.load_record(tmp_path) | {"variables": {"OF_THE_RUN": "1"}})
    door.run(tmp_path)
    assert starts == [(3, "1")]
    assert "OF_THE_RUN" not in os.environ
