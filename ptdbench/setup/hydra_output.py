"""The output directory of a command line, and Hydra's kinds of output: its files, ``--help``, ``--info``, ``--cfg``."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shlex
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import hydra
from omegaconf import Container, DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ptdbench.launch import slurm
from ptdbench.launch.world import World, restarts
from ptdbench.problems import ConfigError, Problem, first_line, require
from ptdbench.records import ledger, ownership, record, store
from ptdbench.setup.commandline import as_written, option, values
from ptdbench.setup.compose import Composed
from ptdbench.terminal import command, echo


def config_of_run(whole: bytes, sweep: Path | None, number: int | None, block: int | None = None) -> DictConfig:
    """Return a run's configuration with Hydra's own node, as Hydra would have it when it starts the run.

    ``whole`` is one of :attr:`ptdbench.setup.compose.Composed.whole`. A single run has no sweep directory, number or
    block of repeats.
    """
    job: DictConfig = pickle.loads(whole)
    with read_write(job), open_dict(job):
        if block is not None:  # as if it were one more override
            job.repeat.block = block
            job.hydra.overrides.task.append(f"repeat.block={block}")
            named = job.hydra.job.config.override_dirname
            typed = as_written(job.hydra.overrides.task)
            told = sorted(word for word in typed if option(word) not in named.exclude_keys)
            job.hydra.job.override_dirname = named.item_sep.join(told).replace("=", named.kv_sep)
        if sweep is not None:
            job.hydra.sweep.dir = str(sweep)
        if number is not None:
            job.hydra.job.id = job.hydra.job.num = number
    return job


def environment(job: DictConfig) -> dict[str, str]:
    """Return the variables that ``hydra.job.env_set`` gives a run, including those of ``hydra.job.env_copy``."""
    return {str(name): str(value) for name, value in job.hydra.job.env_set.items()}


def recorded_environment(directory: Path) -> dict[str, str]:
    """Return the :func:`environment` of an earlier run; empty if Hydra was told to write no files."""
    paths = [directory / ".hydra" / name for name in ("config.yaml", "hydra.yaml")]
    if not all(path.exists() for path in paths):
        return {}
    return environment(DictConfig(OmegaConf.merge(*map(OmegaConf.load, paths))))  # a value may refer to an option


def write_files(job: DictConfig, directory: Path) -> None:
    """Write Hydra's three files of a run, unless ``hydra.output_subdir=null``; raises OSError."""
    if job.hydra.output_subdir is None:
        return
    with read_write(job), open_dict(job):
        job.hydra.runtime.output_dir = str(directory.absolute())
    folder = directory / str(job.hydra.output_subdir)
    folder.mkdir(parents=True, exist_ok=True)
    ours = [str(name) for name in job if name != "hydra"]
    OmegaConf.save(OmegaConf.masked_copy(job, ours), folder / "config.yaml")
    OmegaConf.save(OmegaConf.masked_copy(job, "hydra"), folder / "hydra.yaml")
    OmegaConf.save(job.hydra.overrides.task, folder / "overrides.yaml")


def write_multirun(sweep: DictConfig, directory: Path) -> None:
    """Write the configuration that a sweep's runs share, with the overrides typed for all of them."""
    with read_write(sweep), open_dict(sweep):
        sweep.hydra.sweep.dir = str(directory)
    OmegaConf.save(sweep, directory / "multirun.yaml")


def shown_by_hydra(arguments: argparse.Namespace, conf: Path) -> int:
    """Let Hydra print the requested information; return exit status 0. Raises ConfigError with Hydra's reason."""
    if arguments.config_path and not Path(arguments.config_path).is_absolute():
        rule = "must be absolute where Hydra shows something of it"
        require(Problem("--config-path", arguments.config_path, rule, f"try {shlex.quote(str(conf))}"))
    places = [place for place, word in enumerate(sys.argv) if word in arguments.overrides]
    if places and places[-1] - places[0] >= len(places):  # a flag is between them
        raise ConfigError([_line("Hydra shows this, and takes no flags between overrides; give them first")])
    task = hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(lambda _: None)
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            task()
    except (ValueError, OmegaConfBaseException) as error:  # flags that exclude each other
        raise ConfigError([_line(first_line(error))]) from None
    finally:
        if shown.getvalue():
            text = shown.getvalue().removesuffix("\n")
            echo(_as_typed(text) if arguments.help else text)
    return 0


