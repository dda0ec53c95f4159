"""All configurations of a command line, composed before the first run starts.

Hydra composes, and ptdbench runs: Hydra itself would compose each job of a sweep just before running it, and report a
misspelling in the middle of the sweep. Its refusals are explained with the nearest names.
"""

import argparse
import copy
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ptdbench.grouping import grouped
from ptdbench.problems import (
    ConfigError,
    Problem,
    differing,
    first_line,
    in_shell,
    message_of,
    nearest,
    require,
    try_these,
)
from ptdbench.records.effects import OF_CHOICE, leaves
from ptdbench.setup.commandline import LAUNCHER, SWEEPER, as_written, expand_shorthands, option, quoted, search_in
from ptdbench.setup.config import GROUPS, Config, conf_folder, read
from ptdbench.terminal import command, plain

#: Hydra's exceptions for an invalid command line or file; :func:`_compose` converts further ones to these.
_REFUSALS = (HydraException, OmegaConfBaseException, ValueError, IndexError)

#: Hydra's message if a choice overrides choices inside its own package, which has none.
_MISPLACED = re.compile(r"In '([^/']+)/([^']+)': Could not override '[^@']+@\1\.")

#: Modules of the callables in ``conf/``, where all of their options are listed.
_SHIPPED = re.compile(r"torch\.|ptdbench\.(?!examples\.)")

#: What to type for names that other programs give to layouts; as choices, a glob would run these twice.
_ELSEWHERE = {
    "parallel=dp": "ddp",
    "parallel=pp": "pdp",
    "parallel=zero2": "fsdp parallel.reshard_after_forward=false",
    "parallel=zero3": "fsdp",
    "parallel=none": "single",
}


@dataclass(frozen=True)
class Source:
    """The source of configurations."""

    conf: Path  #: The folder of the configuration.
    name: str = "config"  #: The primary configuration in it.
    extra: str | None = None  #: One more folder of configurations, Hydra's ``--config-dir``.

    @property
    def flags(self) -> list[str]:
        """The flags that choose this source from any folder, as words."""
        chosen = {
            "--config-path": None if self.conf == conf_folder() else self.conf.resolve(),
            "--config-name": None if self.name == "config" else self.name,
            "--config-dir": None if self.extra is None else Path(self.extra).resolve(),
        }
        return [str(word) for flag, value in chosen.items() if value for word in (flag, value)]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let Hydra read the source within the context; raises ConfigError if a folder is missing."""
        with initialize_config_dir(version_base="1.3", config_dir=str(self.conf.resolve()), job_name="train"):
            for flag, path in (("--config-path", self.conf), ("--config-dir", self.extra)):
                if path is not None and not (folder := Path(path).resolve()).is_dir():
                    raise ConfigError([Problem(flag, path, f"there is no such folder (it would be {folder})")])
            if self.extra is not None:
                search_in(Path(self.extra).resolve())
            _set_sweepers()
            yield


def source(arguments: argparse.Namespace) -> Source:
    """Return the source that the flags of a command line choose."""
    conf = Path(arguments.config_path).resolve() if arguments.config_path else conf_folder()
    return Source(conf, arguments.config_name or "config", arguments.config_dir)


def _set_sweepers() -> None:
    """Let sweepers follow the objective and take failed runs as results, unless a file or the command line differs."""
    store = ConfigStore.instance()
    for name in store.list(SWEEPER):
        if name.endswith(".yaml") and "direction" in (plugin := store.load(f"{SWEEPER}/{name}")).node:
            plugin.node.direction, plugin.node.max_failure_rate = "${direction:${objective}}", 1.0
            store.store(name, plugin.node, SWEEPER, plugin.package, plugin.provider)


@dataclass(frozen=True)
class Composed:
    """The configurations of a command line."""

    wholes: list[DictConfig]  #: Every run's configuration with Hydra's own node; for a search, some possible runs.
    overrides: list[list[str]]  #: The overrides of each run, without Hydra's own options.
    is_sweep: bool  #: Whether they are a sweep.
    typed: list[str]  #: The overrides typed for all runs, without Hydra's own options except those of its sweeper.
    source: Source  #: The source that they were composed from.
    searches: bool  #: Whether Hydra's sweeper chooses each run by the results of the earlier ones.

    @cached_property
    def configs(self) -> list[Config]:
        """Every run's configuration, as a :class:`Config`."""
        return list(map(without_hydra, self.wholes))

    @cached_property
    def swept(self) -> list[str]:
        """The options that have several values."""
        by_name = grouped((option(word), word) for job in self.overrides for word in job)
        return [name for name, words in by_name.items() if len(set(words)) > 1]

    @property
    def hydra(self) -> DictConfig:
        """Hydra's own node, the same for all runs of a sweep except for what identifies a run."""
        node: DictConfig = self.wholes[0].hydra
        return node

    @property
    def hydras(self) -> list[str]:
        """The overrides of Hydra's own options."""
        return as_written(self.hydra.overrides.hydra)

    @property
    def launcher(self) -> str:
        """The launcher: ``submitit_slurm`` for jobs, otherwise ``basic``."""
        return str(self.hydra.runtime.choices.get(LAUNCHER))

    @property
    def launcher_options(self) -> dict[str, Any]:
        """The options of the launcher."""
        options: Any = OmegaConf.to_container(self.hydra.launcher, resolve=True)
        return options

    @property
    def sweeper(self) -> str:
        """The choice of sweeper."""
        return str(self.hydra.runtime.choices.get(SWEEPER))

    @property
    def directory(self) -> Path:
        """The output directory that the command line asks for."""
        return Path(self.hydra.sweep.dir if self.is_sweep else self.hydra.run.dir).expanduser()

    def sweep(self, instead: Sequence[str] = ()) -> DictConfig:
        """Return Hydra's configuration of the whole sweep, whose overrides include the lists of values.

        Only within :meth:`Source.open`. ``instead`` are Hydra options that replace those of the launcher.
        """
        loader = GlobalHydra.instance().config_loader()
        ours = [word for word in self.typed if not option(word).startswith(("hydra.", "hydra/"))]
        replaced = (LAUNCHER, "hydra.launcher.") if instead else ()
        hydras = [word for word in self.hydras if not option(word).startswith(replaced)]
        return loader.load_configuration(self.source.name, [*ours, *hydras, *instead], RunMode.MULTIRUN)


