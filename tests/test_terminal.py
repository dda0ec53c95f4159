"""What is printed for a person: its reader may go away, and what others wrote does not steer the terminal."""

import io
import os
import subprocess
import sys

import pytest

from ptdbench import terminal
from ptdbench.terminal import command, echo, from_here, plain, transient, under
from tests import forked
from tests.conftest import ROOT
from tests.programs import Terminal


@pytest.mark.parametrize(("text", "shown"), [
    ("two\nlines\tand ä·µ模…", "two\nlines\tand ä·µ模…"),
    ("\x1b[31mred\x1b[0m\x07\r\x00", r"\x1b[31mred\x1b[0m\x07\x0d\x00"),
    ("\x7f\x80\x9b\x9f\xa0", "\\x7f\\x80\\x9b\\x9f\xa0"),
    ("\udcff\ud800", r"\udcff\ud800"),
    (r"\x1b", r"\x1b"),
    ("pay\u202egpj.exe \u2066a\u2069\u200f\u061c\u2028", r"pay\u202egpj.exe \u2066a\u2069\u200f\u061c\u2028"),
])  # fmt: skip
def test_control_characters_are_escaped(text, shown):
    assert plain(text) == plain(plain(text)) == shown


@pytest.mark.parametrize(("path", "shown"), [
    ("outputs/run", "outputs/run"),
    ("/a/here/outputs/run", "outputs/run"),
    ("/a/here", "."),
    ("../there/run", "/a/there/run"),
    ("/a/heretic", "/a/heretic"),
])  # fmt: skip
def test_a_path_is_relative_only_within_the_current_directory(path, shown, monkeypatch, tmp_path):
    (tmp_path / "a/here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/here")
    absolute = f"{tmp_path}{path}" if path.startswith("/") else path
    assert str(from_here(absolute)) == (f"{tmp_path}{shown}" if shown.startswith("/") else shown)


def test_a_path_is_shown_from_a_directory_that_was_deleted(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert from_here(tmp_path / "run") == tmp_path / "run"


@pytest.mark.parametrize(("typed", "train", "status"), [
    (["train.py", "-m"], "python train.py", "python -m ptdbench status"),
    (["/env/bin/ptdbench"], "ptdbench train", "ptdbench status"),
    (["/lib/ptdbench/__main__.py"], "python -m ptdbench train", "python -m ptdbench status"),
    (["train.py", "-cd", "my conf", "-m"], "python train.py --config-dir 'my conf'", "python -m ptdbench status"),
    (["ptdbench", "--config-dir=mine"], "ptdbench train --config-dir mine", "ptdbench status"),
])  # fmt: skip
def test_hint_names_the_typed_program(typed, train, status, monkeypatch):
    monkeypatch.setattr(sys, "argv", typed)
    assert (command(), command("status")) == (train, status)
    for launcher, program in (("torchrun", "torchrun"), ("srun", "srun"), ("openmpi", "mpirun"), ("mpich", "mpirun")):
        assert under(launcher) == f"{program} ... {train.removeprefix('python ')}"


def test_hint_names_no_missing_file(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["my_sweep.py"])
    monkeypatch.setattr(terminal, "_TRAIN_PY", tmp_path / "train.py")
    assert command() == "ptdbench train"


@pytest.mark.parametrize(("encoding", "written"), [
    ("ascii", "toy \\xb7 fp32 \\xb13%\\u2026\n\\u2500\\u2500\\u2500\\xe92\\x1b\n"),
    ("latin-1", "toy · fp32 ±3%\\u2026\n\\u2500\\u2500\\u2500é2\\x1b\n"),
])  # fmt: skip
def test_characters_the_stream_lacks_are_escaped(encoding, written):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding)
    echo("toy · fp32 ±3%…\n───é2\x1b", stream)
    assert raw.getvalue().decode(encoding) == written


def test_lost_streams_and_full_disks_are_reported_once(monkeypatch, environ, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    echo("nobody hears it")
    program = "from ptdbench.terminal import echo; echo('a' * 100_000); echo('b'); print('c'); raise SystemExit(3)"
    done = without_reader("-c", program, environ=environ, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    program = "from ptdbench.terminal import echo; echo('a'); echo('b')"
    with open("/dev/full", "w") as full:
        done = python("-c", program, environ=environ, cwd=tmp_path, stdout=full)
    assert (done.returncode, done.stderr) == (0, "the output cannot be written: No space left on device\n")


def python(*words, environ, cwd, stdout, stderr=subprocess.PIPE):
    environ = {**environ, "PYTHONPATH": str(ROOT)}
    streams = {"stdout": stdout, "stderr": stderr, "text": True}
    return subprocess.run([sys.executable, *words], env=environ, cwd=cwd, **streams, timeout=240, check=False)


def without_reader(*words, environ, cwd, both=False):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        stderr = stdout if both else subprocess.PIPE
        return python(*words, environ=environ, cwd=cwd, stdout=stdout, stderr=stderr)


@pytest.mark.ranks
class TestPrograms:
    TRAIN = (str(ROOT / "train.py"), "model=toy", "train.steps=2", "device=cpu", "hydra.run.dir=run")

    @pytest.mark.thorough
    def test_failed_run_fails_without_readers(self, environ, tmp_path):
        """Although nobody reads its errors either."""
        done = without_reader(*self.TRAIN, "optimizer.lr=1e30", environ=environ, cwd=tmp_path, both=True)
        assert done.returncode == 1
        assert (tmp_path / "run" / "record.json").exists()

    def test_error_text_does_not_steer_the_terminal(self, environ, tmp_path):
        (tmp_path / "mine.py").write_text("def Model():\n    raise ValueError('\\x1b[2Jgone\\x07')\n")
        words = ("model=custom", "model._target_=mine.Model", "device=cpu")
        done = forked.with_ranks(*words, cwd=tmp_path, environ=environ)
        assert done.returncode == 1
        assert r"\x1b[2Jgone\x07" in done.stdout + done.stderr
        assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("stream", "kind", "sent"),
    [(Terminal, "xterm", "\r\x1b[2Kchecking…\r\x1b[2K"), (Terminal, "dumb", ""), (io.StringIO, "xterm", "")],
)
def test_transient_line_is_cleared(stream, kind, sent, monkeypatch):
    monkeypatch.setenv("TERM", kind)
    shown = stream()
    with transient("checking…", shown):
        pass
    assert shown.getvalue() == sent
    with transient("checking…", None):
        pass
