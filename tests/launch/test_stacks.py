"""Where threads are."""

import sys
import threading

import torch

from ptdbench.launch import stacks
from ptdbench.parallel import experts


def test_torch_code_waits_and_user_code_has_its_line():
    frames = []

    def square(value):
        frames.extend([sys._getframe(1), sys._getframe()])
        return value**2

    torch.autograd.functional.jacobian(square, torch.ones(1))
    theirs, own = map(stacks.place, frames)
    assert (str(theirs), theirs.waits) == ("jacobian", True)
    assert (str(own), own.waits) == (f"square (test_stacks.py:{frames[1].f_lineno})", False)


def test_exchanges_wait_and_decorators_are_skipped():
    """By asking the GPU, which no Python of torch's does."""
    code = {"here": sys._getframe}
    exec(compile("def dispatch(): return here()", experts.__file__, "exec"), code)
    place = stacks.place(code["dispatch"]())
    assert (str(place), place.waits) == ("dispatch", True)
    frames = []
    torch.no_grad()(lambda: frames.append(sys._getframe(1)))()
    assert frames[0].f_code.co_filename.endswith("_contextlib.py")
    assert stacks.place(frames[0]).function == "test_exchanges_wait_and_decorators_are_skipped"


def test_text_has_all_threads_with_their_source():
    go_on = threading.Event()
    other = threading.Thread(target=go_on.wait, name="of the test")
    other.start()
    text = stacks.text()
    go_on.set()
    other.join()
    assert "Thread MainThread:" in text
    assert "text = stacks.text()" in text
    assert "Thread of the test:" in text
