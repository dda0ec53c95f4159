"""The command line, as Hydra reads it, in full where it has something in short.

This file has all that is used of Hydra and is internal to it: the grammar of its flags, and how ``--config-dir`` takes
effect.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser  # none is public: pyproject.toml keeps to tested versions
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra

from ptdbench.problems import ConfigError, Problem
from ptdbench.terminal import command

LAUNCHER = "hydra/launcher"
SWEEPER = "hydra/sweeper"


def option(override: str) -> str:
    """Return the option that an override is about: ``++cluster.extra.nice=100`` is about ``cluster.extra.nice``.

    ``cluster@other=x`` is about ``cluster``.
    """
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def values(overrides: Iterable[str]) -> dict[str, str]:
    """Return the value of each option that overrides are about, as it is typed; of one given twice the last."""
    return {option(override): override.partition("=")[2] for override in overrides}


def search_in(folder: Path) -> None:
    """Let Hydra look for choices in one more folder, at the place in the order where it puts ``--config-dir``."""
    loader = GlobalHydra.instance().config_loader()
    search = loader.get_search_path()
    search.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    loader.repository.initialize_sources(search)  # type: ignore[attr-defined]


def quoted(text: str) -> str:
    """Quote a value as Hydra reads it: there a backslash escapes a quote, and itself only ahead of one."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def is_cluster(override: str) -> bool:
    """Return whether an override says where a run is carried out, which is no part of what it is."""
    name = option(override)
    return name in ("cluster", LAUNCHER) or name.startswith("cluster.")


def parse() -> argparse.Namespace:
    """Parse the command line as Hydra does."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        problem = Problem("command line", " ".join(sys.argv[1:]), message, f"see {command()} --help")
        raise ConfigError([problem])

    parser.error = refuse  # type: ignore[method-assign]
    arguments = parser.parse_intermixed_args()  # flags between overrides, too
    if arguments.experimental_rerun:
        refuse("--experimental-rerun would have no effect: resume=RUN goes on with a run")
    if arguments.resolve and not arguments.cfg:
        refuse("--resolve goes with --cfg")
    if arguments.run and arguments.multirun:
        refuse("--run and --multirun exclude each other")
    return arguments


#: What is short for an option of the group ``profile``, and for one of ``repeat``.
_PROFILE = {"profile=true": "profile.trace=true", "profile=false": "profile.steps=0"}
_REPEAT = "repeat="
_RUNS = "repeat.runs"

#: Runs of ``repeat=auto``. Steps of one run say little of the next: many short runs decide sooner than few long ones.
_SHORT = "train.steps=20"

#: What says how long a run is, or goes on with earlier ones.
_LENGTHS = ("train.steps", "experiment", "resume", "sweep.resume")


def in_full(overrides: Iterable[str]) -> list[str]:
    """Return overrides with their full names for what is typed in short."""
    words = (_PROFILE.get(override.lower(), override) for override in overrides)
    return [f"{_RUNS}={word.removeprefix(_REPEAT)}" if word.startswith(_REPEAT) else word for word in words]


def short_runs(overrides: Iterable[str]) -> list[str]:
    """Return the length of each run of ``repeat=auto``, unless something typed in full says so."""
    typed = values(overrides)
    return [_SHORT] if typed.get(_RUNS) == "auto" and typed.keys().isdisjoint(_LENGTHS) else []


def imply(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides in full where the command line has them in short, with what a launcher means by itself.

    ``submitit_slurm`` is ``cluster=slurm``, and both launchers of submitit sweep: without ``-m`` Hydra would ignore
    them and run in this process, silently. ``repeat=5`` is a sweep, too, and ``repeat=auto`` one of short runs; other
    files of configuration have runs of their own length.
    """
    overrides = in_full(arguments.overrides)
    typed, extra = values(overrides), []
    if typed.get(LAUNCHER) == "submitit_slurm" and "cluster" not in typed:
        extra.append("cluster=slurm")
    sweeps = typed.get(LAUNCHER) == "submitit_local" or typed.get(_RUNS, "1") != "1"
    if sweeps and not arguments.multirun and "hydra.mode" not in typed:
        extra.append("hydra.mode=MULTIRUN")
    if not (arguments.config_dir or arguments.config_name or arguments.config_path):
        extra += short_runs(overrides)
    return [*overrides, *extra]
