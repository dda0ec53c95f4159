"""Failure reports of ranks, and where in a user's code an exception was raised."""

import json
import socket
import sysconfig
import time
from pathlib import Path

import pytest
import torch

from ptdbench.examples.custom_model import __file__ as example
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records.failure import (
    describe,
    read_failures,
    reporters,
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
    assert reporters(tmp_path) == {0, 11}
    assert read_failures(tmp_path / "no reports") == []


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
