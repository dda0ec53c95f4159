"""``ptdbench compare``: what it prints and its exit status, for good input and bad."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from ptdbench import load
from ptdbench.launch import local
from ptdbench.problems import ConfigError, Problem
from ptdbench.records.store import RECORD
from ptdbench.sweep.alternating import StoppedSide
from tests.conftest import ROOT
from tests.programs import call
from tests.report.made import DDP, Made, keep, repeated, run

STEADY = [1000.0, 1010.0, 990.0, 1005.0, 995.0]


@pytest.fixture
def compare(ptdbench):
    return partial(ptdbench, "compare")


def kept(sweep: Path, *runs: Made) -> Path:
    """A sweep that ran in a folder of another name, as in CI, where it is moved away after each."""
    for one in runs:
        keep(sweep.parent / "moved", Path(one.directory).name, one)
    return (sweep.parent / "moved").rename(sweep)


@pytest.fixture
def sides(tmp_path):
    """Two sweeps of two configurations, the second of which one is slower in by 20 %."""
    before = kept(tmp_path / "before", *repeated("ddp", STEADY), *repeated("fsdp", STEADY))
    slower = [0.8 * rate for rate in STEADY[::-1]]
    after = kept(tmp_path / "after", *repeated("ddp", STEADY[::-1]), *repeated("fsdp", slower))
    return before, after


class TestStatus:
    def test_something_is_slower_on_one_side_and_nothing_on_the_other(self, compare, sides):
        before, after = sides
        status, out, err = compare(before, after)
        assert (status, err) == (1, [])
        assert out.splitlines()[-1].endswith(f" report {before} {after}")
        assert re.search(r"^ddp .* no difference seen$", out, re.MULTILINE)
        assert re.search(r"^fsdp .* 0\.800 .* slower$", out, re.MULTILINE)
        assert compare(after, before)[0] == 0
        status, out, _ = compare(after, before, "--fail-if-slower", "0.01%")
        line = "--fail-if-slower: ddp: its runs do not rule out that it is slower by 0.01%; try more repeats"
        assert (status, line in out.splitlines()) == (3, True)
        assert "--fail-if-slower" not in compare(after, before, "--fail-if-slower", "9%")[1]

    def test_as_json(self, compare, sides):
        status, out, err = compare(*sides, "--json", "--fail-if-slower", "5%")
        told = json.loads(out)
        assert (status, told["status"], err) == (1, 1, [])
        assert told["unit"] == "tokens"
        ddp, fsdp = told["pairs"]
        assert (ddp["configuration"], ddp["verdict"]) == ("ddp", "no difference seen")
        assert (fsdp["configuration"], fsdp["verdict"]) == ("fsdp", "slower")
        assert fsdp["ratio"] == pytest.approx(0.8)
        assert fsdp["interval"][0] < 0.8 < fsdp["interval"][1] < 1
        assert fsdp["after"]["per_second"] == pytest.approx(0.8 * fsdp["before"]["per_second"])
        assert (ddp["losses"], ddp["before"]["runs"], ddp["before"]["failed"]) == (None, 5, 0)
        assert len(ddp["after"]["directories"]) == 5

    @pytest.mark.parametrize(("typed", "expected"), [("3%", 1), ("0.03", 1), ("19.9%", 1), ("25%", 0), ("0.25", 0)])
    def test_what_is_slower_by_less_than_the_threshold_passes(self, compare, sides, typed, expected):
        assert compare(*sides, "--fail-if-slower", typed)[0] == expected

    def test_a_run_against_a_run(self, compare, sides):
        before, _ = sides
        status, out, _ = compare(before / "0_ddp", before / "0_fsdp")
        assert status == 3
        assert "ddp → fsdp" in out


class TestInput:
    def test_a_damaged_record_costs_a_warning(self, compare, sides):
        before, after = sides
        (before / "0_ddp" / RECORD).write_text('{"sta')
        status, out, (of_record,) = compare(before, after)
        assert status == 1
        assert of_record.startswith(f"{before / '0_ddp' / RECORD} is damaged: ")
        assert re.search(r"^ddp +4, 5 ", out, re.MULTILINE)
        assert re.search(r"^fsdp +5, 5 ", out, re.MULTILINE)

    def test_sweeps_of_one_place_are_not_paired_and_two_in_a_folder_count_with_all_runs(self, compare, sides, tmp_path):
        assert "not paired" in compare(*sides)[1]
        for name in ("before", "again"):
            shutil.copytree(sides[0], tmp_path / "both" / name)
        assert re.search(r"^ddp +10, 5 ", compare(tmp_path / "both", sides[1])[1], re.MULTILINE)

    @pytest.mark.parametrize("words", [["--fail-if-slower", "30%"], [], ["--json"]])
    def test_damaged_records_fail_the_gate(self, compare, sides, words):
        before, after = sides
        for path in after.glob("*_fsdp/record.json"):  # all of the slower configuration
            path.write_text("{")
        assert compare(before, after, *words)[0] == 2


class TestRefused:
    """Exit status 2, and one line that names what is wrong and what to do."""

    @pytest.fixture
    def refused(self, compare):
        def it(*words):
            status, out, err = compare(*words)
            assert (status, out) == (2, "")
            return err[-1]

        return it

    def test_the_same_directory_twice_or_one_that_lies_in_the_other(self, refused, sides, tmp_path):
        before, after = sides
        shutil.rmtree(after)
        (tmp_path / "link").symlink_to(before)
        for one, again in ((before, before), (before, tmp_path / "link"), (tmp_path, before)):
            line = f"{one} and {again}: both have 10 runs in common; give two that share none"
            assert refused(one, again) == line

    def test_a_folder_without_runs_or_without_any_that_train(self, refused, sides, tmp_path):
        missing, hello = tmp_path / "missing", kept(tmp_path / "hello", run(model=None, workload="hello"))
        assert refused(sides[0], missing).startswith(f"{missing}: no record.json there or below; ")
        assert refused(hello, sides[0]) == f"{hello}: has no run that trains; give runs of workload=train"
        virtual = kept(tmp_path / "virtual", run(kind="virtual", metrics=None))
        assert refused(sides[0], virtual) == f"{virtual}: its runs are virtual, and take no time; give measured ones"

    def test_virtual_runs_are_left_out_with_a_word_and_damaged_records_refused(self, compare, sides, refused):
        keep(sides[0], "virtual", run(kind="virtual", metrics=None))
        status, _, err = compare(*sides)
        assert (status, err) == (1, [f"{sides[0]}: 1 run that took no time, virtual or planned: left out"])
        path = sides[0] / "0_ddp" / RECORD
        path.write_text("[]")
        assert refused(path.parent, sides[1]).startswith(f"{path} is damaged: ")

    @pytest.mark.skipif(os.geteuid() == 0, reason="no permissions: root may read everything")
    def test_a_record_that_may_not_be_read(self, refused, sides):
        path = sides[0] / "0_ddp" / RECORD
        path.chmod(0)
        assert refused(path.parent, sides[1]) == f"{path}: Permission denied"

    @pytest.mark.parametrize("typed", ["3", "0%", "0", "100%", "-3%", "x", "", "nan%", "%"])
    def test_a_threshold_that_is_none(self, refused, sides, typed):
        line = refused(*sides, f"--fail-if-slower={typed}")
        rule = f"{typed or 'it'} must be a percentage above 0% and below 100%; try 3%"
        assert line == f"ptdbench compare: error: argument --fail-if-slower: {rule}"


def test_reading_commands_import_no_torch(sides, environ):
    """It imports no torch: that would cost seconds each time somebody looks."""
    before, after = map(str, sides)
    typed = [["compare", before, after], ["explain", before], ["report", before], ["status", before]]
    calls = [f"sys.argv = {['ptdbench', *words]}; found.append(main())" for words in typed]
    program = ["import sys", "from ptdbench.__main__ import main", "found = []", *calls]
    program += ["assert found == [1, 1, 0, 0]", "assert 'torch' not in sys.modules"]
    done = call(sys.executable, "-c", "\n".join(program), cwd=ROOT, environ=environ)
    assert done.returncode == 0, done.stderr


def test_its_help_says_what_the_exit_statuses_mean(compare):
    status, out, _ = compare("--help")
    said = " ".join(out.split())
    assert status == 0
    for number in "0123":
        assert f" {number}: " in said


@pytest.mark.parametrize(("words", "said"), [
    ("outputs", "compare=outputs: takes two directories, before and after; give both, or "),
    ("--python python3", "--python=python3: two sides are compared; give --python twice, or --checkout twice"),
    ("--python a --python b --checkout c", "--python=a, b: two sides are compared; "),
    ("BOTH repeat=3,5", "repeat.runs=3,5: a sweep has one; "),
    ("BOTH repeat.block=3", "repeat.block=3: is set for each block of both sides; omit it"),
    ("BOTH workload=hello", "workload=hello: only training can be compared; omit it"),
    ("BOTH repeat=0", "repeat.runs=0: must be at least 1"),
])  # fmt: skip
def test_sides_that_cannot_take_turns(compare, words, said):
    status, out, errors = compare(*words.replace("BOTH", "--checkout a --checkout b --").split())
    assert (status, out, len(errors)) == (2, "", 1)
    assert errors[0].startswith(said)


@pytest.fixture
def in_turns(compare, tmp_path, monkeypatch):
    """Compares two interpreters, whose sides are carried out by a function; all within the same second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now_compare")
    monkeypatch.setattr("ptdbench.sweep.alternating.interpreters", lambda _: [])  # which would import torch in each

    def call(carry_out):
        monkeypatch.setattr("ptdbench.sweep.alternating.run", carry_out)
        return compare("--python", sys.executable, "--python", sys.executable, "--", "parallel=ddp")

    return call


