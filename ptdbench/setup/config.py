"""The typed configuration of a run: the options of ptdbench's own groups, with their types and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ptdbench.kernels import Kernels
from ptdbench.problems import ConfigError, Problem, as_typed, require
from ptdbench.records import store
from ptdbench.records.effects import OF_CHOICE, leaves
from ptdbench.records.record import DIRECTIONS, Objective, configuration
from ptdbench.records.schema import Written
from ptdbench.setup import signature
from ptdbench.setup.signature import Limit, at_least
from ptdbench.terminal import command, has_controls

T = TypeVar("T")

#: Groups whose choice is a call: ``_target_`` and its arguments. Each also has a ``name`` to display; a workload has a
#: ``label`` for directories.
CALLS = ("data", "model", "optimizer", "lr_schedule", "parallel", "activations", "workload", "virtual", "logger")
GROUPS = ("cluster", "train", "eval", "checkpoint", "profile", "sweep", "repeat", *CALLS)

#: Numbers with a range.
Natural = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
Minutes = Annotated[float, Limit(lambda limit: limit > 0, "must be greater than 0, or null for no limit")]
Memory = Annotated[float, Limit(lambda memory: memory >= 0, "must be at least 0, and 0 is all that a node has")]
Norm = Annotated[float, Limit(lambda norm: norm > 0, "must be greater than 0, or null for no clipping")]
_SHARE = Limit(lambda share: 0 <= share < 1, "must be at least 0 and less than 1", "try 0.02")
Share = Annotated[float, _SHARE]
Reserve = Annotated[float, Limit(_SHARE.holds, f"{_SHARE.rule}, or null to start a run whatever it needs", "try 0.1")]

#: The remedy for a choice whose file lacks required keys.
_INHERIT = "a file that changes another choice of its group begins with defaults: [NAME, _self_]"

#: Default number of ranks on a node without GPUs: the fewest that communicate.
RANKS_WITHOUT_GPU = 2


# Resolver for conf/: the class name is the last part of its path, as Net in my_package.Net.
OmegaConf.register_new_resolver("class_name", lambda target: str(target).rpartition(".")[2], replace=True)

# Resolver for conf/: names may be any text, but a run's directory must stay inside the output folder.
OmegaConf.register_new_resolver("file_name", store.file_name, replace=True)

# Resolver for the options of a sweeper: whether it minimizes or maximizes the objective.
OmegaConf.register_new_resolver("direction", DIRECTIONS.__getitem__, replace=True)


@dataclass(frozen=True)
class Train:
    """Options of training; ``conf/config.yaml`` describes those of each group."""

    global_batch: Count
    micro_batch: Count | Literal["auto", "max", "best"]
    steps: Count
    warmup_steps: Natural
    max_minutes: Minutes | None
    clip_norm: Norm | None
    decay: Literal["all", "matrices"]


@dataclass(frozen=True)
class Eval:
    """Options of the evaluation on held-out samples."""

    every: Count | None
    micro_batch: Count


@dataclass(frozen=True)
class Checkpoint:
    """Options of the checkpoints of a run."""

    every_steps: Count | None
    keep: Count
    asynchronous: bool


@dataclass(frozen=True)
class Profile:
    """Options of the profiling pass after the timed steps."""

    steps: Natural
    trace: bool


@dataclass(frozen=True)
class Sweep:
    """Options of a sweep as a whole."""

    resume: str | None
    same_nodes: bool


@dataclass(frozen=True)
class Repeat:
    """Options of repeating each run of a sweep."""

    runs: Count | Literal["auto"]
    max: Annotated[int, at_least(3)]
    tied_within: Share
    seed: Natural
    block: Natural | None
    series: str | None


@dataclass(frozen=True)
class Cluster:
    """The placement of the ranks; ``auto`` takes what is available."""

    name: str
    nodes: Count | Literal["auto"]
    ranks_per_node: Count | Literal["auto"]
    cpus_per_rank: Count | Literal["auto"]


@dataclass(frozen=True)
class Container:
    """The container that the ranks of a job run in; see ``conf/cluster/slurm.yaml``."""

    image: str | None
    kind: Literal["pyxis", "apptainer"]
    mounts: list[str]
    workdir: str | None
    python: str
    args: list[str]


@dataclass(frozen=True)
class Slurm(Cluster):
    """Ranks that a SLURM job will start; see ``conf/cluster/slurm.yaml``."""

    submit: Literal["wait", "detach", "test"]
    chdir: str | None
    gpus_per_node: Natural | Literal["auto"]
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    gres: str | None
    time_minutes: Count
    mem_gb: Memory | None
    exclusive: bool
    requeue: bool
    max_requeues: Natural
    mail_user: str | None
    mail_type: str | None
    dependency: str | None
    modules: list[str]
    setup: list[str]
    srun_args: list[str]
    container: Container
    extra: dict[str, Any]


@dataclass(frozen=True)
class General:
    """The options at the root of the configuration."""

    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp8_tensorwise"]
    kernels: Kernels
    compile: Literal[False, "layers", "blocks", "whole", "autotune"]
    offload: Literal["none", "optimizer_and_weights"]
    seed: Natural
    device: Literal["auto", "cpu", "cuda"]
    backend: Literal["auto", "gloo", "nccl"]
    resume: str | None
    reshape: bool
    timeout_minutes: Minutes | None
    objective: Objective
    memory_reserve: Reserve | None


@dataclass(frozen=True)
class Call:
    """One choice of a group: a callable and its options."""

    name: str
    target: str
    options: Mapping[str, Any]  #: With Hydra's ``_args_``, ``_convert_`` and ``_recursive_``, if they are given.
    label: str | None = None  #: For directories; the name is for people.

    @property
    def described(self) -> dict[str, Any]:
        """The call in Hydra's form."""
        return {"_target_": self.target, "_convert_": "all", **self.options}

    @property
    def is_custom(self) -> bool:
        """True if it is named after its target, which was given on the command line."""
        return self.name == self.target.rpartition(".")[2]


