"""The plans of a command line: one record for each layout, cached from an earlier plan or made now."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache as once
from hashlib import sha256
from importlib import util
from itertools import chain, islice
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import open_dict, read_write

from ptdbench import search_path
from ptdbench.files import from_cache, strict, to_cache, write_json
from ptdbench.launch import local, settings
from ptdbench.launch.lifetime import die_with_parent
from ptdbench.measure.memory import host_memory
from ptdbench.planning import anchors, measured
from ptdbench.planning.anchors import Anchor
from ptdbench.problems import ConfigError, ErrorCollector, Problem, require
from ptdbench.records import record, store
from ptdbench.records.effects import affects
from ptdbench.records.run_record import typed
from ptdbench.records.schema import Draft, Written
from ptdbench.setup import choices, commandline, compose, hydra_interface, runs
from ptdbench.setup.compose import Composed, Source
from ptdbench.setup.config import Config, Slurm
from ptdbench.terminal import echo, plural
from ptdbench.units import span_text, three_digits

if TYPE_CHECKING:
    from ptdbench.planning.tries import Execute

#: The folder of plans in the cache.
_KIND = "plans"

#: What the tries of a plan depend on: parts of its key, and all of the package but what looks at them afterwards.
_OF_TRIES = ("files", "python", "cores", "environment")
_AFTER_TRIES = ("commands", "comparison", "planning", "prediction", "report")

#: Packages whose installation a plan depends on.
_PACKAGES = ("torch", "numpy", "torchvision", "torchao", "triton")

#: Maximum number of files below the folders that options name, or in a package; plans that read more are not cached.
_MOST_FILES = 10_000

#: Host memory in bytes that a running rank of a large model takes, including its share of the fork server.
_BYTES = 3_000_000_000

#: Prepares the start of ranks with these configurations.
Prepare = Callable[[Sequence[Config]], None]


@dataclass(frozen=True)
class Planned:
    """The plans of a command line."""

    directory: Path  #: The folder with a directory for each record.
    records: Sequence[Written]  #: The records, in the order of the command line.
    cached: int  #: How many of them were planned earlier.
    stopped: local.Stopped | None  #: The signal that stopped planning before the remaining ones, if any.


def composed(overrides: Sequence[str], source: Source | None = None) -> Composed:
    """Return the configurations of a command line.

    Raises:
        ConfigError: The command line is invalid, or cannot be planned.
    """
    result = compose.compose_all(overrides, True, source)
    cluster = result.configs[0].cluster
    if isinstance(cluster, Slurm):
        return composed(_without_jobs(overrides, cluster), source)
    problems = ErrorCollector()
    for config in result.configs:
        problems.catch(choices.virtual, config)
    problems.close()
    require(
        *hydra_interface.unresolved(result),
        Problem(commandline.SWEEPER, result.sweeper, "a plan needs fixed layouts, not a search", "give lists of values")
        if result.searches
        else None,
    )
    if not any(word.startswith("hydra.sweep.dir=") for word in overrides):
        with read_write(result.hydra), open_dict(result.hydra):
            result.hydra.sweep.dir = str(result.hydra.sweep.dir).removesuffix("_sweep") + "_plan"
    return result


def _without_jobs(overrides: Sequence[str], cluster: Slurm) -> list[str]:
    """Return overrides for the same ranks without SLURM: a plan is made on this machine."""
    shape = {"cluster.nodes": cluster.nodes, "cluster.ranks_per_node": cluster.ranks_per_node}
    if shape["cluster.ranks_per_node"] == "auto" and cluster.gpus_per_node:
        shape["cluster.ranks_per_node"] = cluster.gpus_per_node
    kept = [word for word in overrides if not commandline.is_cluster(word) or commandline.option(word) in shape]
    typed = set(map(commandline.option, kept))
    return ["cluster=local", *kept, *(f"{name}={value}" for name, value in shape.items() if name not in typed)]


def make(
    of: Composed,
    overrides: Sequence[str],
    again: bool,
    prepare: Prepare,
    execute: Execute,
    anchored: Sequence[Anchor] = (),
) -> Planned:
    """Plan each configuration, and write the records.

    Args:
        of: The configurations.
        overrides: The overrides that they were composed from.
        again: Ignore cached plans.
        prepare: :func:`ptdbench.entry.prepare_ranks` or a substitute; called in each process that plans.
        execute: :func:`ptdbench.run.door.run` or a substitute.
        anchored: Measured runs that set the level of predicted times; each is planned first.

    Raises:
        ConfigError: The directory cannot be written to, or the step of an anchor cannot be predicted.
    """
    is_free = {"train.global_batch", "experiment"}.isdisjoint(map(commandline.option, overrides))
    jobs = [*((anchor.config, False) for anchor in anchored), *((job, is_free) for job in of.configs)]
    keys = [_key(*job) for job in jobs]  # first: importing torch changes the environment, a part of the keys
    earlier = [from_cache(_KIND, key).get("fields") if key and not again else None for key in keys]
    uncached = [
        _Uncached(job, is_free, f"[{number}/{len(jobs)}] {job.label}", key, again)
        for number, ((job, is_free), cached, key) in enumerate(zip(jobs, earlier, keys, strict=True), 1)
        if cached is None
    ]
    planned_before, earlier = earlier[: len(anchored)], earlier[len(anchored) :]
    directory = hydra_interface.claim(of, None)
    records, stopped, fastest = [], None, (0.0, "")
    try:
        with closing(_paced(uncached, prepare, execute)) as made:
            levels = [*_levels(anchored, planned_before, made)]
            for run, cached in zip(runs.of(of, repeats=False), earlier, strict=True):
                place = directory / run.subdirectory
                draft = record.begin(run.config.resolved, place, {}, run.overrides)
                fields = anchors.applied(cached or next(made), run.config, levels)
                planned = draft | {"kind": "planned", **fields, "directory": str(place)}
                place.mkdir(parents=True, exist_ok=True)
                write_json(place / store.RECORD, planned)
                records.append(strict(planned))
                measured.keep_prediction(typed(records[-1]))
                name = run.subdirectory.partition("_")[2] or run.config.label  # without its number
                fastest = max(fastest, _rate(records[-1], name))
                if uncached and fastest[1] and len(records) < len(of.configs):
                    echo(fastest[1], sys.stderr)
    except local.Stopped as signalled:
        stopped = signalled
    return Planned(directory, records, sum(map(bool, earlier[: len(records)])), stopped)


def _levels(
    anchored: Sequence[Anchor], earlier: Sequence[Draft | None], made: Iterator[Draft]
) -> Iterator[tuple[Anchor, float]]:
    """Yield the level that each anchor sets; one that was only in the cache is left out if it sets none."""
    for anchor, cached in zip(anchored, earlier, strict=True):
        fields = cached or next(made)
        try:
            yield anchor, anchor.level(fields)
        except ConfigError as refused:
            if not anchor.is_cached:
                raise
            echo(f"not used: {refused}", sys.stderr)


def _rate(planned: Written, name: str) -> tuple[float, str]:
    """Return the predicted rate of a plan, and what to say if it is the highest so far; 0 without a prediction."""
    step = planned.get("predicted") or {}
    of = next((of for of in ("tokens", "samples") if step.get(f"{of}_per_second")), None)
    rate = step[f"{of}_per_second"] if of else 0.0
    return rate, f"fastest so far: {name}, {three_digits(rate)} {of}/s predicted" if of else ""


@dataclass(frozen=True)
class _Uncached:
    """A plan that is not cached."""

    config: Config
    is_free: bool  #: Whether no global batch was given.
    title: str  #: Its title in the display.
    key: dict[str, Any] | None  #: Its cache key; ``None`` if it cannot be cached.
    again: bool = False  #: Ignore its cached recordings, too.


def _paced(uncached: Sequence[_Uncached], prepare: Prepare, execute: Execute) -> Generator[Draft]:
    """Make plans and yield the fields of each; say what takes long, and how long the others will take at this pace."""
    if compiled := sum(bool(plan.config.general.compile) for plan in uncached):
        what = f"{plural(compiled, 'row')} to compile, once for each micro-batch that is tried"
        echo(f"{what}: this takes most of the time", sys.stderr)
    began = time.monotonic()
    with closing(_made(uncached, prepare, execute)) as made:
        for number, fields in enumerate(made, 1):
            if left := len(uncached) - number:
                spent = time.monotonic() - began
                pace = f"about {span_text(spent / number * left)} to go at this pace"
                echo(f"planned {number} of {len(uncached)} rows in {span_text(spent)}, {pace}", sys.stderr)
            yield fields


def _made(uncached: Sequence[_Uncached], prepare: Prepare, execute: Execute) -> Generator[Draft]:
    """Make plans, several at once in separate processes, and yield the fields of each.

    As many ranks run at once, with one thread each, as cores and memory allow.
    """
    at_once = max(1, min(len(settings.own_cores()), host_memory().available // _BYTES))
    processes = min(at_once, len(uncached))
    rest = list(uncached)
    if processes <= 1:
        prepare([plan.config for plan in uncached])
        for plan in uncached:
            yield _fields(plan, execute, at_once)
        return
    while rest:
        try:
            with closing(_in_pool([*rest], processes, prepare, execute, at_once // processes)) as made:
                for fields in made:
                    del rest[0]
                    yield fields
        except BrokenProcessPool as ended:
            if processes == 1:  # the first remaining plan killed it
                yield _failed(ended)
                del rest[0]
            processes = 1  # of several plans, it is unknown which killed the process, by lack of memory for example


def _in_pool(
    uncached: Sequence[_Uncached], processes: int, prepare: Prepare, execute: Execute, at_once: int
) -> Generator[Draft]:
    """Make plans in a pool of worker processes; raise BrokenProcessPool if one of them dies."""
    context, others = get_context("spawn"), active_children()
    pool = ProcessPoolExecutor(processes, context, _begin, (Path.cwd(), prepare, [plan.config for plan in uncached]))
    with search_path.safe():
        futures = [pool.submit(_planned, plan, execute, at_once) for plan in uncached]
    try:
        for future in futures:
            yield future.result()
    finally:
        if not all(future.done() for future in futures):  # a worker would otherwise finish its current plan
            for process in set(active_children()).difference(others):
                process.terminate()
        pool.shutdown(cancel_futures=True)


def _begin(here: Path, prepare: Prepare, configs: Sequence[Config]) -> None:
    """Initialize a worker process: it ends with its parent, which also handles Ctrl-C."""
    os.chdir(here)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TERM"] = "dumb"  # so that workers do not redraw each other's line
    prepare(configs)


def _planned(plan: _Uncached, execute: Execute, cores: int) -> Draft:
    """Make a plan in a worker process, which exits on a signal, as it would otherwise get the next plan."""
    try:
        with local.stopping():
            return _fields(plan, execute, cores)
    except local.Stopped:
        os._exit(1)


def _fields(plan: _Uncached, execute: Execute, cores: int) -> Draft:
    """Make and cache a plan; return its fields, or the failure."""
    from ptdbench.planning import memory_plan

    started = time.monotonic()
    try:
        of_tries = plan.key and _of_tries(plan.key, plan.config)
        request = memory_plan.PlanRequest(plan.config, plan.is_free, plan.title, execute, cores, of_tries, plan.again)
        fields = memory_plan.plan(request)
    except ConfigError as refused:
        return _failed(refused)
    except memory_plan.Failed as failed:
        status = failed.record["status"]  # "oom" means host memory, which says nothing about the GPU
        return {"status": "failed" if status == "oom" else status, "error": failed.record["error"]}
    if plan.key and fields["plan"].get("reason") is None:
        try:
            to_cache(_KIND, plan.key, {"fields": strict(fields), "seconds": time.monotonic() - started})
        except OSError as error:
            echo(f"cannot cache the plan: {error.strerror}", sys.stderr)
    return fields


def _of_tries(key: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return what the tries of a plan depend on, of its key: not the costs that were measured on its GPU."""
    machine = choices.virtual(config)
    costs = str(Path(machine.gpu.costs).expanduser()) if machine else ""
    files = {path: stamp for path, stamp in key["files"].items() if path != costs}
    return {**{name: key[name] for name in _OF_TRIES}, "files": files, "package": _package(_AFTER_TRIES)}