def test_where_the_records_are_is_said_if_a_side_is_refused_later(in_turns, tmp_path):
    """The second one leaves nothing, and two calls share no directory."""

    def first_only(sides, overrides, repeat, directory):
        keep(directory / "before" / "0", "0_ddp", *repeated("ddp", [1.0]))
        raise ConfigError([Problem("compare", "after", "did not run it")])

    for name in ("now_compare", "now_compare-2"):
        status, out, err = in_turns(first_only)
        assert (status, out) == (2, f"records      {tmp_path / 'outputs' / name}\n")
        assert err == ["compare=after: did not run it"]


def test_nothing_is_left_if_the_first_side_is_refused(in_turns, tmp_path):
    def refuse(sides, overrides, repeat, directory):
        (directory / "before" / "0").mkdir(parents=True)
        raise ConfigError([Problem("compare", "before", "did not run it")])

    assert in_turns(refuse) == (2, "", ["compare=before: did not run it"])
    assert list((tmp_path / "outputs").iterdir()) == []


@pytest.mark.parametrize(("stop", "said"), [(local.Stopped, ["stopped by SIGTERM"]), (StoppedSide, [])])
def test_signal_is_told_once_and_gives_the_exit_status(in_turns, stop, said):
    def stopped(*_):
        raise stop(signal.SIGTERM)

    assert in_turns(stopped) == (128 + signal.SIGTERM, "", said)