def _part(schema: Callable[..., T], group: str) -> cached_property[T]:
    """Return a property for a group of a :class:`Config`, which types the group on first access."""
    return cached_property(lambda config: _typed(schema, group, config._group(group)))


@dataclass(frozen=True)
class Config:
    """One run's configuration; :mod:`ptdbench.setup.run_spec` checks that its parts fit together.

    Each part is typed on first access, and then raises a ConfigError with all its problems, so that the other parts can
    be checked regardless.
    """

    resolved: Mapping[str, Any]  #: The configuration as plain containers, for the record.

    @property
    def label(self) -> str:
        """A short label of the run, for messages and the queue; its directory is named after it."""
        return str(self.resolved["workload"].get("label", "run"))

    def changed(self, options: Mapping[str, Any]) -> Config:
        """Return a copy with other values of existing options, by their dotted names."""
        resolved = dict(self.resolved)
        for name, value in options.items():
            *groups, last = name.split(".")
            within = resolved
            for group in groups:
                within[group] = dict(within[group])
                within = within[group]
            within[last] = value
        return Config(resolved)

    @cached_property
    def general(self) -> General:
        """The options at the root."""
        options = {name: value for name, value in self.resolved.items() if name not in GROUPS}
        return _typed(General, "", options)

    train = _part(Train, "train")
    eval = _part(Eval, "eval")
    checkpoint = _part(Checkpoint, "checkpoint")
    profile = _part(Profile, "profile")
    sweep = _part(Sweep, "sweep")
    repeat = _part(Repeat, "repeat")

    @cached_property
    def cluster(self) -> Cluster:
        """The placement of the ranks; a :class:`Slurm` if a job must be submitted for them."""
        options = self._group("cluster")
        require(*_control_characters(options))
        if "name" not in options:
            raise ConfigError([Problem("cluster.name", "(not set)", "must be given", _INHERIT)])
        if "submit" not in options:  # what files set for jobs has no effect here
            of_jobs = Slurm.__annotations__.keys()
            return _typed(Cluster, "cluster", {name: value for name, value in options.items() if name not in of_jobs})
        if isinstance(within := options.get("container"), Mapping):
            options = {**options, "container": _typed(Container, "cluster.container", within)}
        return _typed(Slurm, "cluster", options)

    def call(self, group: str) -> Call:
        """Return the choice of a group; raises ConfigError if its file lacks required keys."""
        written = self._group(group)
        name, label, target = map(written.get, ("name", "label", "_target_"))
        if "name" in written and not (isinstance(name, str) and name.strip() and name != MISSING):
            remedy = f"""try "{group}.name='{as_typed(name)}'\"""" if isinstance(name, int | float) else ""
            raise ConfigError([Problem(f"{group}.name", name, "must be a name", remedy)])
        if "_target_" not in written:
            raise ConfigError([Problem(group, name, "its file names no class or function (_target_)", _INHERIT)])
        if not isinstance(target, str) or target == MISSING:
            rule = "must name a class or a function, as in my_package.MyModel"
            raise ConfigError([Problem(f"{group}._target_", target, rule)])
        if target.startswith("__main__."):
            rule = "is defined in the program or the notebook itself, which ranks do not import"
            remedy = f"move it to my_module.py, and try my_module.{target.removeprefix('__main__.')}"
            raise ConfigError([Problem(f"{group}._target_", target, rule, remedy)])
        options = {option: value for option, value in written.items() if option not in OF_CHOICE}
        require(*_unset(group, options))
        return Call(str(name), target, options, label)

    def _group(self, name: str) -> Mapping[str, Any]:
        options = self.resolved.get(name)
        if not isinstance(options, Mapping):
            rule = f"is a group of options; see {command()} --cfg job --package {name}"
            raise ConfigError([Problem(name, options, rule)])
        return options


