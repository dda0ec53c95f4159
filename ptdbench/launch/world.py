"""Rank discovery: the place of this process among the ranks, a pure function of its launcher's environment variables.

No guessing: a launcher is recognized by variables that only it sets, and a process that no launcher describes is not a
rank (it starts the local ranks itself, see :mod:`ptdbench.launch.local`). No library is used: torch reads only
torchrun's variables, and Lightning's environments take the first launcher that fits, silently even if its variables
contradict each other.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import Struct

from ptdbench.problems import ConfigError, Problem


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks."""

    rank: int  #: This process's rank, ``0 <= rank < size``.
    size: int  #: Number of ranks.
    local_rank: int  #: This process's rank within its node; also the index of its GPU.
    local_size: int  #: Number of ranks on this node.
    launcher: str  #: What started the rank, for messages and records.
    #: Number of nodes; ``None`` if the launcher does not tell, and the nodes cannot all have as many ranks as this one.
    nodes: int | None = None
    #: The ranks that run, if some do not, as is possible on virtual GPUs.
    present: tuple[int, ...] | None = None

    @property
    def is_first(self) -> bool:
        """True if this rank speaks for all: it is rank 0, or the first rank present."""
        return self.rank == (self.present[0] if self.present else 0)

    @property
    def started_by(self) -> Launcher:
        """The description of the launcher."""
        return ALL_LAUNCHERS[self.launcher]


class Peer(Struct, frozen=True):
    """One rank, as it sees itself."""

    rank: int  #: Its global rank.
    local_rank: int  #: Its local rank.
    local_size: int  #: Ranks on its node.
    node: str  #: The cluster's name for the node.
    host: str  #: The host name.
    device: str  #: ``cpu``, or the GPU with its name.
    cores: list[int]  #: The numbers of the CPU cores that it may use.
    threads: int  #: Number of compute threads.
    settings: dict[str, str]  #: Environment variables that change results or speed.


@dataclass(frozen=True)
class Launcher:
    """A launcher: the variables by which it tells a process its place, and what else it does for the ranks."""

    proof: tuple[str, ...]  #: Variables that only this launcher sets; all of them must be set.
    rank: str  #: The variable with the rank.
    size: str  #: The variable with the number of ranks.
    local_rank: str  #: The variable with the rank within the node.
    local_size: str  #: The variable with the number of ranks on the node.
    nodes: str = ""  #: The variable with the number of nodes, if there is one.
    #: If ``local_size`` lists all nodes, as ``2(x3),1`` does, the variable with this node's index in the list.
    node: str = ""
    #: Whether the launcher has started a shell for the user rather than a rank.
    is_shell: Callable[[Mapping[str, str]], bool] = lambda environ: False
    #: Variables that identify a launch: the first tuple whose first variable is set, all its variables together.
    names: tuple[tuple[str, ...], ...] = ()
    #: Whether the process that the user started is the ranks' parent, sees how each one ends, and records it.
    has_parent: bool = False
    has_store: bool = False  #: Whether the launcher serves the ranks' store and tells them its address.
    #: Whether the ranks are the tasks of a SLURM step, which lists their nodes and must be ended if one fails.
    has_step: bool = False
    #: How long a rank lingers if its failure may be a consequence of another's, so that the launcher sees the culprit
    #: die first, and this rank learns which others were stopped. mpirun sends SIGKILL a second after its SIGTERM.
    linger_seconds: float = 0.5
    #: Whether nodes may begin minutes apart, and before the name of rank 0's host resolves, as containers do whose
    #: images are pulled. Rank 0 then listens on all addresses, as the one that others know may be its host's.
    starts_apart: bool = False

    def started(self, environ: Mapping[str, str]) -> bool:
        """Return whether a process with this environment is one of the launcher's ranks."""
        return all(name in environ for name in self.proof) and not self.is_shell(environ)

    @property
    def variables(self) -> list[str]:
        """The names of all variables that describe a rank."""
        named = (*self.proof, self.rank, self.size, self.local_rank, self.local_size, self.nodes, self.node)
        return [name for name in dict.fromkeys(named) if name]


#: The lowest id of SLURM's own steps, such as the shell of ``salloc`` or a batch script: SLURM_INTERACTIVE_STEP in
#: <slurm/slurm.h>.
_FIRST_STEP_OF_SLURM = 0xFFFFFFFA