def _failed(error: Exception) -> Draft:
    from ptdbench.records import failure

    return {"status": "failed", "error": failure.describe(error, rank=-1).as_error()}


def _key(config: Config, is_free: bool) -> dict[str, Any] | None:
    """Return the cache key: all that a plan on virtual GPUs depends on; ``None`` if that is unknown."""
    if "virtual" not in config.resolved:
        return None  # this machine's available memory changes
    options = {name: value for name, value in config.resolved.items() if not affects(name, "nothing")}
    calls = [part for part in _parts(options) if isinstance(part, Mapping) and "_target_" in part]
    named = {str(call["_target_"]).partition(".")[0] for call in calls} - {"ptdbench"}
    present = set(filter(util.find_spec, _PACKAGES))
    if any(map(_may_change, named | present)) or any(map(_loads_unseen, calls)):
        return None
    first = (_places(name)[-1] for name in present)  # each installation writes it anew
    stamps = {str(path): _stamp(path) for path in chain(first, _paths(options), *map(_places, named - present))}
    if None in stamps.values():
        return None
    of = {
        "config": strict(options, str),
        "free": is_free,
        "files": stamps,
        "package": _package(),
        "python": sys.version,
    }
    return of | {"cores": len(settings.own_cores()), "environment": settings.recorded(os.environ)}