def conf_folder() -> Path:
    """Return the folder ``conf``: at the top of a checkout, or inside the package if installed from a wheel."""
    package = Path(__file__).parents[1]
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.with_name("conf")


def read(composed: DictConfig) -> Config:
    """Wrap a composed configuration; drop the group ``virtual`` if nothing is virtual."""
    resolved = resolve(composed)
    virtual = resolved.get("virtual")
    if isinstance(virtual, Mapping) and virtual.get("name") == "none":
        del resolved["virtual"]
    return Config(resolved)


#: Numbers that JSON cannot represent, by their text in a record.
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def of_record(record: Written) -> Config:
    """Return the configuration in a record."""

    def value_of(written: Any) -> Any:
        if isinstance(written, dict):
            return {key: value_of(value) for key, value in written.items()}
        if isinstance(written, list):
            return [value_of(value) for value in written]
        return _NOT_FINITE.get(written, written) if isinstance(written, str) else written

    return Config(value_of(configuration(record)))


def resolve(composed: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain containers, with interpolations replaced by their values.

    An interpolation that cannot be resolved stays as written, ``${model.sequence_length}``, for the record.
    """
    written = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(written, dict)

    def value_of(key: Any) -> Any:
        try:
            value = composed.get(key, written[key])
            if isinstance(value, DictConfig):
                return resolve(value)
            return OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
        except OmegaConfBaseException:
            return written[key]

    return {str(key): value_of(key) for key in written}


def _control_characters(cluster: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield options of a cluster, by name or value, that would end a line of a batch script and begin another."""
    for option, value in leaves(cluster, "cluster."):
        has_lines = option == "cluster.setup" and isinstance(value, list)
        if not has_lines and has_controls(f"{option}={as_typed(value)}"):
            rule = "must not contain control characters, such as line breaks"
            yield Problem(option.encode("unicode_escape").decode(), repr(value), rule)


def targets(options: Any, within: str = "") -> Iterator[tuple[str, str]]:
    """Yield the options of a configuration that name what to instantiate, at any depth, with their values."""
    items = dict(enumerate(options)) if isinstance(options, list) else options
    for name, value in items.items() if isinstance(items, Mapping) else ():
        if name == "_target_":
            yield f"{within}{name}", str(value)
        yield from targets(value, f"{within}{name}.")


def _unset(group: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for every option without a value: a required one, or one that refers to a missing option."""
    for option, value in options.items():
        if value == MISSING:
            yield Problem(f"{group}.{option}", value, "must be given")
        elif isinstance(value, str) and value.startswith("${"):
            remedy = f"give {group}.{option} a value, or choose another {group}"
            yield Problem(f"{group}.{option}", value, "refers to an option that does not exist", remedy)


def _typed(schema: Callable[..., T], group: str, options: Mapping[str, Any]) -> T:
    """Return the options as an object of ``schema``; raises ConfigError if names, types or ranges are wrong."""
    if problems := signature.problems(schema, options, group=group):
        raise ConfigError(problems).under(group) if group else ConfigError(problems)
    return schema(**options)