def _is_slurm_shell(environ: Mapping[str, str]) -> bool:
    """Return whether a SLURM step is a user's terminal.

    A step started from such a terminal inherits the variable of ``srun --pty``, so the variable is conclusive only if
    the step has no other tasks.
    """
    step = environ.get("SLURM_STEP_ID", "")
    of_slurm = step.isdecimal() and int(step) >= _FIRST_STEP_OF_SLURM
    return of_slurm or ("SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1")


#: The variable that makes a process with torch's own variables a rank; ``cluster=env`` sets it.
BY_HAND = "PTDBENCH_ENV"

_TORCHRUN = Launcher(
    proof=("TORCHELASTIC_RUN_ID",),
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    nodes="GROUP_WORLD_SIZE",
    has_store=True,
    linger_seconds=2.0,
)

#: In order of precedence: torchrun runs inside SLURM steps and under mpirun, and mpirun starts its helpers as a SLURM
#: step, whose variables the ranks inherit, as workers of Ray do. ``srun --mpi=pmi2`` sets ``PMI_RANK`` as MPICH does,
#: but not ``MPI_LOCALRANKID``.
LAUNCHERS: dict[str, Launcher] = {
    "torchrun": _TORCHRUN,
    "env": replace(_TORCHRUN, proof=(BY_HAND,), nodes="", has_store=False, starts_apart=True),
    "openmpi": Launcher(
        proof=("OMPI_COMM_WORLD_RANK",),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        names=(("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",)),
    ),
    "mpich": Launcher(
        proof=("MPI_LOCALRANKID",),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        names=(("I_MPI_HYDRA_UUID",),),  # Intel MPI only: nothing in the environment tells two launches of MPICH apart
    ),
    "srun": Launcher(
        proof=("SLURM_STEP_ID", "SLURM_PROCID"),
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        nodes="SLURM_STEP_NUM_NODES",
        node="SLURM_NODEID",
        is_shell=_is_slurm_shell,
        names=(("SLURM_JOB_ID", "SLURM_STEP_ID"),),
        has_step=True,
        linger_seconds=2.0,
    ),
}

#: The variable with the ranks that run, if this package starts only some of them: ``0,131,255``.
PRESENT = "PTDBENCH_RANKS"

#: All launchers, including this package, which starts ranks on one machine with torchrun's environment.
ALL_LAUNCHERS = {"local": replace(_TORCHRUN, has_parent=True), **LAUNCHERS}