def test_where_both_took_turns_it_ends_as_a_sweep_does(in_turns):
    def run_both(sides, overrides, repeat, directory):
        for side in ("before", "after"):
            for block in range(3):
                options = {"series": directory.name, "block": block}
                one = DDP | {"config": {**DDP.config, "repeat": options}}
                keep(directory / side / str(block), "0_ddp", one)

    _, out, err = in_turns(run_both)
    assert err == []
    assert out.splitlines()[-3:] == [
        "records      outputs/now_compare",
        "phases       ptdbench explain outputs/now_compare",
        "report       ptdbench report outputs/now_compare",
    ]


@pytest.fixture
def two_commits(tmp_path, environ):
    """A repository whose second commit breaks a model, what compares both, and its environment."""
    temporary = tempfile.mkdtemp(prefix="ptdbench-", dir="/tmp")  # short, as the name of a socket in it must be
    environ = {
        **environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PYTHONPATH": str(ROOT),
        "COLUMNS": "300", "TMPDIR": temporary,
    }  # fmt: skip
    tmp_path = tmp_path / "o'clock"
    tmp_path.mkdir()
    git(tmp_path, environ, "init", "--quiet")
    text = "from torch import nn\n\nclass Mine(nn.Linear):\n    def __init__(self):\n        super().__init__(32, 8)\n"
    for more in ("", BROKEN):
        (tmp_path / "mine.py").write_text(text + more)
        git(tmp_path, environ, "add", "mine.py")
        git(tmp_path, environ, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "a model")
    model = ["model=custom", "model._target_=mine.Mine", "data=synthetic_vectors", "parallel=single"]
    words = ["--checkout", "HEAD~1", "--checkout", "HEAD", "--", *model, "repeat=1", "profile.steps=0"]
    yield tmp_path, [sys.executable, "-m", "ptdbench", "compare", *words], environ
    shutil.rmtree(temporary)


#: Breaks with a batch, and not with the two samples that are tried before.
BROKEN = """
    def forward(self, inputs):
        if len(inputs) > 2:
            raise RuntimeError('broken')
        return super().forward(inputs)
"""


def git(top: Path, environ: dict[str, str], *words: str) -> list[str]:
    return subprocess.check_output(["git", *words], cwd=top, env=environ, text=True, timeout=60).splitlines()


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_two_commits_take_turns(two_commits):
    """The second one breaks a model: it fails, and the first one does not."""
    top, command, environ = two_commits
    command = [*command, "train.steps=2"]
    done = subprocess.run(command, cwd=top, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr
    assert re.search(r"HEAD~1 samples/s .*HEAD samples/s", done.stdout)
    assert re.search(r"^single +1, 0 .* fails$", done.stdout, re.MULTILINE), done.stdout
    assert "single after: 1 of 1 run: failed on rank 0: RuntimeError: broken" in done.stdout
    (folder,) = (top / "outputs").iterdir()
    for side in ("before", "after"):
        assert [one["config"]["repeat"]["series"] for one in load(folder / side)] == [folder.name]
    assert len(git(top, environ, "worktree", "list")) == 1