def _line(reason: str) -> Problem:
    return Problem("command line", " ".join(sys.argv[1:]), reason)


def _as_typed(text: str) -> str:
    """Replace ``python train.py`` in the help, which an installed package lacks, with the program that was started."""
    typed = command()
    if typed == "python train.py":
        return text
    text = text.replace("python train.py", typed).replace(" train.py", " -m ptdbench train")
    return text.replace("python -m ptdbench status", command("status"))


def show_configs(arguments: argparse.Namespace, composed: Composed) -> int:
    """Print the configuration of every run as Hydra does; return 0. Raises ConfigError for an unknown package."""
    several = composed.is_sweep and len(composed.overrides) > 1
    shown = composed.whole[:1] if composed.searches else composed.whole
    for number, (whole, overrides) in enumerate(zip(shown, composed.overrides, strict=False)):
        if several:
            echo(f"{'---' + chr(10) if number else ''}# run {number}: {' '.join(overrides)}")
        echo(_shown(pickle.loads(whole), arguments).removesuffix("\n"))
    return 0


def _shown(job: Any, arguments: argparse.Namespace) -> str:
    """Return the requested part of a configuration as YAML."""
    with read_write(job), open_dict(job):
        if arguments.cfg == "job":
            del job["hydra"]
        elif arguments.cfg == "hydra":
            job = OmegaConf.masked_copy(job, "hydra")
            with read_write(job.hydra), open_dict(job.hydra):  # templates of the help, which is printed elsewhere
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
                raise ConfigError([_line(first_line(error))]) from None
        return f"# @package {package}\n" * (package is not None) + OmegaConf.to_yaml(found)


#: The key under which ranks agree on the directory; a rank that is refused earlier posts its refusal there.
DIRECTORY = "directory"


def claim(composed: Composed, world: World | None, goes_on: Path | None) -> Path:
    """Create the output directory, or occupy the one that was typed or of the run or sweep that ``goes_on`` in place.

    Raises:
        ConfigError: It already holds results, or cannot be created.
    """
    asked = "hydra.sweep.dir" if composed.is_sweep else "hydra.run.dir"
    hydra = composed.first.hydra
    wish = Path(hydra.sweep.dir if composed.is_sweep else hydra.run.dir).expanduser()

    def make() -> str:
        if asked in values(composed.hydras):
            # torchrun also restarts a command that was refused because of other results there.
            again = goes_on or slurm.restarts(os.environ) or (restarts(os.environ) and _began(composed, wish))
            store.occupy(wish, asked, fill, bool(again))
            directory, is_latest = wish, wish.parent.resolve() == Path("outputs").resolve()
        else:
            directory, is_latest = store.claim_directory(wish.parent, wish.name, asked, fill), True
            store.lock(directory, asked)
        if composed.is_sweep and is_latest:
            store.point_latest(directory)
        return str(directory)

    def fill(folder: Path, directory: Path) -> None:
        """Write the file that identifies the directory, in case the program is killed."""
        if composed.is_sweep:
            ledger.begin(folder, composed.typed)
            return
        ownership.open_record(folder, record.begin(composed.configs[0].resolved, directory, {}, composed.typed))

    if world is None:
        return Path(make())
    from ptdbench.launch import rendezvous

    return Path(rendezvous.agree(DIRECTORY, world, make))


def _began(composed: Composed, directory: Path) -> bool:
    """Return whether a directory contains what this command line began and has not finished."""
    with suppress(FileNotFoundError, PermissionError, store.Damaged):
        if composed.is_sweep:
            return ledger.read(directory).overrides == composed.typed
        written = store.load_record(directory)
        asked = composed.configs[0].resolved
        return written["status"] != "ok" and record.same_work(record.configuration(written), asked)
    return False