def _parts(options: Any) -> Iterator[Any]:
    """Yield a configuration, its groups, lists and values."""
    yield options
    for part in options.values() if isinstance(options, Mapping) else options if isinstance(options, list) else ():
        yield from _parts(part)


def _paths(options: Any) -> list[Path]:
    """Return the files and folders that a configuration names."""
    paths = []
    for part in _parts(options):
        with suppress(OSError, RuntimeError, ValueError):  # too long for a name, of nobody's home, with a null byte
            if isinstance(part, str) and part and (path := Path(part).expanduser()).exists():
                paths.append(path)
    return paths


def _loads_unseen(call: Mapping[str, Any]) -> bool:
    """Return whether a target reads what neither the options nor the packages identify, and may have changed."""
    target = str(call["_target_"])
    return target.startswith("torch.hub.") or (target.endswith(".from_pretrained") and not _paths(call))


@once
def _stamp(path: Path) -> str | None:
    """Return a digest of the size and last change of a file, or of a folder's files; ``None`` if there are too many."""
    digest = sha256()
    below = [path] if path.is_file() else [*islice(path.rglob("*"), _MOST_FILES + 1)]
    if len(below) > _MOST_FILES:
        return None
    for file in sorted(below):
        if file.is_file() and "__pycache__" not in file.parts:
            stat = file.stat()  # copying may preserve the modification time, but never the change time
            digest.update(f"{file} {stat.st_size} {stat.st_ctime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


@once
def _places(package: str) -> list[Path]:
    """Return the paths of a package, by its import name: a module, or the folders of a package and its first file."""
    spec = util.find_spec(package)
    return [*map(Path, filter(None, [*(spec.submodule_search_locations or []), spec.origin]))] if spec else []


def _may_change(package: str) -> bool:
    """Return whether a package is imported from editable sources, next to files that it may import or read."""
    return not any({"site-packages", "dist-packages"}.intersection(place.parts) for place in _places(package))


@once
def _package(without: Sequence[str] = ()) -> str:
    """Return a digest of ptdbench's own files, except for some folders."""
    folder, digest = Path(compose.__file__).parents[1], sha256()
    for path in sorted(path for suffix in ("py", "c", "h", "csv") for path in folder.rglob(f"*.{suffix}")):
        if path.relative_to(folder).parts[0] not in without:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
