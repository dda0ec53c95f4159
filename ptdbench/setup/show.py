"""What ``--help``, ``--info`` and ``--cfg`` print: Hydra shows it, and nothing runs."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

from hydra.core.global_hydra import GlobalHydra
from omegaconf.errors import OmegaConfBaseException

from ptdbench.problems import ConfigError, Problem
from ptdbench.setup.compose import Composed
from ptdbench.terminal import command, say


def show(task: Callable[[], None], is_help: bool = False) -> int:
    """Let Hydra show what was asked for instead of running it; 0, the exit status."""
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            task()
    except (ValueError, OmegaConfBaseException) as error:  # flags that exclude each other, what cannot be resolved
        reason = str(error).partition("\n")[0]
        raise ConfigError([Problem("command line", " ".join(sys.argv[1:]), reason)]) from None
    finally:
        if shown.getvalue():
            text = shown.getvalue().removesuffix("\n")
            say(_as_typed(text) if is_help else text)
    return 0


def _as_typed(text: str) -> str:
    """The help of ``python train.py`` with the program that was started; the installed package has no ``train.py``."""
    typed = command()
    if typed == "python train.py":
        return text
    text = text.replace("python train.py", typed).replace(" train.py", " -m ptdbench train")
    return text.replace("python -m ptdbench status", command("status"))


def show_configs(task: Callable[[], None], arguments: argparse.Namespace, composed: Composed) -> int:
    """Let Hydra show the configuration of every job; of a sweep it would show none. 0, the exit status."""
    sweep_flags = ("-m", "--multirun")
    if not composed.is_sweep or len(composed.jobs) == 1:
        sys.argv = [word for word in sys.argv if word not in sweep_flags]
        return show(task)
    hydras = [word for word in arguments.overrides if word.startswith(("hydra.", "hydra/"))]
    flags = [word for word in sys.argv[1:] if word not in arguments.overrides and word not in sweep_flags]
    for number, overrides in enumerate(composed.overrides):
        say(f"{'---' + chr(10) if number else ''}# run {number}: {' '.join(overrides)}")
        sys.argv[1:] = [*overrides, *hydras, *flags]
        GlobalHydra.instance().clear()
        show(task)
    return 0