#: The variables of ``init_process_group("env://")``: set for a rank started by hand, or stale.
_NAMELESS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: The number of ranks under launchers that do not tell enough, or that could not be tested: Cray's PALS and other PMI,
#: LSF's jsrun, flux run, and mpirun_rsh of MVAPICH2.
_SIZES = ("PMI_SIZE", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE", "MV2_COMM_WORLD_SIZE")


def discover(environ: Mapping[str, str]) -> World | None:
    """Return the place that the environment describes, or ``None`` if no launcher started this process.

    Raises:
        ConfigError: A launcher's variables are set, but are incomplete or contradictory; or the environment describes
            one rank of several that no known launcher started.
    """
    for name, launcher in LAUNCHERS.items():
        if launcher.started(environ):
            return _place(environ, name, launcher)
    if size := next((name for name in _SIZES if _is_several(environ, name)), None):
        rule = "this is one of several ranks, and their launcher is not recognized"
        remedy = f"start them with torchrun, srun, or mpirun of Open MPI, MPICH or Intel MPI; if stale, unset {size}"
        raise ConfigError([Problem(size, environ[size], rule, remedy)])
    if all(environ.get(name) for name in _NAMELESS) and _is_several(environ, "WORLD_SIZE"):
        others = _listed(environ, _NAMELESS[1:])
        rule = f"with {others} this is one of several ranks, but no launcher has set variables of its own"
        remedy = f"add cluster=env if they are right, or unset {' '.join(_NAMELESS)}"
        raise ConfigError([Problem("RANK", environ["RANK"], rule, remedy)])
    return None


def _is_several(environ: Mapping[str, str], name: str) -> bool:
    size = environ.get(name, "")
    return size.isdecimal() and int(size) > 1


def torchrun_variables(world: World, host: str, port: int) -> dict[str, str]:
    """Return a rank's place and its store's address as the variables that torch and other libraries read."""
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


@dataclass(frozen=True)
class Place:
    """The pretended place of local ranks on virtual GPUs."""

    nodes: int = 1  #: Number of nodes, each with the same number of ranks.
    present: Sequence[int] | None = None  #: The ranks to start; ``None`` for all.
    environ: Mapping[str, str] = field(default_factory=dict)  #: Variables to start their processes with.

    @property
    def loading(self) -> dict[str, str]:
        """The variables that the dynamic linker reads."""
        return {name: value for name, value in self.environ.items() if name.startswith("LD_")}

    def ranks(self, size: int) -> Sequence[int]:
        """Return the ranks to start, out of ``size``."""
        return range(size) if self.present is None else self.present


#: The default place: this machine as it is.
THIS_MACHINE = Place()


def local_environments(size: int, host: str, port: int, where: Place = THIS_MACHINE) -> Iterator[dict[str, str]]:
    """Yield torchrun's variables for each rank of a launch on this machine, whose parent serves the store."""
    launch = {
        "GROUP_WORLD_SIZE": str(where.nodes),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    if where.present is not None:
        launch[PRESENT] = ",".join(map(str, where.present))
    on_node = size // where.nodes
    for rank in where.ranks(size):
        place = torchrun_variables(World(rank, size, rank % on_node, on_node, "local"), host, port)
        place |= {"GROUP_RANK": str(rank // on_node), "ROLE_RANK": str(rank)}
        yield {**where.environ, **launch, **place}


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often torchrun has started the ranks again, as ``--max-restarts`` lets it."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def is_first_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process speaks for all ranks: it is the first rank, or no rank at all."""
    try:
        world = discover(environ)
    except ConfigError:
        return True
    return world is None or world.is_first


def _place(environ: Mapping[str, str], name: str, launcher: Launcher) -> World:
    rank, size, local_rank = (
        _number(environ, variable, name) for variable in (launcher.rank, launcher.size, launcher.local_rank)
    )
    local_size = _local_size(environ, name, launcher)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        rule = "must satisfy 0 <= rank < world size and 0 <= local rank < ranks of the node <= world size"
        raise _refusal(environ, name, _listed(environ, launcher.variables), rule)
    nodes = None if size % local_size else size // local_size
    if launcher.nodes in environ:
        nodes = _number(environ, launcher.nodes, name)
    present = tuple(map(int, listed.split(","))) if (listed := environ.get(PRESENT)) else None
    return World(rank, size, local_rank, local_size, name, nodes, present)


def _local_size(environ: Mapping[str, str], name: str, launcher: Launcher) -> int:
    if not launcher.node:
        return _number(environ, launcher.local_size, name)
    node = _number(environ, launcher.node, name)
    listed = environ.get(launcher.local_size, "")
    try:
        return tasks_per_node(listed)[node]
    except (ValueError, IndexError):
        rule = f"{name} must have set it to the tasks of every node, such as 2(x3),1; this is node {node}"
        raise _refusal(environ, launcher.local_size, listed or "(not set)", rule) from None


def tasks_per_node(text: str) -> list[int]:
    """Parse SLURM's number of tasks of each node, ``2(x3),1`` as ``[2, 2, 2, 1]``; raises ValueError if malformed."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII)
        if not match:
            raise ValueError(f"{text!r} is not a list of tasks per node such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _number(environ: Mapping[str, str], variable: str, name: str) -> int:
    value = environ.get(variable, "")
    if not value.isdecimal():
        rule = f"{'the launcher' if name == 'env' else name} must have set it to a whole number"
        raise _refusal(environ, variable, value or "(not set)", rule)
    return int(value)


def _refusal(environ: Mapping[str, str], option: str, value: str, rule: str) -> ConfigError:
    """Return the error, with all that the environment says, so that a user can tell which variables are stale."""
    started = {name: launcher for name, launcher in LAUNCHERS.items() if launcher.started(environ)}
    sources = "".join(f"\n  {name}: {_listed(environ, launcher.variables)}" for name, launcher in started.items())
    remedy = f"unset the stale variables or use torchrun; the environment says{sources}"
    if [*started][:1] == ["env"]:
        remedy = "set it for every rank (0 where a node has one), or omit cluster=env"
    return ConfigError([Problem(option, value, rule, remedy)])


def _listed(environ: Mapping[str, str], names: tuple[str, ...] | list[str]) -> str:
    return " ".join(f"{name}={environ.get(name, '(not set)')}" for name in names)
