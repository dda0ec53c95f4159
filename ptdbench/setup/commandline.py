"""The command line as Hydra reads it, with shorthands expanded.

It uses Hydra's internals for the grammar of its flags, and for how ``--config-dir`` takes effect.
"""

import argparse
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser  # there is no public parser: pyproject.toml pins tested versions
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import ListConfig, OmegaConf

from ptdbench.problems import ConfigError, Problem, meant
from ptdbench.terminal import command

LAUNCHER = "hydra/launcher"
SWEEPER = "hydra/sweeper"


def option(override: str) -> str:
    """Return the option that an override sets: ``cluster.extra.nice`` for ``++cluster.extra.nice=100``.

    For ``cluster@other=x`` it is ``cluster``.
    """
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def values(overrides: Iterable[str]) -> dict[str, str]:
    """Return the value of each option that overrides set, as it is typed; the last one wins."""
    return {option(override): override.partition("=")[2] for override in overrides}


def as_written(overrides: ListConfig) -> list[str]:
    """Return overrides from a configuration of Hydra's as they were typed, with their ``${...}`` unresolved.

    These have another value in each run of a sweep, and may have none yet.
    """
    written: Any = OmegaConf.to_container(overrides)
    return list(map(str, written))


def search_in(folder: Path) -> None:
    """Add a folder to Hydra's search path, at the position of ``--config-dir``."""
    loader = GlobalHydra.instance().config_loader()
    search = loader.get_search_path()
    search.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    loader.repository.initialize_sources(search)  # type: ignore[attr-defined]


def quoted(text: str) -> str:
    """Quote a value for Hydra."""
    return QuotedString(text, Quote.single).with_quotes()


def has_list(overrides: Iterable[str]) -> bool:
    """Return whether an override has several values, each for a run of its own."""
    with suppress(HydraException, RecursionError):  # explained where they are composed
        parsed = OverridesParser.create().parse_overrides([*overrides])
        return any(override.is_sweep_override() for override in parsed)
    return False


def is_cluster(override: str) -> bool:
    """Return whether an override says where a run is executed, which does not affect its identity."""
    name = option(override)
    return name in ("cluster", LAUNCHER) or name.startswith("cluster.")


def parse() -> argparse.Namespace:
    """Parse the command line as Hydra does."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        message = meant(message, parser._option_string_actions, sys.argv[1:])
        problem = Problem("command line", " ".join(sys.argv[1:]), message, f"see {command()} --help")
        raise ConfigError([problem])

    parser.error = refuse  # type: ignore[method-assign]
    arguments = parser.parse_intermixed_args()  # flags between overrides, too
    if arguments.experimental_rerun:
        refuse("--experimental-rerun would have no effect: resume=RUN continues a run")
    if arguments.shell_completion and Path(sys.argv[0]).name == "ptdbench":
        refuse('commands are completed after: eval "$(register-python-argcomplete ptdbench)"')
    if arguments.resolve and not arguments.cfg:
        refuse("--resolve goes with --cfg")
    if arguments.run and arguments.multirun:
        refuse("--run and --multirun exclude each other")
    return arguments


#: Shorthands for options of the groups ``profile`` and ``repeat``.
_PROFILE = {"profile=true": "profile.trace=true", "profile=false": "profile.steps=0"}
_REPEAT = "repeat="
_RUNS = "repeat.runs"

#: Length of the runs of ``repeat=auto``. Variation between runs dominates, so many short runs decide sooner than few
#: long ones.
_SHORT = "train.steps=20"

#: Options that set the length of a run, or resume earlier runs.
_LENGTHS = ("train.steps", "experiment", "resume", "sweep.resume")


def expand_shorthands(overrides: Iterable[str]) -> list[str]:
    """Return overrides with shorthands expanded."""
    words = (_PROFILE.get(override.lower(), override) for override in overrides)
    return [f"{_RUNS}={word.removeprefix(_REPEAT)}" if word.startswith(_REPEAT) else word for word in words]


def short_runs(overrides: Iterable[str]) -> list[str]:
    """Return the override for the length of ``repeat=auto`` runs, unless the overrides set a length."""
    typed = values(overrides)
    return [_SHORT] if typed.get(_RUNS) == "auto" and typed.keys().isdisjoint(_LENGTHS) else []


def with_implied(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides with shorthands expanded and implied overrides added.

    ``submitit_slurm`` implies ``cluster=slurm``, except with another configuration file, which may choose a cluster
    itself. ``repeat=5`` is a sweep, and ``repeat=auto`` a sweep of short runs, except with other configuration files,
    whose runs have their own length.
    """
    overrides = expand_shorthands(arguments.overrides)
    typed, extra = values(overrides), []
    has_own_file = arguments.config_name or arguments.config_path
    if typed.get(LAUNCHER) == "submitit_slurm" and "cluster" not in typed and not has_own_file:
        extra.append("cluster=slurm")
    if typed.get(_RUNS, "1") != "1" and not arguments.multirun and "hydra.mode" not in typed:
        extra.append("hydra.mode=MULTIRUN")
    if not (arguments.config_dir or has_own_file):
        extra += short_runs(overrides)
    return [*overrides, *extra]
