"""The files in which Hydra says what it composed: ``.hydra/*.yaml`` of a run, ``multirun.yaml`` of a sweep."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from ptdbench.setup.commandline import option


def of_run(whole: bytes, sweep: Path | None, number: int | None, block: int | None = None) -> DictConfig:
    """A run's configuration with Hydra's own node, as Hydra has it when it starts the run.

    Args:
        whole: One of :attr:`ptdbench.setup.compose.Composed.whole`.
        sweep: The directory of its sweep; ``None`` for a single run.
        number: Its number in the sweep; ``None`` for a single run.
        block: Its block of repeats; ``None`` without.
    """
    job: DictConfig = pickle.loads(whole)
    with read_write(job), open_dict(job):
        if block is not None:
            _put_in_block(job, block)
        if sweep is not None:
            job.hydra.sweep.dir = str(sweep)
        if number is not None:
            job.hydra.job.id = job.hydra.job.num = number
    return job


def _put_in_block(job: DictConfig, block: int) -> None:
    """What it would be with one more override."""
    job.repeat.block = block
    job.hydra.overrides.task.append(f"repeat.block={block}")
    named = job.hydra.job.config.override_dirname
    told = sorted(override for override in job.hydra.overrides.task if option(override) not in named.exclude_keys)
    job.hydra.job.override_dirname = named.item_sep.join(told).replace("=", named.kv_sep)


def environment(job: DictConfig) -> dict[str, str]:
    """The variables that ``hydra.job.env_set`` gives a run, ``hydra.job.env_copy`` among them."""
    return {str(name): str(value) for name, value in job.hydra.job.env_set.items()}


def recorded_environment(directory: Path) -> dict[str, str]:
    """The same of a run that was begun before; nothing where Hydra was told to write no files."""
    path = directory / ".hydra" / "hydra.yaml"
    return environment(DictConfig(OmegaConf.load(path))) if path.exists() else {}


def write(job: DictConfig, directory: Path) -> None:
    """Write ``config.yaml``, ``hydra.yaml`` and ``overrides.yaml`` of a run, unless ``hydra.output_subdir=null``.

    Raises:
        OSError: They cannot be written.
    """
    if job.hydra.output_subdir is None:
        return
    with read_write(job), open_dict(job):
        job.hydra.runtime.output_dir = str(directory.absolute())
    folder = directory / str(job.hydra.output_subdir)
    folder.mkdir(parents=True, exist_ok=True)
    ours = [str(name) for name in job if name != "hydra"]
    texts: Mapping[str, str] = {
        "config.yaml": OmegaConf.to_yaml(OmegaConf.masked_copy(job, ours)),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.masked_copy(job, "hydra")),
        "overrides.yaml": OmegaConf.to_yaml(job.hydra.overrides.task),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def write_multirun(sweep: DictConfig, directory: Path) -> None:
    """Write what a sweep's runs have in common, and what was typed for all of them."""
    with read_write(sweep), open_dict(sweep):
        sweep.hydra.sweep.dir = str(directory)
    OmegaConf.save(sweep, directory / "multirun.yaml")
