"""A sweep in a real terminal, 80 and 140 columns wide."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ptdbench
from tests.conftest import outputs

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

SWEEP = "ptdbench train -m model=gpt_tiny parallel=ddp,fsdp,pdp optimizer.lr=1e-3,1e-4 device=cpu"


class Terminal:
    """A shell in a window of tmux."""

    def __init__(self, tmux: str, name: str, folder: Path, environ: dict[str, str], columns: int) -> None:
        self._tmux = [tmux, "-L", name]
        self._environ = {**environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        self._call(
            "-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", "60", "-c", str(folder), "bash --norc"
        )

    def type(self, line: str) -> None:
        self._call("send-keys", "-l", line)
        self._call("send-keys", "Enter")

    def interrupt(self) -> None:
        self._call("send-keys", "C-c")

    def screen(self) -> list[str]:
        """Its lines, and those that have left it at the top."""
        return [line.rstrip() for line in self._call("capture-pane", "-p", "-S", "-1000").splitlines()]

    def close(self) -> None:
        self._call("kill-server")

    def until(self, seen: Callable[[list[str]], bool], seconds: float = 300) -> list[str]:
        """The screen when something is seen on it."""
        deadline = time.monotonic() + seconds
        while not seen(screen := self.screen()):
            assert time.monotonic() < deadline, "\n".join(screen)
            time.sleep(0.1)
        return screen

    def _call(self, *words: str) -> str:
        done = subprocess.run([*self._tmux, *words], env=self._environ, capture_output=True, text=True, check=True)
        return done.stdout


@pytest.fixture(params=[80, 140])
def columns(request) -> int:
    return request.param


@pytest.fixture
def terminal(tmux, columns, home, shell) -> Iterator[Terminal]:
    opened = Terminal(tmux, f"newcomer-{home.name}", home, shell, columns)
    yield opened
    opened.close()


def ended(screen: list[str]) -> bool:
    return any(re.fullmatch(r"exit=\d+", line) for line in screen)


def test_a_sweep(terminal, columns, home):
    terminal.type(f"{SWEEP} train.steps=10; echo exit=$?")
    terminal.until(lambda screen: any("[1/6]" in line for line in screen))
    screen = terminal.until(ended)
    assert "exit=0" in screen
    (head,) = (place for place, line in enumerate(screen) if re.match(r"\s*#\s+parallel", line))
    assert screen[head].split()[-1] == "status"  # the heading is whole, in one line
    assert set(screen[head + 1]) == {"─"}
    assert len(screen[head + 1]) <= columns
    rows = [line for line in screen[head + 2 :] if re.match(r"\d(-\d)? ", line)]
    assert [row.split()[0] for row in rows] == ["1-6"] * 6  # of single runs no order is known
    assert all(row.endswith("ok") for row in rows)
    assert not any(re.search(r"\.\.\.|…", line) for line in screen[head:])
    table = " ".join(screen[head:])
    assert all(table.count(text) >= 3 for text in ("lr=0.001", "lr=0.0001"))


def test_a_sweep_that_is_interrupted_goes_on_with_what_it_says(terminal, home):
    terminal.type(f"{SWEEP.replace('gpt_tiny', 'toy')} train.steps=500; echo exit=$?")
    terminal.until(lambda screen: any("[1/6]" in line and "/500" in line for line in screen))
    terminal.interrupt()
    screen = terminal.until(ended)
    assert "exit=130" in screen
    (sweep,) = outputs(home)
    going_on = f"ptdbench train sweep.resume=outputs/{sweep.name}"
    assert f"resume       {going_on}" in "".join(screen)  # tmux wraps what is wider
    terminal.type(f"{going_on}; echo again=$?")
    screen = terminal.until(lambda screen: any(re.fullmatch(r"again=\d+", line) for line in screen))
    assert "again=0" in screen
    records = ptdbench.load(sweep)
    assert [(record["status"], record["steps"]) for record in records] == [("ok", 500)] * 6
