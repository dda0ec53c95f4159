"""Command lines that resume an earlier one: ``resume=<run>`` and ``sweep.resume=<sweep>``."""

import itertools
import os
import shlex
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf

from ptdbench import search_path, terminal
from ptdbench.launch.world import ALL_LAUNCHERS, World
from ptdbench.problems import ConfigError, Problem, in_shell
from ptdbench.records import ledger, store
from ptdbench.records.effects import affects, options_affecting
from ptdbench.records.run_record import RunRecord
from ptdbench.setup.commandline import as_written, is_cluster, option, quoted, values
from ptdbench.setup.config import CALLS, Config, of_record, targets

RUN, SWEEP = "resume", "sweep.resume"

#: Allows a run resumed in place to have another shape; must be given each time.
RESHAPE = "reshape"

#: Prefixes of Hydra's own options that a resumed run keeps: its environment variables, and the search path.
_OF_RUNS = ("hydra.job.env_", "hydra.searchpath")

#: Modules of Python that a record may name: they build containers, or bind arguments.
_HARMLESS = {"collections", "functools"}

#: Parts of names that run or load code which comes with the arguments.
_RUNS_CODE = {
    "builtins", "cloudpickle", "cpp_extension", "ctypes", "dill", "eval", "exec", "hub", "hydra", "importlib", "joblib",
    "load", "load_pickle", "loads", "os", "pickle", "popen", "runpy", "subprocess", "sys", "system",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A command line, with the overrides inherited from an earlier one."""

    overrides: list[str]  #: All overrides.
    goes_on: Path | None  #: The directory of the run or sweep that is resumed in place; ``None`` for a new one.
    only: str | None = None  #: The directory of the only run of that sweep to resume; ``None`` for all runs.


def command(directory: Path, sources: Sequence[str] = (), started: str = "") -> str:
    """Return the command that resumes a run or a sweep; ``sources`` are its ``--config-dir`` and the like, if known.

    ``started`` is how it was started, by default as this process.
    """
    place = in_shell(SWEEP if store.is_sweep(directory) else RUN, terminal.from_here(directory))
    return " ".join([started or terminal.command(), *map(shlex.quote, sources), place])


def read(typed: Sequence[str], multirun: bool, world: World | None, config_name: str = "config") -> Line:
    """Expand a command line that may resume an earlier one.

    Args:
        typed: Its overrides.
        multirun: Whether it has the flag ``-m``.
        world: This process's place, if it is one of a launcher's ranks.
        config_name: The primary configuration.

    Raises:
        ConfigError: There is nothing to resume, or it cannot be resumed from here or with this configuration.
    """
    chosen = values(typed)
    others = [override for override in typed if option(override) != SWEEP]
    for key, hydra in ((SWEEP, "multirun.yaml"), (RUN, ".hydra/hydra.yaml")):
        if (directory := _path(chosen.get(key))) is None:
            continue
        was = _of_hydra(directory / hydra, "hydra.job.config_name")  # which provided all options that were not typed
        if was and was != config_name.removesuffix(".yaml"):
            rule = f"was composed from {was}.yaml, and this would be from {config_name}.yaml"
            raise ConfigError([Problem(key, directory, rule, f"add --config-name {was}")])
        try:
            if key == SWEEP:
                return _sweep(directory, others, SWEEP)
            return _run(directory, [override for override in others if option(override) != RUN], multirun, world)
        except OSError as error:  # perhaps another user's
            rule = f"{error.filename or directory} cannot be read ({error.strerror or error})"
            raise ConfigError([Problem(key, directory, rule, "give one that you may read")]) from None
    return Line(list(typed), None)


def _run(directory: Path, others: list[str], multirun: bool, world: World | None) -> Line:
    """Resume in the run's directory if nothing changes; elsewhere or with other options it becomes a new run."""
    run = _record(RUN, directory)
    place = [override for override in others if _is_place(override)]
    moves = world is None and any(_moves(override, run) for override in place)
    moves |= any(option(override) == "hydra.run.dir" and not _names(override, directory) for override in place)
    earlier = _earlier(directory, run)
    others = _new(others, earlier)
    kept = [*(override for override in earlier if not _is_place(override)), *_shape(earlier, run, others, world)]
    hydras = [word for word in _hydras(directory / ".hydra/hydra.yaml", others) if option(word).startswith(_OF_RUNS)]
    if len(others) > len(place) or multirun or moves:
        if (values(others).get(RESHAPE) or "").lower() == "true":
            rule = "is for a run that continues in its directory, and other options start a new run, of any layout"
            raise ConfigError([Problem(RESHAPE, True, rule, f"omit it, or all but {RUN} and the ranks of cluster")])
        if moves and len(others) == len(place):
            _refuse_complete(directory, run)
        dropped = (RUN, "repeat.block", *_replaced(directory, others, earlier))
        kept = [word for word in _without(kept, others) if not option(word).startswith(dropped)]
        return Line([*kept, *hydras, *others, f"{RUN}={quoted(str(directory.resolve()))}"], None)
    _refuse_complete(directory, run)
    if world is None and (sweep := _submitted_by(directory)):
        return _sweep(sweep, others, RUN, only=str(directory.resolve().relative_to(sweep.resolve())))
    if world is None:
        _refuse_elsewhere(directory, run)
    return Line([*_without(kept, place), *hydras, *place, f"hydra.run.dir={quoted(str(directory))}"], directory)


def _sweep(directory: Path, others: list[str], key: str, only: str | None = None) -> Line:
    """Resume a sweep in its directory: runs that are ok will be skipped."""
    if not (task := _ledger(directory).overrides):
        rule, remedy = f"there is no sweep (no {ledger.LEDGER})", "give the directory of a sweep below outputs"
        if (directory / store.RECORD).exists():
            rule, remedy = "is a run", f"try {command(directory)}"
        raise ConfigError([Problem(SWEEP, directory, rule, remedy)])
    swept = {option(override) for override in task if "," in override.partition("=")[2]}
    others = _new(others, task)
    wrong = [override for override in others if not _may_change(option(override), swept)]
    wrong += [word for word in others if option(word) == "hydra.sweep.dir" and not _names(word, directory)]
    if wrong:
        rule = f"continues the sweep as it was, and {' '.join(wrong)} would change it"
        raise ConfigError([Problem(key, directory, rule, "omit it, or start another sweep")])
    kept = [override for override in _without(task, others) if option(override) != RESHAPE]
    place = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={quoted(str(directory))}"]
    hydras = _hydras(directory / "multirun.yaml", [*task, *others, *place])
    if sweep := _of_hydra(directory / "multirun.yaml", "hydra.sweep"):  # runs keep their directories' names
        hydras += _without([f"hydra.sweep.subdir={quoted(sweep._get_node('subdir')._value())}"], [*hydras, *others])
    return Line([*kept, *hydras, *others, *place], directory, only)


def _hydras(path: Path, others: Iterable[str]) -> list[str]:
    """Return the overrides of Hydra's own options in one of Hydra's files, except options that the others set."""
    overrides = _of_hydra(path, "hydra.overrides.hydra")
    words = as_written(overrides) if isinstance(overrides, ListConfig) else []
    # Searches record the internal launcher, which cannot be typed.
    return [word for word in _without(words, others) if word != "hydra/launcher=ptdbench"]


def _of_hydra(path: Path, option: str) -> Any:
    """Return an option in one of Hydra's files; ``None`` if there is no such file, as Hydra may write none."""
    with suppress(Exception):  # damage is reported where the content is needed
        return OmegaConf.select(OmegaConf.load(path), option)
    return None


def _may_change(name: str, swept: set[str]) -> bool:
    """Return whether a resumed sweep may change this option: more blocks, for one, keep the order of existing ones."""
    if name.startswith("hydra.") or name == RESHAPE or affects(name, "blocks"):
        return True
    # A job that has reached its time limit must be able to get more.
    return name.startswith("cluster.") and affects(name, "queue") and name not in swept


def _ledger(directory: Path) -> ledger.Ledger:
    """Read the ledger of a sweep, without which it is unknown which of its jobs are in the queue."""
    try:
        return ledger.read(directory)
    except store.Damaged as damage:
        remedy = f"check with squeue that none of its jobs is left, remove {ledger.LEDGER}, and try again"
        raise ConfigError([Problem(SWEEP, directory, str(damage), remedy)]) from None


def _earlier(directory: Path, run: RunRecord) -> list[str]:
    """Return the overrides of a run, as they were typed, without those that set the repeats of its sweep."""
    if (typed := run.overrides) is None:
        raise ConfigError([Problem(RUN, directory, "its record has no overrides", "type them, in a new directory")])
    return [override for override in typed if not affects(option(override), "blocks")]


def _record(key: str, directory: Path) -> RunRecord:
    """Return the record of a run that is to continue; raises ConfigError if there is none, or it is damaged."""
    try:
        return store.read_record(directory)
    except (FileNotFoundError, NotADirectoryError):
        rule, remedy = f"there is no run (no {store.RECORD})", "give the directory of a run below outputs"
        if store.is_sweep(directory):
            rule, remedy = "is a sweep", f"try {command(directory)}, or give the directory of one of its runs"
    except store.Damaged as damage:
        rule, remedy = str(damage), "type the overrides again, in a new directory"
    raise ConfigError([Problem(key, directory, rule, remedy)])


def _is_place(override: str) -> bool:
    return is_cluster(override) or option(override) == RESHAPE or option(override).startswith(("hydra.", "hydra/"))


def _replaced(directory: Path, others: Iterable[str], earlier: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of a run's options that the others' choices replace: ``parallel.`` if pdp becomes ddp."""
    was = {**(_of_hydra(directory / ".hydra/hydra.yaml", "hydra.runtime.choices") or {}), **values(earlier)}
    chosen = {group: choice.split(",") for group, choice in values(others).items() if group in CALLS}
    # A list that has the run's own choice replaces nothing: its options are then for all of the list.
    return tuple(f"{group}." for group, choices in chosen.items() if was.get(group) not in (None, *choices))


def _without(overrides: Iterable[str], others: Iterable[str]) -> list[str]:
    chosen = values(others)
    return [override for override in overrides if option(override) not in chosen]


def _shape(earlier: Iterable[str], run: RunRecord, others: Iterable[str], world: World | None) -> list[str]:
    """Return overrides for the shape of a run, wherever it was set; empty on another cluster, whose shapes differ."""
    if (was := run.option("cluster", dict)) is None:
        return [override for override in earlier if affects(option(override), "shape")]
    typed = values(others).get("cluster")
    if typed not in (None, was.get("name")):
        return []
    of_jobs = () if typed else ("cluster.gpus_per_node",)  # without a cluster, this machine's GPUs are used
    kept = {name: was.get(name.removeprefix("cluster.")) for name in options_affecting("shape") if name not in of_jobs}
    if world:  # the run will use its nodes and ranks
        of_world = {"cluster.nodes": world.nodes, "cluster.ranks_per_node": world.local_size}
        kept = {name: value for name, value in kept.items() if of_world.get(name, value) == value}
    return [f"{name}={value}" for name, value in kept.items() if value not in (None, "auto")]


def _moves(override: str, run: RunRecord) -> bool:
    name, value = option(override), override.partition("=")[2]
    was = run.option("cluster.name", str)
    return (name == "cluster" and value != was) or override == "hydra/launcher=submitit_slurm"


def _names(override: str, directory: Path) -> bool:
    path = _path(override.partition("=")[2])
    return path is not None and path.resolve() == directory.resolve()


def _submitted_by(directory: Path) -> Path | None:
    """Return the sweep that submitted the run in a directory as a SLURM job, if any."""
    place = directory.resolve()
    sweep = ledger.sweep_of(place)
    is_known = sweep and str(place.relative_to(sweep)) in {job.directory for job in _ledger(sweep).jobs}
    return sweep if is_known else None


def startable(directory: Path, world: World | None) -> Config:
    """Return the configuration of a directory's run; raises ConfigError if it is complete or must run elsewhere."""
    run = _record("run", directory)
    _refuse_complete(directory, run, "run")
    if world is None:
        if run.option("cluster.submit", str):
            rule = f"cluster={run.option('cluster.name', str)} executes it as a job"
            raise ConfigError([Problem("run", directory, rule, f"try {terminal.command()} {in_shell(RUN, directory)}")])
        _refuse_elsewhere(directory, run)
    config = of_record(run.written)
    if search_path.FOLDER not in os.environ:  # which this user's own job has
        _check_targets("run", directory, config)
    return config


def check_targets(typed: Sequence[str], configs: Iterable[Config]) -> None:
    """Refuse what the record of a resumed run names, and the command line does not, if it may run any code.

    Raises:
        ConfigError: There is such a name.
    """
    chosen = values(typed)
    for key, config in itertools.product((RUN, SWEEP), configs):
        if directory := _path(chosen.get(key)):
            _check_targets(key, directory, config, typed)


def _check_targets(key: str, directory: Path, config: Config, typed: Sequence[str] = ()) -> None:
    for name, target in targets(config.resolved):
        parts = target.split(".")
        is_any = parts[0] in sys.stdlib_module_names - _HARMLESS or _RUNS_CODE.intersection(parts) or "$" in target
        if is_any and not any(target in word for word in typed):
            rule = f"its record names {target}, which may run any code"
            again = f"{terminal.command()} {SWEEP if key == SWEEP else RUN}={directory} {name}={target}"
            remedy = f"if you trust whoever wrote it, try {again}"
            raise ConfigError([Problem(key, directory, rule, remedy)])


def _new(others: Iterable[str], earlier: Sequence[str]) -> list[str]:
    """Return the overrides that change a run: a target typed again only says that it is trusted."""
    return [word for word in others if not (option(word).endswith("_target_") and word in earlier)]


def _refuse_elsewhere(directory: Path, run: RunRecord) -> None:
    """Refuse to resume a launcher's run as processes of this machine, which may be a login node."""
    launcher, nodes = run.launcher, run.nodes
    hosts = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    starter = ALL_LAUNCHERS.get(launcher or "local")
    if starter and (starter.has_parent or (not starter.has_step and set(nodes) <= hosts)):
        return
    where = f" on {', '.join(nodes[:4])}{' ...' * (len(nodes) > 4)}" if nodes else ""
    rule = f"its ranks were started by {launcher}{where}, and this process is not a rank of a launcher"
    again = f"{terminal.under(str(launcher))} {in_shell(RUN, directory)}"
    remedy = f"start it as before, {again}, or add options to start a new run from it"
    raise ConfigError([Problem(RUN, directory, rule, remedy)])


def _refuse_complete(directory: Path, run: RunRecord, key: str = RUN) -> None:
    done, wanted = run.steps or 0, run.option("train.steps", int)
    if run.status == "ok" and done == wanted:
        rule, again = f"is complete, with {done} of {wanted} steps", f"{terminal.command()} {in_shell(RUN, directory)} "
        remedy = f"try {again * (key != RUN)}train.steps={2 * done}, to train on from there"
        raise ConfigError([Problem(key, directory, rule, remedy)])


def _path(value: str | None) -> Path | None:
    """Return a path as typed, without quotes; a link, such as ``outputs/latest``, is resolved."""
    if not value or value == "null":
        return None
    path = Path(value.strip("'\"")).expanduser()
    real = path.resolve()
    if real == path.absolute():
        return path
    return real if path.is_absolute() else Path(os.path.relpath(real))
