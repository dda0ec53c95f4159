"""What ``--help``, ``--info`` and ``--cfg`` print: nothing runs."""

from __future__ import annotations

import argparse
import io
import pickle
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import hydra
from omegaconf import Container, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ptdbench.problems import ConfigError, Problem, require
from ptdbench.setup.compose import Composed
from ptdbench.terminal import command, say


def by_hydra(arguments: argparse.Namespace, conf: Path) -> int:
    """Let Hydra read the command line and show what was asked for; 0, the exit status.

    Raises:
        ConfigError: Hydra cannot: it says in a line why.
    """
    if arguments.config_path and not Path(arguments.config_path).is_absolute():
        rule = "must be absolute where Hydra shows something of it"
        require(Problem("--config-path", arguments.config_path, rule, f"try {conf}"))
    task = hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(_nothing)
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            task()
    except (ValueError, OmegaConfBaseException) as error:  # flags that exclude each other
        raise ConfigError([_line(str(error).partition("\n")[0])]) from None
    finally:
        if shown.getvalue():
            text = shown.getvalue().removesuffix("\n")
            say(_as_typed(text) if arguments.help else text)
    return 0


def _nothing(_: Any) -> None:
    """What Hydra is asked to show, it does not run."""


def _line(reason: str) -> Problem:
    return Problem("command line", " ".join(sys.argv[1:]), reason)


def _as_typed(text: str) -> str:
    """The help of ``python train.py`` with the program that was started; the installed package has no ``train.py``."""
    typed = command()
    if typed == "python train.py":
        return text
    text = text.replace("python train.py", typed).replace(" train.py", " -m ptdbench train")
    return text.replace("python -m ptdbench status", command("status"))


def configs(arguments: argparse.Namespace, composed: Composed) -> int:
    """Print the configuration of every run, as Hydra does that of one; 0, the exit status.

    Raises:
        ConfigError: There is no such package in it, or it cannot be resolved.
    """
    several = composed.is_sweep and len(composed.jobs) > 1
    wholes = composed.whole or [pickle.dumps(composed.first)]
    for number, (whole, overrides) in enumerate(zip(wholes, composed.overrides, strict=False)):
        if several:
            say(f"{'---' + chr(10) if number else ''}# run {number}: {' '.join(overrides)}")
        say(_shown(pickle.loads(whole), arguments).removesuffix("\n"))
    return 0


def _shown(job: Any, arguments: argparse.Namespace) -> str:
    """The part of a configuration that was asked for, as YAML."""
    with read_write(job), open_dict(job):
        if arguments.cfg == "job":
            del job["hydra"]
        elif arguments.cfg == "hydra":
            job = OmegaConf.masked_copy(job, "hydra")
            with read_write(job.hydra), open_dict(job.hydra):  # they say how to print what is asked for elsewhere
                del job.hydra["hydra_help"], job.hydra["help"]
        package = None if arguments.package == "_global_" else arguments.package
        found = job if package is None else OmegaConf.select(job, package)
        if found is None:
            raise ConfigError([Problem("--package", package, "is no part of the configuration")])
        if not isinstance(found, Container):
            return str(found)
        if arguments.resolve:
            try:
                OmegaConf.resolve(found)
            except OmegaConfBaseException as error:
                raise ConfigError([_line(str(error).partition("\n")[0])]) from None
        return f"# @package {package}\n" * (package is not None) + OmegaConf.to_yaml(found)