def compose_all(overrides: Sequence[str], multirun: bool = False, source: Source | None = None) -> Composed:
    """Compose every job of a command line's overrides; ``multirun`` is its flag ``-m``, ``source`` by default ``conf``.

    Raises:
        ConfigError: With every invalid override, or with the problem of the files.
    """
    source = source or Source(conf_folder())
    with source.open():
        parsed = _parse(expand_shorthands(overrides))
        require(*_unfit(parsed))
        try:
            hydras = [_line(override) for override in parsed if override.is_hydra_override()]
            if multirun and not any(override.key_or_group == "hydra.mode" for override in parsed):
                hydras.append("hydra.mode=MULTIRUN")
            ours = [override for override in parsed if not override.is_hydra_override()]
            corner = [values[0] for values in _values(ours)]
            first = _compose(source.name, [*hydras, *corner])
            require(_lacking(source.name, first, parsed))
            if first.hydra.mode is None:  # as Hydra does
                first.hydra.mode = RunMode.RUN
                first.hydra.overrides.hydra.append("hydra.mode=RUN")
                hydras.append("hydra.mode=RUN")
            is_sweep = first.hydra.mode == RunMode.MULTIRUN
            searches = is_sweep and first.hydra.runtime.choices.get(SWEEPER) != "basic"

            def composed(job: Sequence[str]) -> DictConfig:
                return first if job == corner else _compose(source.name, [*hydras, *job])

            runs = _runs(composed, ours, is_sweep, searches)
        except _REFUSALS as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(_explain(source.name, parsed, error)) from None
        of_sweeper = (SWEEPER, "hydra.sweeper.")
        typed = [_line(it) for it in parsed if not it.is_hydra_override() or it.key_or_group.startswith(of_sweeper)]
        jobs, wholes = [job for job, _ in runs], [whole for _, whole in runs]
        return Composed(wholes, jobs, is_sweep, typed, source, searches)


