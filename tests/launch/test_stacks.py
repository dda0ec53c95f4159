"""Where threads are."""

from __future__ import annotations

import sys
from types import FrameType

import torch
import torch.distributed as dist

from ptdbench.launch import stacks


def here() -> FrameType:
    """The frame of this call."""
    return sys._getframe()


def test_a_function_of_ones_own_does_not_wait_and_is_named_with_its_line():
    frame = here()
    place = stacks.place(frame)
    assert not place.waits
    assert str(place) == f"here (test_stacks.py:{frame.f_lineno})"


def test_torch_code_that_waits_for_others_is_named_without_its_line():
    frames = []

    def square(value):
        frames.append(sys._getframe(1))
        return value**2

    torch.autograd.functional.jacobian(square, torch.ones(1))
    place = stacks.place(frames[0])
    assert place.waits
    assert str(place) == "jacobian"


def test_decorators_of_torch_say_nothing():
    frames = []
    torch.no_grad()(lambda: frames.append(sys._getframe(1)))()
    assert frames[0].f_code.co_filename.endswith("_contextlib.py")
    assert stacks.place(frames[0]).function == "test_decorators_of_torch_say_nothing"


def test_the_file_has_all_threads_twice(tmp_path):
    path = tmp_path / "failures" / "stacks.txt"
    stacks.write(path)
    text = path.read_text()
    assert "Thread MainThread:" in text
    assert "stacks.write(path)" in text  # Python's view has the source
    assert "most recent call first" in text  # the interpreter's


def test_the_collectives_of_torch_are_where_waiting_is_looked_for():
    assert dist.all_reduce.__wrapped__.__code__.co_filename.startswith(stacks._WAITING)
