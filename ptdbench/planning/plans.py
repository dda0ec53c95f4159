"""The plans of a command line: one for each layout, known from an earlier plan or made anew, each a record."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as once
from hashlib import sha256
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import open_dict, read_write

from ptdbench import cache
from ptdbench.files import strict, write_json
from ptdbench.launch import settings
from ptdbench.problems import ConfigError, Problem, require
from ptdbench.records import record, store
from ptdbench.records.bearing import bears
from ptdbench.setup import commandline, compose, config, hydra_output
from ptdbench.setup.compose import Composed
from ptdbench.setup.config import Config, Slurm
from ptdbench.terminal import echo

if TYPE_CHECKING:
    from ptdbench.planning.micro_batch import CarryOut

#: The folder of plans in the cache.
_KIND = "plans"

#: Packages whose versions a plan depends on.
_PACKAGES = ("torch", "numpy", "torchvision", "torchao", "triton")


@dataclass(frozen=True)
class Planned:
    """What was planned."""

    directory: Path  #: With a directory for each record.
    records: Sequence[Mapping[str, Any]]  #: In the order of the command line.


def composed(overrides: Sequence[str], config_dir: Path | None) -> Composed:
    """The configurations of a command line.

    Raises:
        ConfigError: It cannot be used, or is not for planning.
    """
    extra = str(config_dir) if config_dir else None
    words = commandline.in_full(overrides)
    found = compose.compose_all(words, True, compose.Source(compose.conf_folder(), extra=extra))
    cluster = config.read(found.jobs[0]).cluster
    searches = found.first.hydra.runtime.choices.get(commandline.SWEEPER)
    require(
        Problem(commandline.SWEEPER, searches, "a plan is of layouts that are known", "give lists of values")
        if found.searches
        else None,
        Problem("cluster", cluster.name, "a plan is made on this machine", "omit it, and give cluster.nodes")
        if isinstance(cluster, Slurm)
        else None,
    )
    with read_write(found.first), open_dict(found.first):
        if not any(word.startswith("hydra.sweep.dir=") for word in overrides):
            found.first.hydra.sweep.dir = str(found.first.hydra.sweep.dir).removesuffix("_sweep") + "_plan"
    return found


def are_known(of: Composed, overrides: Sequence[str], again: bool) -> bool:
    """Whether all of it is known from earlier plans, so that nothing will be carried out."""
    keys = [_key(config.read(job), _is_free(overrides)) for job in of.jobs]
    return not again and all(key and cache.look_up(_KIND, key) for key in keys)


def _is_free(overrides: Sequence[str]) -> bool:
    """Whether nobody gave a global batch."""
    return {"train.global_batch", "experiment"}.isdisjoint(map(commandline.option, overrides))


def make(of: Composed, overrides: Sequence[str], again: bool, carry_out: CarryOut) -> Planned:
    """Plan each configuration, and write the records.

    Raises:
        ConfigError: The directory cannot be written to.
    """
    is_free = _is_free(overrides)
    directory = hydra_output.claim(of, overrides, None, None)
    records = []
    for number, (whole, job, words) in enumerate(zip(of.whole, of.jobs, of.overrides, strict=True)):
        read = config.read(job)
        title = f"[{number + 1}/{len(of.jobs)}] {read.label}"
        own = directory / str(hydra_output.config_of_run(whole, directory, number).hydra.sweep.subdir)
        draft = record.begin(read.resolved, own, {}, words)
        made = draft | {"kind": "planned", **_fields(read, is_free, title, again, carry_out), "directory": str(own)}
        own.mkdir(parents=True, exist_ok=True)
        write_json(own / store.RECORD, made)
        store.append_result(directory, made)
        records.append(strict(made))
    return Planned(directory, records)


def _fields(read: Config, is_free: bool, title: str, again: bool, carry_out: CarryOut) -> dict[str, Any]:
    """The fields of a record: of an earlier plan, of a new one, or why there is none."""
    key = _key(read, is_free)
    if key and not again and (known := cache.look_up(_KIND, key).get("fields")):
        return dict(known)
    from ptdbench.planning import foresee
    from ptdbench.records import failure

    started = time.monotonic()
    try:
        found = foresee.plan(foresee.Asked(read, is_free, title, carry_out))
    except ConfigError as refused:
        return {"status": "failed", "error": failure.describe(refused, rank=-1).as_error()}
    except foresee.Failed as failed:
        return {"status": failed.record["status"], "error": failed.record["error"]}
    if key and found["plan"].get("reason") is None:
        try:
            cache.keep(_KIND, key, {"fields": strict(found), "seconds": time.monotonic() - started})
        except OSError as error:
            echo(f"the plan is not kept for later: {error.strerror}", sys.stderr)
    return found


def _key(read: Config, is_free: bool) -> dict[str, Any] | None:
    """All that a plan on virtual GPUs depends on; ``None`` where that is not known."""
    if "virtual" not in read.resolved:
        return None  # the machine's own memory changes
    options = {name: value for name, value in read.resolved.items() if not bears(name, "nothing")}
    named = {target.partition(".")[0] for target in _targets(read.resolved)} - {"ptdbench"}
    if any(map(_may_change, named | set(filter(util.find_spec, _PACKAGES)))):
        return None
    versions = {name: _version(name) for name in {*_PACKAGES, *named}}
    of = {"config": strict(options, str), "free": is_free, "versions": versions, "package": _package()}
    return of | {"cores": len(os.sched_getaffinity(0)), "environment": settings.here()}


def _targets(options: Any) -> Iterator[str]:
    """The names of what a configuration instantiates."""
    if isinstance(options, Mapping):
        if "_target_" in options:
            yield str(options["_target_"])
        options = [*options.values()]
    if isinstance(options, list):
        for one in options:
            yield from _targets(one)


@once
def _may_change(package: str) -> bool:
    """Whether its files are somebody's own, imported from where they are edited: no version tells when they change."""
    found = util.find_spec(package)
    places = [*(found.submodule_search_locations or []), found.origin or ""] if found else []
    return not any({"site-packages", "dist-packages"}.intersection(Path(place).parts) for place in places)


@once
def _version(package: str) -> str | None:
    """The version of an installed package, by the name under which it is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(package) if util.find_spec(package) else None
        return metadata.version(names[0]) if names else None


@once
def _package() -> str:
    """A digest of the files of ptdbench itself."""
    folder, found = Path(compose.__file__).parents[1], sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c"), *folder.rglob("*.h")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
