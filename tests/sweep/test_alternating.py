"""Two interpreters or two commits in turn: in which order, with what they are started, and what is refused."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest

from ptdbench import search_path
from ptdbench.launch import local
from ptdbench.problems import ConfigError
from ptdbench.records.store import write_record
from ptdbench.setup.config import Repeat
from ptdbench.sweep import alternating
from ptdbench.sweep.alternating import Side
from tests.report.made import run

#: Stands for an interpreter: notes what it was started with, and leaves results.
STUB = """#!/bin/sh
echo "$PWD $@" >> {log}
[ {leaves} = 1 ] || exit 1
for word in "$@"; do case "$word" in hydra.sweep.dir=*) folder=${{word#hydra.sweep.dir=}};; esac; done
folder=$(echo "$folder" | tr -d "'"); mkdir -p "$folder"; touch "$folder/results.jsonl"; exit {status}
"""


@pytest.fixture
def stubs(tmp_path):
    def make(text: str = STUB, leaves: int = 1, status: int = 0) -> list[Side]:
        sides = [Side(name, str(tmp_path / name / "python"), tmp_path / name) for name in ("before", "after")]
        for side in sides:
            side.directory.mkdir()
            Path(side.python).write_text(text.format(log=tmp_path / "log", leaves=leaves, status=status))
            Path(side.python).chmod(0o755)
        return sides

    return make


def repeat(runs: int | Literal["auto"]) -> Repeat:
    return Repeat(runs=runs, max=20, tied_within=0.02, seed=0, block=None, series=None)


def started(folder: Path) -> list[tuple[str, str]]:
    lines = (folder / "log").read_text().splitlines()
    return [(Path(line.split()[0]).name, line.partition("repeat.block=")[2].split()[0]) for line in lines]


def test_blocks_are_abba_and_a_run_that_fails_is_a_result(tmp_path, stubs):
    alternating.run(stubs(status=1), ["parallel=ddp"], repeat(4), tmp_path / "out")
    seen = started(tmp_path)
    assert [block for _, block in seen] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    for block in (0, 4):
        first, second, *reverse = [side for side, _ in seen[block : block + 4]]
        assert {first, second} == {"before", "after"}
        assert reverse == [second, first]


@pytest.mark.parametrize(("runs", "more"), [(2, ""), ("auto", " repeat.runs=auto repeat.max=2")])
def test_each_is_a_sweep_of_one_block_that_others_are_paired_with(tmp_path, stubs, runs, more):
    alternating.run(stubs(), ["parallel=ddp,fsdp", "seed=1"], replace(repeat(runs), max=2), tmp_path / "my out")
    line = (tmp_path / "log").read_text().splitlines()[-1]
    side = Path(line.split()[0]).name
    own = f"repeat.block=1 repeat.series='my out'{more}"
    place = f"hydra.sweep.dir='{tmp_path / 'my out' / side / '1'}'"
    assert line.endswith(f" ptdbench train -m parallel=ddp,fsdp seed=1 {own} {place}")


@pytest.fixture
def carried_out(tmp_path, monkeypatch):
    """The sides and blocks that are carried out where each block has one run, which ends as a test wants."""

    def it(asked, ends):
        seen = []

        def start(side, overrides, folder, one):
            seen.append((side.name, one.block))
            written = run(directory=str(folder / "0_gpt_tiny_ddp")).written
            written |= ends(*seen[-1])
            (folder / "0_gpt_tiny_ddp").mkdir(parents=True)
            config = written["config"] | {"repeat": asdict(one)}
            write_record(folder / "0_gpt_tiny_ddp", written | {"config": config})

        monkeypatch.setattr(alternating, "_start", start)
        sides = [Side(name, "python", tmp_path) for name in ("before", "after")]
        alternating.run(sides, [], asked, tmp_path / "out")
        return seen

    return it


class TestAuto:
    @pytest.fixture
    def compared(self, carried_out):
        def it(faster, fails=None, **options):
            def ends(side, block):
                noise = 1.001 if (block + (side == "after")) % 2 else 1.0
                rate = 1000.0 * noise * (faster if side == "after" else 1.0)
                status = "failed" if (side, block) == fails else "ok"
                return {"status": status, "metrics": {"tokens_per_second": rate}}

            return carried_out(replace(repeat("auto"), **{"max": 12, **options}), ends)

        return it

    @pytest.mark.parametrize("faster", [1.05, 1.0], ids=["different", "tied"])
    def test_settled_pair_ends_at_the_first_look(self, compared, capsys, faster):
        assert len(compared(faster)) == 2 * 4
        assert capsys.readouterr().err.splitlines()[-1] == "4 blocks of at most 12: settled"

    def test_a_run_that_fails_settles_nothing(self, compared, capsys):
        assert len(compared(1.05, fails=("after", 1), max=8)) > 2 * 3
        said = capsys.readouterr().err.splitlines()
        assert "3 blocks of at most 8: not settled between before and after of ddp" in said

    def test_unsettled_pair_runs_to_the_maximum_and_is_named(self, compared, capsys):
        assert compared(1.0, tied_within=0.0)[-1][1] == 11
        said = [line for line in capsys.readouterr().err.splitlines() if "settled" in line]
        open_pair = "not settled between before and after of ddp"
        assert said == [f"4 blocks of at most 12: {open_pair}", f"7 blocks of at most 12: {open_pair}"]


@pytest.mark.parametrize(("statuses", "blocks"), [
    ({"before": "failed", "after": "oom"}, 1),
    ({"before": "ok", "after": "failed"}, 3),
    ({"before": "failed", "after": "preempted"}, 3),
])  # fmt: skip
def test_where_every_run_of_a_block_fails_on_both_sides_it_ends(carried_out, capsys, statuses, blocks):
    seen = carried_out(repeat(3), lambda side, _: {"status": statuses[side]})
    assert [block for _, block in seen] == [block for block in range(blocks) for _ in statuses]
    said = "block 0: every run failed on both sides; stopped"
    assert (said in capsys.readouterr().err.splitlines()) == (blocks == 1)


def test_refused_side_ends_the_comparison(tmp_path, stubs):
    with pytest.raises(ConfigError, match="did not run it"):
        alternating.run(stubs(leaves=0), [], repeat(2), tmp_path / "out")
    assert len(started(tmp_path)) == 1


@pytest.mark.parametrize(("name", "status", "kind"), [
    ("TERM", 0, local.Stopped),
    ("HUP", 0, local.Stopped),
    ("INT", 0, local.Stopped),
    ("INT", 130, alternating.StoppedSide),  # which has said so itself
])  # fmt: skip
def test_a_signal_is_passed_on_and_the_side_ends_by_itself(tmp_path, stubs, name, status, kind):
    text = (
        f"#!/bin/sh\ntrap 'echo saved > {tmp_path}/saved; exit {status}' {name}\n"
        f"kill -{name} $PPID; while :; do sleep 0.05; done\n"
    )
    with local.stopping(), pytest.raises(local.Stopped) as stop:
        alternating.run(stubs(text), [], repeat(2), tmp_path / "out")
    assert (type(stop.value), stop.value.signal) == (kind, signal.Signals[f"SIG{name}"])
    assert (tmp_path / "saved").exists()


class TestInterpreters:
    def test_each_is_known_by_the_path_that_was_typed(self, tmp_path, monkeypatch):
        """A virtual environment's interpreter is often a link."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "python").symlink_to(shutil.which("true"))
        before, after = alternating.interpreters(["./python", sys.executable])
        assert (before.name, after.name, before.directory) == ("before", "after", tmp_path)
        assert (before.python, after.python) == (str(tmp_path / "python"), sys.executable)

    def test_unusable_interpreters_are_refused(self, tmp_path):
        with pytest.raises(ConfigError, match=r"^--python=nowhere/python: there is no such interpreter; try "):
            alternating.interpreters(["nowhere/python", sys.executable])
        bare = tmp_path / "python"
        bare.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named ptdbench' >&2; exit 1\n")
        bare.chmod(0o755)
        with pytest.raises(ConfigError, match=r"cannot run ptdbench: ModuleNotFoundError.*; install ptdbench there"):
            alternating.interpreters([str(bare), str(bare)])


class TestCheckouts:
    @pytest.fixture(autouse=True)
    def repository(self, tmp_path, monkeypatch):
        """Two commits, tagged ``one`` and ``two``, of a model in a folder."""
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        top = tmp_path / "repository"
        folder = top / "code"
        folder.mkdir(parents=True)
        self.git(top, "init", "--quiet")
        for tag in ("one", "two"):
            (folder / "mine.py").write_text(tag)
            self.git(top, "add", ".")
            self.git(top, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", tag)
            self.git(top, "tag", tag)
        monkeypatch.chdir(folder)
        return top

    @staticmethod
    def git(top: Path, *words: str) -> str:
        return subprocess.run(["git", *words], cwd=top, check=True, capture_output=True, text=True, timeout=60).stdout

    def test_each_commit_is_there_beside_changes_and_goes_again_whatever_happens(self, repository):
        path = repository / "code" / "mine.py"
        path.write_text("three")
        with pytest.raises(local.Stopped), alternating.checkouts(["one", "two"], []) as sides:  # noqa: PT012
            assert [side.name for side in sides] == ["before", "after"]
            assert [(side.directory / "mine.py").read_text() for side in sides] == ["one", "two"]
            assert {side.python for side in sides} == {sys.executable}
            raise local.Stopped(signal.SIGTERM)
        assert not sides[0].directory.parents[1].exists()
        assert len(self.git(repository, "worktree", "list").splitlines()) == 1
        assert path.read_text() == "three"

    @staticmethod
    def refused(*revisions: str, typed: Sequence[str] = ()) -> str:
        with pytest.raises(ConfigError) as refusal, alternating.checkouts(revisions, typed):
            pass
        return str(refusal.value)

    def test_no_commit_and_no_repository_and_no_git(self, tmp_path, monkeypatch):
        assert self.refused("one", "three").startswith("--checkout=three: it is no commit")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        assert "not a git repository" in self.refused("one", "two")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert self.refused("one", "two") == "--checkout=one: there is no git on PATH; install git"

    @pytest.mark.parametrize("entry", ["", "{top}/code", "{top}"])
    def test_pythonpath_entries_lead_to_the_checkout(self, repository, monkeypatch, entry):
        monkeypatch.setenv("PYTHONPATH", f"{entry.format(top=repository)}{os.pathsep}/elsewhere")
        with alternating.checkouts(["one", "two"], ["model._target_=mine.Mine"]) as sides:
            for side in sides:
                standard, entries = search_path.standard(), side.environ["PYTHONPATH"].split(os.pathsep)
                assert entries[: len(standard) + 1] == [*standard, str(side.directory)]
                assert not any(Path(one).is_relative_to(repository) for one in entries)

    @pytest.mark.parametrize("value", ["mine.Mine", "torch.nn.Linear,editable.Mine", "choice(editable.A,editable.B)"])
    def test_a_class_that_both_would_import_from_the_working_tree(self, repository, monkeypatch, tmp_path, value):
        """As an editable install of it does: its path comes after PYTHONPATH, and a commit may lack it."""
        (repository / "lib").mkdir()
        (repository / "lib" / "editable.py").touch()
        (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.append({str(repository / 'lib')!r})")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        overrides = ["model=custom", f"model._target_={value}"]
        if "editable" not in value:
            with alternating.checkouts(["one", "two"], overrides):
                return
        said = self.refused("one", "two", typed=overrides)
        assert re.match(r"model\._target_=.*before would import it from .*/lib/editable\.py", said)
        assert len(self.git(repository, "worktree", "list").splitlines()) == 1
