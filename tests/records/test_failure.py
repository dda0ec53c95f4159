"""Failure reports of ranks, and where in a user's code an exception was raised."""

import json
import signal
import socket
import sysconfig
import time
from pathlib import Path

import pytest
import torch

import ptdbench
from ptdbench.examples.custom_model import __file__ as example
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records.failure import (
    clear,
    crash_file,
    describe,
    last_frame,
    read_failures,
    reporters,
    root_cause,
    status_of,
    user_frame,
    write_failure,
)
from tests.records.test_cause import exited, report


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_of_a_message_of_megabytes_the_ends_are_kept():
    found = describe(raised(ValueError(f"begins {'x' * 10**7} ends")), rank=0)
    assert found.message.startswith("begins xxx")
    assert found.message.endswith("xxx ends")
    assert " ... (9,980,012 characters left out) ... " in found.message
    assert len(found.message) < 21_000
    assert len(found.traceback) < 201_000
    assert found.traceback.startswith("Traceback (most recent call last)")


def test_a_wrapped_reason_is_named_as_pipeline_stages_wrap_it():
    error = RuntimeError("[Stage 0] failed to run forward")
    error.__cause__ = raised_by("1 / 0", "/somewhere/mymodels.py")
    before = time.time()
    failure = describe(raised(error), rank=0)
    assert (failure.type, failure.message) == ("ZeroDivisionError", "division by zero")
    assert failure.where == "mymodels.py:1 in <module>"
    assert "failed to run forward" in failure.traceback
    assert (failure.rank, failure.host, failure.exit_code) == (0, socket.gethostname(), None)
    assert before <= failure.time <= time.time()
    telling = ValueError("no such text: corpus.txt")  # explains its cause
    telling.__cause__ = FileNotFoundError("corpus.txt")
    assert describe(telling, rank=0).type == "ValueError"


def test_the_first_report_of_each_rank_comes_back_in_the_order_of_time(tmp_path):
    late, early = report(0, 2.0, "ValueError", "bad input"), exited(11, 1.0, -9)
    assert write_failure(tmp_path, late) == late
    write_failure(tmp_path, early)
    assert write_failure(tmp_path, report(0, 0.5)) == late
    assert read_failures(tmp_path) == [early, late]
    assert read_failures(tmp_path / "no reports") == []


CRASHED = """\
Fatal Python error: Segmentation fault

Current thread 0x00007fc03c5d0b80 (most recent call first):
  File "/somewhere/mymodels.py", line 13 in forward
  File "{package}/run/rank.py", line 205 in _work
  File "/somewhere/train.py", line 4 in <module>

Extension modules: torch._C (total: 1)
"""


def crashed(folder: Path, rank: int) -> None:
    crash_file(folder, rank).write_text(CRASHED.format(package=Path(ptdbench.__file__).parent))


def test_a_rank_that_native_code_ended_has_left_its_stack_instead_of_a_report(tmp_path):
    crashed(tmp_path, 11)
    crash_file(tmp_path, 2).touch()  # goes on
    write_failure(tmp_path, report(0, 1.0))
    crashed(tmp_path, 0)  # on its way out, after it has said why it failed
    assert reporters(tmp_path) == {0, 11}
    lost, found = read_failures(tmp_path)
    assert (lost, found.rank, found.type) == (report(0, 1.0), 11, "SIGSEGV")
    assert found.message == "killed by SIGSEGV (an invalid memory access in native code)"
    assert found.where == "mymodels.py:13 in forward"
    assert "line 13 in forward" in found.traceback
    assert found.time == pytest.approx(time.time(), abs=60)
    assert root_cause([lost, found, exited(11, time.time() + 1, -signal.SIGSEGV)], 12) is found
    assert status_of(found) == "failed"


def test_what_killed_ranks_leave_is_cleared(tmp_path):
    folder = tmp_path / "failures" / "start"
    clear(folder)  # nothing is there
    folder.mkdir(parents=True)
    crash_file(folder, 0).touch()
    crashed(folder, 1)
    clear(folder)
    assert list(folder.iterdir()) == [crash_file(folder, 1)]
    crash_file(folder, 1).write_text("")
    clear(folder)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_that_cannot_say_what_it_is_is_still_reported():
    class MuteError(Exception):
        def __str__(self):
            raise AttributeError("no words")

    told = describe(MuteError(), rank=1)
    assert told.message == "(no message: the exception's own __str__ raised AttributeError)"
    assert "MuteError" in told.traceback


def raised_by(code: str, file: str) -> BaseException:
    """What ``code`` raises as the content of ``file``."""
    try:
        exec(compile(code, file, "exec"), {"json": json, "torch": torch})
    except Exception as error:
        # As for a rank, whose frames begin in this package: without the frame of this function.
        return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    raise AssertionError(code)


INTO_TORCH = "def forward(x):\n    return torch.nn.Linear(2, 2)(x)\n\nforward(torch.ones(2, 3))"
SITE = Path(sysconfig.get_path("purelib"))


@pytest.mark.parametrize(("code", "file", "frame"), [
    (INTO_TORCH, "/somewhere/mymodels.py", "mymodels.py:2 in forward"),
    ("json.loads('{')", "/somewhere/mymodels.py", "mymodels.py:1 in <module>"),
    (INTO_TORCH, example, "custom_model.py:2 in forward"),
    (INTO_TORCH, str(SITE / "transformers" / "gpt2.py"), "gpt2.py:2 in forward"),
    (INTO_TORCH, str(SITE / "torch" / "nn" / "module.py"), ""),
    ("1 / 0", "zoo/mymodels.py", "zoo/mymodels.py:1 in <module>"),  # below the current directory
])  # fmt: skip
def test_the_last_frame_outside_of_libraries_is_named(code, file, frame, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert user_frame(raised_by(code, str(tmp_path / file))) == frame


def test_what_this_package_refuses_is_nowhere_in_a_users_code():
    with pytest.raises(ConfigError) as refused:
        require(Problem("a", 1, "no"))
    own = refused.value.__traceback__
    assert user_frame(refused.value.with_traceback(own and own.tb_next)) == ""


PACKAGE = Path(example).parents[1]
WITHIN = [
    (str(SITE / "torch" / "nn" / "module.py"), 5, "_call_impl"),
    (str(PACKAGE / "parallel" / "engine.py"), 229, "gradients"),
]
OUTSIDE = [
    (str(PACKAGE / "run" / "rank.py"), 169, "take_part"),
    (str(SITE / "hydra" / "main.py"), 94, "decorated_main"),
    ("/somewhere/train.py", 4, "<module>"),
]


@pytest.mark.parametrize(("calls", "frame"), [
    ([WITHIN[0], ("/somewhere/mymodels.py", 2, "forward"), *WITHIN[1:], *OUTSIDE], "mymodels.py:2 in forward"),
    ([(str(SITE / "transformers" / "gpt2.py"), 7, "forward"), *WITHIN, *OUTSIDE], "gpt2.py:7 in forward"),
    ([*WITHIN, *OUTSIDE], "engine.py:229 in gradients"),
    ([("/somewhere/mymodels.py", 2, "watch"), ("<string>", 1, "<module>")], "mymodels.py:2 in watch"),  # a thread
    ([("<string>", 1, "<module>")], ""),
])  # fmt: skip
def test_of_the_calls_of_a_crash_the_last_of_a_user_is_named_or_else_of_ours(calls, frame, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert last_frame(calls) == frame