def _runs(
    composed: Callable[[Sequence[str]], DictConfig], ours: Sequence[Override], is_sweep: bool, searches: bool
) -> list[tuple[list[str], DictConfig]]:
    """Compose the runs, for a search a few representative ones; refuse options that must not vary within a sweep."""
    # A sweeper that searches gets what does not depend on its choices, and with it the lists of files.
    fixed = [_line(override) for override in ours if not override.is_sweep_override()]
    once = composed(fixed if searches else [values[0] for values in _values(ours)])
    typed = {option(_line(override)) for override in ours}
    swept = [*_parse(line for line in _lists(once) if option(line) not in typed), *ours]
    if not searches:
        require(*_swept(swept, is_sweep))
    runs = [(job, composed(job)) for job in (_possible if searches else _jobs)(swept)]
    sweeps = [_of_sweep(whole, searches) for whole in [once] * searches + [whole for _, whole in runs]]
    require(next(differing(sweeps, "a sweep has one", "start one sweep for each"), None))
    late = [line for line in _lists(runs[-1][1]) if line not in _lists(once)]
    rule = "has no effect in a file that hydra.sweeper.params chooses itself"
    require(*(Problem("hydra.sweeper.params", line, rule, "write it beside that choice") for line in late))
    return runs


def _compose(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose one configuration with Hydra's own node; raises HydraException also for errors that Hydra misses."""
    try:
        composed = compose(config_name, list(overrides), return_hydra_config=True)
        choices = composed.hydra.runtime.choices
        odd = [group for group in choices if group not in GROUPS and isinstance(composed.get(group), DictConfig)]
        require(*(_of_no_package(group, choices[group]) for group in odd))  # Hydra made packages for them
        return composed
    except _REFUSALS:
        raise
    except Exception as error:
        words = " ".join(message_of(error).split())
        raise HydraException(f"Hydra fails on it ({type(error).__name__}: {words})") from None


def _lacking(config_name: str, composed: DictConfig, overrides: Sequence[Override]) -> Problem | None:
    """Find a user's primary configuration that does not inherit ptdbench's, and therefore lacks groups."""
    lacks = [group for group in GROUPS if group not in composed and group != "virtual"]
    if not lacks or config_name == "config" or any(override.is_delete() for override in overrides):
        return None
    rule = f"has no {', '.join(lacks)}"
    return Problem("--config-name", config_name, rule, "let the file begin with defaults: [config, _self_]")


def _of_no_package(group: str, choice: str) -> Problem:
    rule = f"its file sets options of {group}, and there are none"
    return Problem(group, choice, rule, "begin the file with the line # @package _global_")


def without_hydra(whole: DictConfig) -> Config:
    """Return a run's configuration without Hydra's own node, to which its options may then not refer."""
    job = copy.deepcopy(whole)
    with open_dict(job):
        del job["hydra"]
    return read(job)


def _parse(overrides: Iterable[str]) -> list[Override]:
    """Parse the overrides as Hydra does; raises ConfigError with those that it cannot parse."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed: list[Override] = []
    unreadable = []
    for override in overrides:
        try:
            parsed += parser.parse_overrides([override])
        except (HydraException, RecursionError) as error:
            name, equals, value = override.partition("=")
            rule = (
                f"cannot be read ({first_line(error)})" if equals else "options are written NAME=VALUE, without spaces"
            )
            is_text = equals and not value.startswith(("[", "{", "'", '"'))
            remedy = f"as text it is {in_shell(name, quoted(value))}" if is_text else ""
            if plain(override) != override:
                remedy = "type it in UTF-8, without control characters"
            unreadable.append(Problem(name, value if equals else "(no value)", rule, remedy))
    require(*unreadable)
    return parsed


def _values(overrides: Sequence[Override]) -> list[list[str]]:
    """List each option with each of its values, or with the ends of a range; of an option given twice, the last."""
    by_name = {}
    for override in overrides:
        name, value = override.get_key_element(), override.value()
        if isinstance(value, IntervalSweep):
            values = [str(value.start), str(value.end)]
        elif override.is_sweep_override():
            random.seed(override.input_line)  # shuffle(...) has one order in all ranks, and in a resumed sweep
            values = [*override.sweep_string_iterator()]
        else:
            values = [override.get_value_element_as_str()]
        by_name[name] = [f"{name}={value}" for value in values]
    return [*by_name.values()]


def _jobs(overrides: Sequence[Override]) -> list[list[str]]:
    """List the overrides of each job as Hydra's own sweeper does."""
    return [list(job) for job in itertools.product(*_values(overrides))]


def _possible(overrides: Sequence[Override]) -> list[list[str]]:
    """List runs that a search may choose: with the first and last value of each list, and each choice of a group."""
    groups = _groups()
    each = [words if option(words[0]) in groups else [words[0], words[-1]] for words in _values(overrides)]
    longest = max(map(len, each), default=1)
    return [[words[min(place, len(words) - 1)] for words in each] for place in range(longest)]


def _lists(whole: DictConfig) -> list[str]:
    """Return the lists of values that files define for a sweep, as they would be typed."""
    return expand_shorthands(f"{name}={value}" for name, value in (whole.hydra.sweeper.get("params") or {}).items())


def _of_sweep(whole: DictConfig, searches: bool) -> dict[str, Any]:
    """Return the options that a sweep has once, as they are written; the lists of files are among them."""
    written: Any = OmegaConf.to_container(whole, resolve=False)
    hydra, cluster = written["hydra"], written["cluster"]
    chosen = {group: hydra["runtime"]["choices"].get(group) for group in ("cluster", LAUNCHER, SWEEPER)}
    parts = {"launcher": hydra["launcher"], "sweeper": hydra["sweeper"], "sweep": hydra["sweep"]}
    ours = {group: written[group] for group in ("sweep", "repeat")}
    once = {"cluster": {"submit": cluster.get("submit")}, **ours, "hydra": parts}
    return {**chosen, **dict(leaves(once)), **({"objective": written["objective"]} if searches else {})}


def _line(override: Override) -> str:
    return str(override.input_line)


def _typed_value(override: Override) -> str:
    return _line(override).partition("=")[2]


def _unfit(overrides: Sequence[Override]) -> Iterator[Problem]:
    groups = _groups()
    for override in overrides:
        name, value = override.key_or_group, override.value()
        if isinstance(value, list) and name in groups:  # Hydra would merge the choices
            remedy = f"try -m {name}={','.join(map(str, value))}"
            yield Problem(name, _typed_value(override), "is more than one choice in one run", remedy)
        if (
            override.is_hydra_override()
            and override.is_sweep_override()
            and not name.startswith("hydra.sweeper.params")
        ):
            rule = "Hydra's own options have one value in a sweep"
            yield Problem(name, _typed_value(override), rule, "start one sweep for each")


def _swept(overrides: Sequence[Override], is_sweep: bool) -> Iterator[Problem]:
    for override in overrides:
        if isinstance(override.value(), IntervalSweep):
            rule = "is a range, from which only a sweeper that searches can choose"
            remedy = f"add -m {SWEEPER}=optuna, or give a list of values"
            yield Problem(override.key_or_group, _typed_value(override), rule, remedy)
        if override.is_sweep_override() and not is_sweep:
            rule = "is a list of values, each a run of its own"
            yield Problem(override.key_or_group, _typed_value(override), rule, "add -m to sweep")


def _explain(config_name: str, overrides: Sequence[Override], error: Exception) -> list[Problem]:
    """Return a problem for each override that Hydra cannot use, with what the user may have meant."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file == config_name:
        remedy = try_these(nearest(config_name, _choices("")) or ["config"])
        return [Problem("--config-name", config_name, "there is no such file in the configuration folders", remedy)]
    failed: list[tuple[Override, str, Exception]] = []
    sound = [_line(override) for override in overrides if override.key_or_group == "hydra.searchpath"]
    for override in sorted(overrides, key=lambda typed: not _is_group(typed.key_or_group)):  # a choice has options
        words = _values([override])[0] or [_line(override)]
        for word in words if _is_group(override.key_or_group) else words[:1]:
            try:
                _compose(config_name, [*sound, word])
            except _REFUSALS as refused:
                failed.append((override, word, refused))
            else:
                sound += [word] * (len(words) == 1)
    problems = [_problem(config_name, override, word, sound, refused) for override, word, refused in failed]
    typed = ("command line", " ".join(map(_line, overrides))) if overrides else ("--config-name", config_name)
    return problems or [Problem(*typed, _reason(error))]


def _problem(config_name: str, override: Override, word: str, sound: Sequence[str], refused: Exception) -> Problem:
    """Explain why Hydra refuses one ``word`` of an override, given the ``sound`` ones of the command line."""
    name, typed, value = override.key_or_group, _typed_value(override), word.partition("=")[2]
    choices = _choices(name) if _is_group(name) else []
    choices = [choice for choice in choices if choice not in ("ptdbench", "submitit_local")]  # launchers of no cluster
    if misplaced := _MISPLACED.match(str(refused)):
        return _of_no_package(misplaced[1], misplaced[2])
    if choices and value not in choices and not (override.package or override.is_delete()):
        other = _ELSEWHERE.get(f"{name}={value}")
        remedy = f"try {other}" if other else try_these(nearest(value, choices) or choices)
        return Problem(name, value, "there is no such choice", remedy)
    if choices and override.is_add():
        return Problem(word.partition("=")[0], typed, "it already has a choice", f"try {in_shell(name, typed)}")
    if choices or "To append" not in str(refused):
        return Problem(word.partition("=")[0], typed, _reason(refused))
    return Problem(name, typed, "there is no such option", _meant(config_name, override, sound))


def _meant(config_name: str, override: Override, sound: Sequence[str]) -> str:
    name, whole = override.key_or_group, _compose(config_name, sound)
    (group, _, last), options = name.rpartition("."), _options(whole)
    beside = OmegaConf.select(whole, group) if group else None
    target = str(beside.get("_target_", "")) if isinstance(beside, DictConfig) else ""
    is_own = target and (not _SHIPPED.match(target) or any(word.startswith(f"{group}._target_=") for word in sound))
    if beside == {} or is_own:  # keys of the user's own, as in cluster.extra, or arguments of a class
        near = nearest(last, [key for key in map(str, beside or ()) if key not in OF_CHOICE])
        return try_these([*(f"{group}.{key}" for key in near), in_shell(f"+{name}", _typed_value(override))])
    shown = "hydra" if name.startswith("hydra.") else "job"
    meant = _choices_with(config_name, name, sound) or _similar(name, [*_groups(), *options])
    return try_these(meant) or f"see {command()} --cfg {shown}"


def _choices_with(config_name: str, name: str, sound: Sequence[str]) -> list[str]:
    """List choices of an option's group that have it, as ``cluster=slurm`` has ``cluster.partition``; but no models."""
    group, folders = name.partition(".")[0], [word for word in sound if option(word) == "hydra.searchpath"]
    having: list[str] = []
    for choice in sorted(_choices(group), key=len) if group in {*_groups()} - {"model"} else ():
        with suppress(*_REFUSALS):
            having += [f"{group}={choice}"] * (name in _options(_compose(config_name, [*folders, f"{group}={choice}"])))
    return having[:3]


def _reason(error: Exception) -> str:
    """Return Hydra's message with its suggestion or its cause, but without its lists of everything available."""
    message, *more = str(error).strip().splitlines() or [type(error).__name__]
    if more and more[0].startswith(("Did you mean", "To append")):
        return f"{message} {more[0]}"
    cause = first_line(error.__cause__) if error.__cause__ else ""
    return f"{message}: {cause}" if cause else message


def _choices(group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
    return GlobalHydra.instance().config_loader().get_group_options(group, kind)


def _groups() -> list[str]:
    """List the names of all config groups, except Hydra's own."""
    return [name for name in _choices("", ObjectType.GROUP) if name != "hydra"]


def _is_group(name: str) -> bool:
    return name in (*_groups(), LAUNCHER, SWEEPER)


def _options(config: DictConfig) -> list[str]:
    """List the dotted names of ptdbench's options in a configuration, without the keys that identify a choice."""
    written = OmegaConf.to_container(config, resolve=False)
    assert isinstance(written, dict)
    del written["hydra"]
    return [name for name, value in leaves(written) if value != {} and name.rpartition(".")[2] not in OF_CHOICE]


def _similar(name: str, options: Sequence[str]) -> list[str]:
    """List options spelled like this one, as a whole or in their last part, or that share a word with it.

    ``lr`` may have meant ``optimizer.lr``, and ``batch_size`` may have meant ``train.global_batch``.
    """
    by_last = grouped((option.rpartition(".")[2], option) for option in options)
    last = name.rpartition(".")[2]
    sharing = [leaf for leaf in by_last if {*last.split("_")} & {*leaf.split("_")}]
    whole = nearest(name, options) if last == name else []
    alike = [option for leaf in (last, *sharing) for option in by_last.get(leaf, [])]
    similar = dict.fromkeys([*alike, *whole, *(by_last[leaf][0] for leaf in nearest(last, by_last))])
    group = name.removesuffix(last)
    return sorted(similar, key=lambda option: not option.startswith(group))[:3]
