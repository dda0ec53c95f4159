"""The output directory of a command line, and Hydra's kinds of output: its files, ``--help``, ``--info``, ``--cfg``."""

import argparse
import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ptdbench.launch import slurm
from ptdbench.launch.world import restarts
from ptdbench.problems import ConfigError, Problem, first_line
from ptdbench.records import ledger, ownership, record, store
from ptdbench.setup.commandline import values
from ptdbench.setup.compose import Composed, Source
from ptdbench.setup.runs import Run
from ptdbench.terminal import command, echo


def write_files(run: Run, directory: Path, sweep: Path | None) -> None:
    """Write Hydra's three files of a run, unless ``hydra.output_subdir=null``; raises OSError."""
    hydra = dict(run.composed["hydra"])
    if hydra["output_subdir"] is None:
        return
    hydra["runtime"] = hydra["runtime"] | {"output_dir": str(directory.absolute())}
    if sweep:
        hydra["sweep"] = hydra["sweep"] | {"dir": str(sweep)}
    ours = {name: value for name, value in run.composed.items() if name != "hydra"}
    contents = {"config": ours, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}
    folder = directory / str(hydra["output_subdir"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        OmegaConf.save(OmegaConf.create(content), folder / f"{name}.yaml")


def write_multirun(sweep: DictConfig, directory: Path) -> None:
    """Write the configuration that a sweep's runs share, with the overrides typed for all of them."""
    with read_write(sweep), open_dict(sweep):
        sweep.hydra.sweep.dir = str(directory)
    OmegaConf.save(sweep, directory / "multirun.yaml")


def shown_by_hydra(arguments: argparse.Namespace, source: Source) -> int:
    """Let Hydra print the requested information; return exit status 0. Raises ConfigError with Hydra's reason."""
    with source.open():
        hydra: Any = GlobalHydra.instance().hydra
        if arguments.help:
            _show(hydra.app_help, source.name, get_args_parser(), arguments, adapt=_as_typed)
        elif arguments.hydra_help:
            _show(hydra.hydra_help, source.name, get_args_parser(), arguments)
        elif arguments.shell_completion:
            _show(hydra.shell_completion, source.name, arguments.overrides)
        else:
            _show(hydra.show_info, arguments.info, source.name, arguments.overrides)
    return 0


def _show(task: Callable[..., object], *words: object, adapt: Callable[[str], str] = str) -> None:
    """Print what Hydra prints in a task; raises ConfigError with Hydra's reason."""
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            task(*words)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError([Problem("command line", " ".join(sys.argv[1:]), first_line(error))]) from None
    finally:
        if shown.getvalue():
            echo(adapt(shown.getvalue().removesuffix("\n")))


def _as_typed(text: str) -> str:
    """Replace ``python train.py`` in the help, which an installed package lacks, with the program that was started."""
    typed = command()
    if typed == "python train.py":
        return text
    text = text.replace("python train.py", typed).replace(" train.py", " -m ptdbench train")
    return text.replace("python -m ptdbench status", command("status"))


def show_configs(arguments: argparse.Namespace, composed: Composed) -> int:
    """Let Hydra print the configuration of every run; return 0. Raises ConfigError with Hydra's reason."""
    several, source = composed.is_sweep and len(composed.overrides) > 1, composed.source
    with source.open():
        hydra: Any = GlobalHydra.instance().hydra
        for number, overrides in enumerate(composed.overrides[:1] if composed.searches else composed.overrides):
            if several:
                echo(f"{'---' + chr(10) if number else ''}# run {number}: {' '.join(overrides)}")
            words = [*composed.hydras, *overrides]
            _show(hydra.show_cfg, source.name, words, arguments.cfg, arguments.package, arguments.resolve)
    return 0


def claim(composed: Composed, goes_on: Path | None) -> Path:
    """Create the output directory, or occupy the one that was typed or of the run or sweep that ``goes_on`` in place.

    Raises:
        ConfigError: It already holds results, or cannot be created.
    """
    typed, wish = "hydra.sweep.dir" if composed.is_sweep else "hydra.run.dir", composed.directory

    def fill(folder: Path, directory: Path) -> None:
        """Write the file that identifies the directory, in case the program is killed."""
        if composed.is_sweep:
            ledger.begin(folder, composed.typed)
            return
        ownership.open_record(folder, record.begin(composed.configs[0].resolved, directory, {}, composed.typed))

    if typed in values(composed.hydras):
        # torchrun also restarts a command that was refused because of other results there.
        again = goes_on or slurm.restarts(os.environ) or (restarts(os.environ) and _began(composed, wish))
        store.occupy(wish, typed, fill, bool(again))
        directory, is_latest = wish, wish.parent.resolve() == Path("outputs").resolve()
    else:
        directory, is_latest = store.claim_directory(wish.parent, wish.name, typed, fill), True
        store.lock(directory, typed)
    if composed.is_sweep and is_latest:
        store.point_latest(directory)
    return directory


def _began(composed: Composed, directory: Path) -> bool:
    """Return whether a directory contains what this command line began and has not finished."""
    with suppress(FileNotFoundError, PermissionError, store.Damaged):
        if composed.is_sweep:
            return ledger.read(directory).overrides == composed.typed
        written = store.load_record(directory)
        config = composed.configs[0].resolved
        return written["status"] != "ok" and record.same_work(record.configuration(written), config)
    return False
