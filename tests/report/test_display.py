"""What a run shows of itself, by a clock that the test moves."""

import io
import os
import pty
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from ptdbench.report.display import Display, Heading
from ptdbench.terminal import echo

TINY = Heading("gpt_tiny ddp")


class Terminal(io.TextIOWrapper):
    """A terminal of 80 columns, as far as rich asks."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode()


@pytest.fixture
def wall() -> SimpleNamespace:
    return SimpleNamespace(now=50.0)


@pytest.fixture
def stream(monkeypatch) -> io.StringIO:
    monkeypatch.delenv("COLUMNS", raising=False)  # it would make lines fit
    return io.StringIO()


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def shown(stream, wall, heading=TINY) -> Display:
    """A display that nobody has entered: what its thread would do is called by the test."""
    return Display(heading, stream=stream, clock=lambda: wall.now)


def at_step(display: Display, done: int, now: float, loss: float | None = 2.5) -> None:
    display.step(done, now)
    display.loss = None if loss is None else (done, loss)
    display.show(now)


def begun(stream, wall, heading=TINY, total=100) -> Display:
    """In its first step."""
    display = shown(stream, wall, heading)
    display.begin_steps(0, total, "tokens", 2048)
    return display


class TestLines:
    """Where nothing is redrawn."""

    def test_steps(self, stream, wall):
        display = begun(stream, wall)
        at_step(display, 1, 55.0)  # what it takes, such as compiling, says nothing of the others
        at_step(display, 11, 60.0)
        display.remark = "held-out 97.2%"
        at_step(display, 31, 65.0, None)
        display.loss = 31, 2.25  # steps are drained more rarely
        display.step(41, 70.0)
        display.show(70.0)
        at_step(display, 100, 71.0)
        display.conclude(2048.0)
        assert stream.getvalue().splitlines() == [
            "gpt_tiny ddp  step 1/100  loss 2.5000",
            "gpt_tiny ddp  step 11/100  4,096 tokens/s  loss 2.5000  0:45 left",
            "gpt_tiny ddp  step 31/100  8,192 tokens/s  held-out 97.2%  0:18 left",
            "gpt_tiny ddp  step 41/100  4,096 tokens/s  loss 2.2500 (step 31)  held-out 97.2%  0:30 left",
            "gpt_tiny ddp  step 100/100  2,048 tokens/s  loss 2.5000  held-out 97.2%  0:00 left",
        ]

    def test_a_line_that_stays_fits_too(self, stream, wall, monkeypatch):
        monkeypatch.setenv("COLUMNS", "60")
        display = begun(stream, wall)
        at_step(display, 1, 51.0)
        at_step(display, 11, 61.0)
        assert stream.getvalue().splitlines()[-1] == "gpt_tiny ddp  step 11/100  2,048 tokens/s  1:29 left"

    def test_the_last_line_of_a_stopped_run_claims_no_time_left(self, stream, wall):
        display = begun(stream, wall)
        at_step(display, 1, 51.0)
        at_step(display, 11, 61.0)
        display.conclude(1024.0)
        assert stream.getvalue().splitlines()[-1] == "gpt_tiny ddp  step 11/100  1,024 tokens/s  loss 2.5000"

    def test_of_several_devices_the_rate_of_each_is_shown(self, stream, wall):
        display = shown(stream, wall)
        display.devices = (8, "GPU")
        display.begin_steps(0, 10, "tokens", 2048)
        display.conclude(4096.0)
        assert "step 0/10  4,096 tokens/s  (512 a GPU)" in stream.getvalue()

    def test_when_a_line_is_due(self, stream, wall):
        display = begun(stream, wall)
        assert not display.due(1e9)
        display.step(1, 55.0)
        assert not display.due(55.4)
        assert display.due(55.5)  # the first one comes soon
        at_step(display, 2, 55.5)
        assert not display.due(65.4)
        assert display.due(65.5)

    def test_a_phase_that_lasts_is_a_line_and_a_short_one_is_none(self, stream, wall):
        display = shown(stream, wall)
        display.tick(51.9)
        display.phase("building")
        display.tick(51.9)
        assert stream.getvalue() == ""
        for now in (52.0, 53.0, 59.0):
            display.tick(now)
        assert stream.getvalue() == "gpt_tiny ddp · building…\n"

    def test_a_long_first_step_is_explained_rarely(self, stream, wall):
        display = begun(stream, wall)
        for second in range(51, 50 + 200):
            display.tick(second)
        assert stream.getvalue().splitlines() == [
            "gpt_tiny ddp · first step…",
            *(f"gpt_tiny ddp: first step, {span} so far" for span in ("10 s", "30 s", "60 s", "2 min", "3 min")),
        ]

    @pytest.mark.parametrize(("steps", "late", "said"), [
        ({1: 52.0, 5: 56.0}, 66.0, "step 6: 10 s, before 1 s each"),
        ({1: 100.0, 2: 140.0}, 220.0, "step 3: 80 s, before 40 s each"),  # slow ones are no news
    ])  # fmt: skip
    def test_a_step_that_is_twice_as_slow_and_ten_seconds(self, stream, wall, steps, late, said):
        display = begun(stream, wall)
        for done, now in steps.items():
            display.step(done, now)
        display.tick(late - 1)
        assert stream.getvalue() == ""
        display.tick(late)
        display.tick(late + 1)
        assert stream.getvalue() == f"gpt_tiny ddp  {said}\n"

    def test_pauses_do_not_count_as_step_time(self, stream, wall):
        display = begun(stream, wall)
        display.step(1, 51.0)
        display.step(2, 52.0)
        wall.now = 52.0
        with display.during("evaluating"):
            display.tick(54.0)
            wall.now = 70.0
        display.step(3, 71.0)
        display.tick(81.0)
        assert stream.getvalue().splitlines() == [
            "gpt_tiny ddp · evaluating…",
            "gpt_tiny ddp  step 4: 10 s, before 1 s each",
        ]

    def test_the_rate_after_a_pause_is_that_of_the_steps_since(self, stream, wall):
        display = begun(stream, wall)
        for done in (1, 2):
            display.step(done, 50.0 + done)
        wall.now = 52.0
        with display.during("evaluating"):
            wall.now = 112.0
        display.step(3, 112.5)
        before = display._units_per_step
        assert display.show(112.5) == before / 0.5

    def test_without_a_heading_or_a_reader_it_is_silent(self, stream, wall, monkeypatch, capsys):
        with shown(stream, wall, heading=None) as display:
            display.begin_steps(0, 10, "tokens", 1)
            at_step(display, 10, 99.0)
        assert stream.getvalue() == ""
        display = begun(stream, wall)
        stream.close()
        at_step(display, 2, 70.0)
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w", buffering=1) as pipe:
            at_step(begun(pipe, wall), 1, 60.0)
            at_step(begun(pipe, wall), 2, 61.0)
        monkeypatch.setattr("sys.stderr", None)
        at_step(begun(None, wall), 1, 60.0)
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("kind", ["dumb", ""])
    def test_a_terminal_that_cannot_redraw(self, terminal, wall, monkeypatch, kind):
        monkeypatch.setenv("TERM", kind)
        with begun(terminal, wall) as display:
            at_step(display, 1, 60.0)
        assert terminal.text == "gpt_tiny ddp  step 1/100  loss 2.5000\n"


class TestLiveLine:
    def test_a_phase(self, terminal, wall):
        display = shown(terminal, wall, Heading("gpt_tiny ddp", 2))
        display.phase("building")
        assert display.line(80, 57.5) == ("[2] gpt_tiny ddp · building… 0:07", "")

    @pytest.mark.parametrize(("width", "right"), [
        (140, "4,096 tokens/s  loss 2.5000  held-out 97.2%  0:45 left  (sweep 1:00)"),
        (93, "4,096 tokens/s  loss 2.5000  0:45 left  (sweep 1:00)"),
        (80, "4,096 tokens/s  0:45 left  (sweep 1:00)"),
        (66, "4,096 tokens/s  0:45 left"),
        (58, "0:45 left"),
    ])  # fmt: skip
    def test_what_matters_least_makes_room(self, terminal, wall, width, right):
        display = begun(terminal, wall, Heading("gpt_tiny ddp", 2, 8, 15.0))
        display.step(1, 60.0)
        display.remark = "held-out 97.2%"
        at_step(display, 11, 65.0)
        assert display.line(width, 65.0) == ("[2/8] gpt_tiny ddp  step 11/100", right)

    def test_live_line_names_late_steps_and_cuts_titles(self, terminal, wall):
        display = begun(terminal, wall)
        display.step(1, 51.0)
        at_step(display, 11, 61.0)
        assert display.line(80, 65.0)[1].endswith("1:25 left")
        assert display.line(80, 73.0)[1] == "step 12: 12 s, before 1 s each"
        left, _ = shown(terminal, wall, Heading("\x1b[2J" + "x" * 300)).line(80, 50.0)
        assert len(left) < 70
        assert left.startswith("\\x1b[2Jxxx")


class TestTerminal:
    def test_the_line_is_gone_at_the_end_and_one_stays(self, terminal, wall):
        with begun(terminal, wall) as display:
            display.step(1, 51.0)
            at_step(display, 100, 60.0)
            display.conclude(2048.0)
            wall.now = 61.0
        assert "━" in terminal.text
        assert "\x1b[?25" not in terminal.text  # the cursor is left alone: a process that is killed could not show it
        assert terminal.text.endswith("\x1b[2Kgpt_tiny ddp  step 100/100  2,048 tokens/s  loss 2.5000  in 0:11\n")

    @pytest.mark.parametrize("heading", [TINY, Heading("gpt_tiny ddp", 1, 2)], ids=str)
    def test_of_a_failed_run_no_line_stays(self, terminal, wall, heading):
        with pytest.raises(RuntimeError), begun(terminal, wall, heading):
            raise RuntimeError
        assert terminal.text.endswith("\x1b[2K")

    def test_no_color(self, terminal, wall, monkeypatch):
        monkeypatch.setenv("NO_COLOR", "1")
        with begun(terminal, wall) as display:
            display.step(50, 51.0)
        assert "━" in terminal.text
        assert "\x1b[3" not in terminal.text  # of a foreground
        assert "\x1b[9" not in terminal.text

    def test_warnings_are_lines_above_the_live_one(self, terminal, wall, monkeypatch):
        monkeypatch.setattr(sys, "stderr", terminal)
        with begun(None, wall):
            echo("warning: \x1b [bold]", sys.stderr)
        assert sys.stderr is terminal
        (line,) = [line for line in terminal.text.split("\n") if "warning" in line]
        assert line.endswith("\x1b[2Kwarning: \\x1b [bold]")

    def test_a_terminal_that_goes_away_is_silence(self, wall, monkeypatch):
        monkeypatch.setenv("TERM", "xterm")
        ours, theirs = pty.openpty()
        before = sys.stderr
        failed: list[object] = []
        monkeypatch.setattr(threading, "excepthook", failed.append)
        stream = os.fdopen(theirs, "w", encoding="utf-8")
        with begun(stream, wall) as display:
            os.close(ours)
            display.phase("building")  # drawn at once
            display.step(1, 51.0)
        assert failed == []
        assert sys.stderr is before
        with suppress(OSError):
            stream.close()
