"""Stacks of this process's threads: all of them for the user, and the main thread's place for the watchdog."""

import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_TORCH = Path(torch.__file__).parent

#: torch code that is waiting for other ranks if it does not return: collectives, FSDP and pipeline schedules; the
#: backward pass, whose hooks reduce gradients; DDP itself; and waits for the GPU, whose collectives wait.
_WAITING = [str(_TORCH / part) for part in ("distributed/", "autograd/", "nn/parallel/", "cuda/")]

#: torch code that only forwards calls.
_PASSING = tuple(str(_TORCH / part) for part in ("_ops.py", "utils/_contextlib.py", "_dynamo/"))

_NAMES = {
    "_engine_run_backward": "backward",
    "_new_process_group_helper": "init_process_group",
    "_store_based_barrier": "init_process_group",
}


@dataclass(frozen=True)
class CodePlace:
    """Where a thread is in the code."""

    function: str  #: The innermost informative Python function.
    line: str  #: Its file name and line.
    waits: bool  #: Whether the function waits for other ranks.

    def __str__(self) -> str:
        return self.function if self.waits else f"{self.function} ({self.line})"


def waits_in(file: str) -> None:
    """Count the code of this file as waiting: it reads the result of a collective from the GPU."""
    _WAITING.append(file)


def main_thread() -> CodePlace:
    """Return the current place of the main thread."""
    return place(sys._current_frames()[threading.main_thread().ident or 0])


def place(frame: FrameType) -> CodePlace:
    """Return the place of a thread with this innermost frame."""
    while frame.f_back and frame.f_code.co_filename.startswith(_PASSING):
        frame = frame.f_back
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    return CodePlace(_NAMES.get(name, name), f"{Path(file).name}:{frame.f_lineno}", file.startswith(tuple(_WAITING)))


def text() -> str:
    """Return the stacks of all threads, innermost call last, as in a traceback."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = (
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
    return "\n".join(stacks)
