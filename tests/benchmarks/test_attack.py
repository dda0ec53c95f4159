"""The attack in short, and that it sees what is wrong with a product that loses things."""

import json
import os
import random
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.attack import evidence, rounds, scenarios, victims
from benchmarks.attack.__main__ import environ as variables
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


def fought(setting: Setting, moment: str, role: str, known: Reference, resumes: bool) -> Round:
    """A round against the checkpointing run in which all processes of a role are killed."""
    scenario = replace(CHECKPOINTS, resumes=resumes)
    for attempt in range(5):  # as in an attack: one that has ended before its moment was not attacked
        one = Round(setting, f"{moment}-{attempt}", scenario, known, moment)
        victim = setting.start(scenario.command(setting.tree, "outputs/named"), one.folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(victims, "choose", lambda family, _: [process for process in family if process.role == role])
            before = one.strike(victim, random.Random(attempt))
        if one.killed:
            break
    one.judge(victim, before)
    assert {process.role for process in one.killed} == {role}
    return one


@pytest.mark.thorough
@pytest.mark.ranks
def test_kills_at_the_birth_of_the_ranks_and_during_a_save_lose_nothing(setting):
    known = rounds.reference(setting, CHECKPOINTS)
    assert len(known.losses[""]) == 60
    assert fought(setting, "birth", "train.py", known, resumes=False).faults == []
    assert fought(setting, "save", "fork server", known, resumes=True).faults == []


def made_up(setting: Setting, tmp_path: Path, script: str, *, runs: int = 0, left: float = rounds.LEFT) -> Round:
    """A round against a train.py that is none, killed once it has printed something."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "train.py").write_text(textwrap.dedent(script))
    setting = Setting(tmp_path / "tree", setting.base, setting.environ, setting.session, setting.seed)
    scenario = Scenario("made up", (), ("start",), runs=runs)
    one = Round(setting, "made-up", scenario, Reference(0.0, 1.0, {"": [1.0]}), "start")
    victim = setting.start(scenario.command(setting.tree), one.folder)
    assert victim.awaits(lambda: "ready" in victim.log.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "LEFT", left)
        patch.setattr(victims, "choose", lambda family, _: family[:1])
        one.judge(victim, one.strike(victim, random.Random(0)))
    assert [process.role for process in one.killed] == ["train.py"]
    return one


def kinds(one: Round) -> list[str]:
    return [kind for kind, _ in one.faults]


def test_a_process_that_is_left_and_a_directory_without_a_record(setting, tmp_path):
    one = made_up(
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
    assert kinds(one) == ["left", "record"]
    until(lambda: not victims.left(setting.session))  # and it has been killed


def test_a_finished_run_that_changes_and_files_that_are_torn(setting, tmp_path):
    one = made_up(
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
    assert kinds(one) == ["torn", "lost", "unequal"]


@pytest.mark.parametrize(
    ("now", "is_lost"),
    [
        ({"phases": {"steps": 5}, "nodes": ["vm"]}, False),  # of the profiling pass, and of the end
        ({"steps": 3}, True),
        ({"status": "failed"}, True),
        ({"config": {"seed": 1}}, True),
    ],
)
def test_what_the_end_of_a_run_may_add_to_its_record(tmp_path, now, is_lost):
    before = {"status": "ok", "config": {}, "steps": 2, "phases": None, "nodes": None}
    (tmp_path / "record.json").write_text(json.dumps({**before, **now}))
    assert evidence.changed(tmp_path, json.dumps(before).encode()) == is_lost


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"status": "ok", "config": {}}', ""),
        ("", "is no JSON"),
        ('{"status": "ok", "config": {}', "is no JSON"),
        ('{"status": "ok", "config": {"a": NaN}}', "NaN is no JSON"),
        ("[1]", "has no status"),
        ('{"status": "ok"}', "or no config"),
    ],
)
def test_what_is_a_valid_record(tmp_path, text, wrong):
    (tmp_path / "record.json").write_text(text)
    said = evidence.invalid(tmp_path)
    assert wrong in said
    assert bool(said) == bool(wrong)


def test_lines_of_results(tmp_path):
    sweep = tmp_path / "outputs" / "sweep"
    sweep.mkdir(parents=True)
    line = json.dumps({"directory": "x/0_toy", "status": "ok"})
    (sweep / "results.jsonl").write_text(f"{line}\n{line[:9]}")  # the last one is torn, which counts for nothing
    assert list(evidence.half_written(tmp_path)) == []
    assert evidence.ok_in_results(tmp_path) == {"0_toy"}
    (sweep / "results.jsonl").write_text(f"{line[:9]}\n{line}\n")
    (torn,) = evidence.half_written(tmp_path)
    assert torn.endswith("line 1 does not parse")
