import io
import os
import pty

import pytest

from ptdbench.report.progress import Progress, read_progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and has no file descriptor."""

    def isatty(self) -> bool:
        return True


def progress(stream, total_steps=100, label="gpt_tiny ddp"):
    return Progress(total_steps, "tokens", units_per_step=2048, label=label, now=50.0, stream=stream)


@pytest.mark.parametrize(("stream", "interval"), [(Terminal(), 0.5), (io.StringIO(), 10.0)])
def test_due_soon_and_then_after_each_interval(stream, interval):
    line = progress(stream)
    assert not line.due(50.49)
    assert line.due(50.5)  # the first one comes soon on any stream
    line.show(1, 2.5, 50.5)
    assert not line.due(50.5 + 0.99 * interval)
    assert line.due(50.5 + interval)


def test_what_the_line_says():
    stream = io.StringIO()
    line = progress(stream)
    line.show(10, 2.5, 55.0)  # 10 steps in 5 s; the next 20 in 5 s
    line.show(30, None, 60.0, "held-out 97.2 %")
    line.close()
    assert stream.getvalue().splitlines() == [
        "gpt_tiny ddp  step 10/100  4,096 tokens/s  loss 2.5000  0:45 left",
        "gpt_tiny ddp  step 30/100  8,192 tokens/s  held-out 97.2 %  0:18 left",
    ]


def test_hours_left():
    stream = io.StringIO()
    progress(stream, total_steps=3676).show(1, None, 51.0)
    assert "1:01:15 left" in stream.getvalue()


def test_a_terminal_line_is_redrawn_in_place():
    stream = Terminal()
    line = progress(stream)
    line.show(10, 2.5, 55.0)
    line.show(30, None, 60.0)
    line.close()
    line.close()
    start, first, second = stream.getvalue().removesuffix("\n").split("\r")
    assert start == ""
    assert stream.getvalue().count("\n") == 1
    assert len(second) == len(first)  # the shorter line covers the longer one
    assert second.rstrip().endswith("0:18 left")


def test_a_terminal_line_never_wraps():
    stream = Terminal()
    progress(stream, label="x" * 300).show(1, 2.5, 51.0)
    assert len(stream.getvalue().lstrip("\r")) == 79


def test_a_real_terminal_is_recognized():
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "w") as stream:
        progress(stream).show(1, 2.5, 51.0)
        assert screen.read(1000).startswith(b"\rgpt_tiny ddp  step 1/100")


def test_nothing_is_ended_that_was_not_begun():
    stream = Terminal()
    progress(stream).close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_closed_stream_is_silence(kind):
    stream = kind()
    line = progress(stream)
    line.show(1, 2.5, 60.0)
    stream.close()
    line.show(2, 2.5, 70.0)
    assert not line.due(1e9)
    line.close()
    progress(stream).show(1, 2.5, 60.0)


def test_a_reader_that_went_away_is_silence():
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    line = progress(stream)
    line.show(1, 2.5, 60.0)
    assert not line.due(1e9)
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_no_standard_error_is_silence(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    line = progress(None)
    line.show(1, 2.5, 60.0)
    assert not line.due(1e9)


def test_the_file_is_written_soon_now_and_then_and_at_the_end(tmp_path):
    line = Progress(
        100, "tokens", units_per_step=2048, label="gpt_tiny ddp", now=50.0, stream=Terminal(), directory=tmp_path
    )
    assert read_progress(tmp_path) is None
    for step, now, written in ((10, 51.0, 10), (20, 52.0, 10), (30, 60.9, 10), (40, 61.0, 40), (100, 62.0, 100)):
        line.show(step, 2.5, now)
        found = read_progress(tmp_path)
        assert found
        assert (found["step"], found["steps"], found["unit"]) == (written, 100, "tokens")
    assert found["per_second"] == 60 * 2048  # the last 60 steps took one second
