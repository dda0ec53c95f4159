"""The attack in short, and that it sees what is wrong with a product that loses things."""

import os
import random
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.attack import rounds, scenarios, victims
from benchmarks.attack.attack import environ as variables
from benchmarks.attack.rounds import Round, Setting
from benchmarks.attack.scenarios import Reference, Scenario
from tests.conftest import ROOT
from tests.programs import until

CHECKPOINTS = scenarios.SCENARIOS["checkpoints"]


@pytest.fixture
def setting(tmp_path: Path, environ: dict[str, str]) -> Iterator[Setting]:
    """The checkout under attack, and nothing left of its victims after the test."""
    session = f"pytest-{os.getpid()}-{time.monotonic_ns()}"
    yield Setting(ROOT, tmp_path / "rounds", {**environ, "PYTHONPATH": variables(ROOT)["PYTHONPATH"]}, session, seed=0)
    victims.sweep_away(session)


def fought(setting: Setting, moment: str, role: str, reference: Reference, resumes: bool) -> Round:
    """A round against the checkpointing run in which all processes of a role are killed."""
    scenario = replace(CHECKPOINTS, resumes=resumes)
    for attempt in range(5):  # as in an attack: one that has ended before its moment was not attacked
        attack = Round(setting, f"{moment}-{attempt}", scenario, reference, moment)
        victim = setting.start(scenario.command(setting.tree, "outputs/named"), attack.folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(victims, "choose", lambda family, _: [process for process in family if process.role == role])
            before = attack.strike(victim, random.Random(attempt))
        if attack.killed:
            break
    attack.judge(victim, before)
    assert {process.role for process in attack.killed} == {role}
    return attack


@pytest.mark.thorough
@pytest.mark.ranks
def test_kills_at_the_birth_of_the_ranks_and_during_a_save_lose_nothing(setting):
    reference = rounds.reference(setting, CHECKPOINTS)
    assert len(reference.losses[""]) == 60
    assert fought(setting, "birth", "train.py", reference, resumes=False).faults == []
    assert fought(setting, "save", "fork server", reference, resumes=True).faults == []


def made_up(setting: Setting, tmp_path: Path, script: str, *, runs: int = 0, left: float = rounds.LEFT) -> Round:
    """A round against a train.py that is none, killed once it has printed something."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "train.py").write_text(textwrap.dedent(script))
    setting = Setting(tmp_path / "tree", setting.base, setting.environ, setting.session, setting.seed)
    scenario = Scenario("made up", (), ("start",), runs=runs)
    attack = Round(setting, "made-up", scenario, Reference(0.0, 1.0, {"": [1.0]}), "start")
    victim = setting.start(scenario.command(setting.tree), attack.folder)
    assert victim.awaits(lambda: "ready" in victim.log.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "LEFT", left)
        patch.setattr(victims, "choose", lambda family, _: family[:1])
        attack.judge(victim, attack.strike(victim, random.Random(0)))
    assert [process.role for process in attack.killed] == ["train.py"]
    return attack


def kinds(attack: Round) -> list[str]:
    return [kind for kind, _ in attack.faults]


def test_a_process_that_is_left_and_a_directory_without_a_record(setting, tmp_path):
    attack = made_up(
        setting,
        tmp_path,
        """
        import os, pathlib, time
        pathlib.Path("outputs/one/.hydra").mkdir(parents=True)
        if os.fork():
            print("ready", flush=True)
        time.sleep(60)
        """,
        left=0.5,  # there is something that never goes
    )
    assert kinds(attack) == ["left", "record"]
    until(lambda: not victims.left(setting.session))  # and it has been killed


def test_a_finished_run_that_changes_and_files_that_are_torn(setting, tmp_path):
    attack = made_up(
        setting,
        tmp_path,
        """
        import json, os, pathlib, time
        run = pathlib.Path("outputs/one")
        run.mkdir(parents=True)
        (run / "record.json").write_text(json.dumps({"status": "ok", "config": {}, "losses": [2.0], "steps": 1}))
        (run / "progress.json").write_text('{"step":')
        parent = os.getpid()
        if os.fork():
            print("ready", flush=True)
            time.sleep(60)
        while os.getppid() == parent:
            time.sleep(0.01)
        (run / "record.json").write_text(json.dumps({"status": "ok", "config": {}, "losses": [2.0], "steps": 2}))
        """,
    )
    assert kinds(attack) == ["torn", "lost", "unequal"]
