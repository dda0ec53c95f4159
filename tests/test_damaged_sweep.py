"""A sweep or a run goes on although files in its directory are damaged, or says in one line that it cannot."""

import json

import pytest

from ptdbench.problems import ConfigError
from ptdbench.records import record, store
from ptdbench.setup import resume
from tests import forked
from tests.sweep.made import Directory

GARBAGE = [
    b"", b"\x00\xff", b"garbage", b"[1, 2", b"- 1", b"a: b", b"hydra: 5", b"hydra: {overrides: {task: [1]}}",
    b"hydra: {overrides: {task: {a: b}}}", b"? [1]\n: 2", b"2001-99-99", b"a: &a [*a]",
]  # fmt: skip


@pytest.mark.parametrize(
    ("option", "name"), [("sweep.resume", "multirun.yaml"), ("resume", ".hydra/overrides.yaml")], ids=["sweep", "run"]
)
class TestWhatHydraWrote:
    @pytest.mark.parametrize("text", GARBAGE, ids=repr)
    def test_garbage_is_one_line(self, tmp_path, option, name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
        with pytest.raises(ConfigError) as caught:
            resume.read([f"{option}={tmp_path}"], multirun=False, world=None)
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"{option}={tmp_path}: {name} is damaged (")

    def test_overrides_are_taken_as_they_were_typed(self, tmp_path, option, name):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = "['data.seed=${seed}', model=toy]"
        (tmp_path / name).write_text(text if option == "resume" else f"hydra: {{overrides: {{task: {text}}}}}")
        line = resume.read([f"{option}={tmp_path}"], multirun=False, world=None)
        assert line.overrides[:2] == ["data.seed=${seed}", "model=toy"]


@pytest.fixture
def sweep(tmp_path):
    return Directory(tmp_path / "sweep")


def test_a_damaged_record_is_kept_aside_and_counts_for_nothing(sweep, capsys):
    path = sweep.begin(0)
    config = sweep.end(0)["config"]
    assert record.is_done(path, config)
    assert store.earlier_record(path)["status"] == "ok"
    for number in ("", "-2"):
        (path / store.RECORD).write_bytes(b"\x00garbage")
        assert not record.is_done(path, config)
        assert store.earlier_record(path) is None
        assert (path / f"record.json.damaged{number}").read_bytes() == b"\x00garbage"
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{path / store.RECORD} is damaged: not JSON")
        assert line.endswith(f"; it is kept as record.json.damaged{number}, and the run is repeated")
        assert store.earlier_record(path) is None  # there is none any more


@pytest.mark.ranks
def test_the_run_is_done_again_and_the_others_are_not(tmp_path, environ):
    def train_py(*words):
        return forked.with_ranks("-m", *words, cwd=tmp_path, environ=environ)

    toy = ("model=toy", "device=cpu", "train.steps=2", "parallel=ddp,single")
    first = train_py(*toy, "hydra.sweep.dir=sweep")
    assert first.returncode == 0, first.stderr
    one, other = (tmp_path / "sweep" / name / store.RECORD for name in ("0_toy_ddp", "1_toy_single"))
    before = other.stat().st_mtime_ns
    one.write_bytes(b"[1]")
    with (tmp_path / "sweep" / store.RESULTS).open("a") as results:
        results.write("5\n{}\n")
    again = train_py("sweep.resume=sweep")
    assert again.returncode == 0, again.stderr
    assert "Traceback" not in again.stderr
    assert sum("is damaged and skipped" in line for line in again.stderr.splitlines()) == 2
    assert json.loads(one.read_text())["status"] == "ok"
    assert one.with_name("record.json.damaged").read_bytes() == b"[1]"
    assert other.stat().st_mtime_ns == before
