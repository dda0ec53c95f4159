"""What tests of several sources ask for: the problems of their options, processes that come at once, and images."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ptdbench.problems import ConfigError, Problem


def problems_of(call: Callable[..., Any], **options: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        call(**options)
    return list(caught.value.problems)


def problem_of(call: Callable[..., Any], **options: Any) -> Problem:
    (problem,) = problems_of(call, **options)
    return problem


def at_once(count: int, work: Callable[[Callable[[], None]], None], log: Path) -> int:
    """Let processes begin ``work(note)`` together; how many of them called ``note``, and held up the others for it."""
    context = multiprocessing.get_context("fork")  # others import torch anew
    together, never = context.Barrier(count), context.Event()

    def note() -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        never.wait(1)

    def run() -> None:
        together.wait(60)
        work(note)

    processes = [context.Process(target=run) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count
    return len(log.read_text().splitlines())


#: Three classes, of which each has a main color.
COLORS = {"cat": (200, 30, 30), "dog": (30, 200, 30), "eel": (30, 30, 200)}


def image_files(root: Path) -> Path:
    """Put images into a folder, of each class 6 to train on and 2 that are held out, and return it."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 2)):
        for name, color in COLORS.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(rng.normal(color, 20, (40 + number, 60, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root
