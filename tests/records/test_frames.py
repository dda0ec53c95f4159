"""Where in a user's code an exception was raised."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch

from ptdbench.examples.custom_model import __file__ as example
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records.failure import describe, last_frame, user_frame


def raised(code: str, file: str) -> BaseException:
    """What ``code`` raises as the content of ``file``."""
    try:
        exec(compile(code, file, "exec"), {"json": json, "torch": torch})
    except Exception as error:
        # As for a rank, whose frames begin in this package: without the frame of this function.
        return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
    raise AssertionError(code)


INTO_TORCH = "def forward(x):\n    return torch.nn.Linear(2, 2)(x)\n\nforward(torch.ones(2, 3))"
SITE = Path(sysconfig.get_path("purelib"))


@pytest.mark.parametrize(
    ("code", "file", "frame"),
    [
        (INTO_TORCH, "/somewhere/mymodels.py", "mymodels.py:2 in forward"),
        ("json.loads('{')", "/somewhere/mymodels.py", "mymodels.py:1 in <module>"),
        (INTO_TORCH, example, "custom_model.py:2 in forward"),
        (INTO_TORCH, str(SITE / "transformers" / "gpt2.py"), "gpt2.py:2 in forward"),
        (INTO_TORCH, str(SITE / "torch" / "nn" / "module.py"), ""),
    ],
)
def test_the_last_frame_outside_of_libraries_is_named(code, file, frame, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert user_frame(raised(code, file)) == frame


def test_a_file_below_the_working_directory_has_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert user_frame(raised("1 / 0", str(tmp_path / "zoo" / "mymodels.py"))) == "zoo/mymodels.py:1 in <module>"


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
    (str(PACKAGE / "run.py"), 169, "take_part"),
    (str(SITE / "hydra" / "main.py"), 94, "decorated_main"),
    ("/somewhere/train.py", 4, "<module>"),
]


@pytest.mark.parametrize(
    ("calls", "frame"),
    [
        ([WITHIN[0], ("/somewhere/mymodels.py", 2, "forward"), *WITHIN[1:], *OUTSIDE], "mymodels.py:2 in forward"),
        ([(str(SITE / "transformers" / "gpt2.py"), 7, "forward"), *WITHIN, *OUTSIDE], "gpt2.py:7 in forward"),
        ([*WITHIN, *OUTSIDE], "engine.py:229 in gradients"),
        ([("/somewhere/mymodels.py", 2, "watch"), ("<string>", 1, "<module>")], "mymodels.py:2 in watch"),  # a thread
        ([("<string>", 1, "<module>")], ""),
    ],
)
def test_of_the_calls_of_a_crash_the_last_of_a_user_is_named_or_else_of_ours(calls, frame, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert last_frame(calls) == frame


def test_a_pipelines_wrapper_is_looked_through(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrapper = RuntimeError("[Stage 0] failed")
    wrapper.__cause__ = raised("1 / 0", "/somewhere/mymodels.py")
    assert describe(wrapper, rank=0).where == "mymodels.py:1 in <module>"
