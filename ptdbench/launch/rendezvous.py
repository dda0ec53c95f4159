"""Rendezvous of a launch's ranks: a shared store, process groups, and answers on behalf of absent ranks.

On virtual GPUs, some ranks may be absent. The others need three things of them. Objects, small figures and barriers:
:class:`PresentCollectives` answers with the value of the last present rank before the absent one. Store keys, from
which process groups are made: :class:`Answers` has them. Messages of device memory: the virtual GPU discards them, see
:mod:`ptdbench.virtual.machine`.
"""

import errno
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from threading import Thread, Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ptdbench.launch import address
from ptdbench.launch.collect import HostCollectives, through
from ptdbench.launch.watchdog import FIRST_STEP, JOINED, LEFT
from ptdbench.launch.world import World, discover, restarts, torchrun_variables
from ptdbench.problems import ConfigError, Problem
from ptdbench.terminal import echo
from ptdbench.virtual.absent import Answers, Present

#: Timeout of collectives, in addition to the watchdog's limit of a step; under torchrun also of the rendezvous.
PATIENCE = timedelta(minutes=30)

#: Timeout of collectives if the watchdog has no limit.
ENDLESS = timedelta(days=1)

#: Timeout of the rendezvous. srun and mpirun start all ranks within seconds, but hundreds of ranks that import torch
#: from one cold file system finish at different times. Beyond this, a peer has probably died or is unreachable, and
#: whoever pays for the nodes should know soon.
ARRIVAL = timedelta(minutes=2)

#: Seconds after which ranks that may start minutes apart say that they wait.
_SOON = 10.0

#: Seconds that rank 0 waits for all ranks to learn that one is refused.
REFUSAL_SECONDS = 5.0


#: Keeps stores implemented in Python alive: torch holds no reference, but an NCCL thread uses them until the process
#: ends.
_ANSWERS: list[Answers] = []


class NotMet(ConfigError):
    """The ranks do not find each other; each rank knows only its own side of the problem."""


_REACHABLE = "set MASTER_ADDR to an address of rank 0's host that all nodes can reach, or see why other ranks ended"
_RESOLVABLE = "set MASTER_ADDR to a name or an address of rank 0's host that all nodes know"
_OTHER_PORT = "set MASTER_PORT to a free port for all ranks, or end what uses this one"


@cache
def store() -> dist.Store:
    """Return the launch's key-value store, see :func:`meet`."""
    return meet(os.environ)


def meet(environ: MutableMapping[str, str]) -> dist.Store:
    """Open the launch's key-value store. From then on ``environ`` describes the rank as torchrun would.

    Raises:
        ConfigError: The ranks do not find each other at the rendezvous.
    """
    world = discover(environ)
    if world is None or world.started_by.has_store:  # the launcher chooses where the store is
        store, _, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
        return dist.PrefixStore(f"start {restarts(environ)}", store)  # torchrun may serve all restarts with one store
    host, port = address.meeting_point(world, environ)
    waits = Timer(_SOON, echo, [f"rank {world.rank}: waiting for all {world.size} ranks at {host}:{port}", sys.stderr])
    waits.daemon = True
    try:
        if world.started_by.starts_apart:
            waits.start()
        served = _open(world, host, port)
        _await_all(served, world, f"{host}:{port}", address.launch_id(world, environ))
    finally:
        waits.cancel()
    export(world, environ)
    return served


def export(world: World, environ: MutableMapping[str, str]) -> None:
    """Set the variables that torchrun would set, for libraries and users' models; stale values are replaced."""
    if not world.started_by.has_store:
        environ.update(torchrun_variables(world, *address.meeting_point(world, environ)))


def _arrival(world: World) -> timedelta:
    return 5 * ARRIVAL if world.started_by.starts_apart else ARRIVAL


def agree(key: str, world: World, find: Callable[[], str], refused: ConfigError | None = None) -> str:
    """Broadcast what rank 0 finds, unless a rank is ``refused``: then rank 0 reports why, and no rank waits.

    Raises:
        ConfigError: This rank or another one is refused, or ``find`` has failed on rank 0.
        Exception: On rank 0, what ``find`` raises.
    """
    shared = store()
    if world.rank:
        shared.set(f"{key} {world.rank}", str(refused or ""))
        value = shared.get(key).decode()
        shared.add(f"{key} heard", 1)
        if not value:
            raise refused or ConfigError([Problem("rank", world.rank, "another rank is refused, and says why")])
        return value
    try:
        if refused:
            raise refused
        for rank in range(1, world.size):
            if reason := shared.get(f"{key} {rank}").decode():
                raise ConfigError([Problem("rank", rank, reason)])
        value = find()
    except Exception:  # a full disk, too, must not leave them waiting
        shared.set(key, "")
        until = time.monotonic() + REFUSAL_SECONDS  # the store ends with this rank
        while shared.add(f"{key} heard", 0) < world.size - 1 and time.monotonic() < until:
            time.sleep(0.01)
        raise
    shared.set(key, value)
    return value


@cache
def launch_name(world: World) -> str:
    """Return a unique name of this launch, the same on all its ranks and valid as a file name.

    Under SLURM it follows from the environment. Under other launchers, rank 0 makes it up and broadcasts it.
    """
    if world.started_by.has_step:
        step = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"
        return f"slurm-{step}-{os.environ.get('SLURM_RESTART_COUNT') or 0}"
    return agree("launch", world, lambda: uuid.uuid4().hex)


def run_store(key: str) -> dist.Store:
    """Return the part of the launch's store that belongs to one run; ``key`` must be unique in the launch."""
    return dist.PrefixStore(key, store())


@contextmanager
def process_group(
    world: World,
    backend: str,
    device: torch.device,
    key: str,
    limited: Callable[[str], AbstractContextManager[object]] = nullcontext,
    patience: timedelta = PATIENCE,
) -> Iterator[dist.Store]:
    """Create the default process group for the duration of one run; yields a store that belongs to the run alone.

    The ``backend`` is ``gloo``, ``nccl``, or both, each with its kind of device; ``key`` is that of :func:`run_store`,
    and ``patience`` the timeout of collectives. Ranks may wait for each other here: ``limited`` is a context for that,
    :meth:`Watchdog.limited`.
    """
    give_gloo_one_thread()
    of_run = run_store(key)
    of_group = of_run
    if world.present:
        of_group = Answers(world.size)
        _ANSWERS.append(of_group)
        if "gloo" in backend:  # torch's fake backend discards messages on the host; virtual GPUs discard theirs
            import torch.testing._internal.distributed.fake_pg  # noqa: F401 # registers it

            backend = backend.replace("gloo", "fake")
    with limited(JOINED):
        dist.init_process_group(
            backend,
            store=of_group,
            rank=world.rank,
            world_size=world.size,
            timeout=patience,
            # Not for gloo: torch 2.11 would try to split its groups, which only NCCL supports.
            device_id=device if "nccl" in backend else None,
        )
    if world.present and "nccl" in backend:
        # Otherwise torch would split the group, and wait for absent ranks in each part.
        dist.distributed_c10d._get_default_group().bound_device_id = None
    with through(_host_collectives(world, backend, of_run, patience)):
        yield of_run
    # Only after success: destroying a group whose peer has died may wait for it forever.
    with limited(LEFT):
        dist.destroy_process_group()


@cache
def give_gloo_one_thread() -> None:
    """From now on, give every gloo group made in this process a single worker thread, where torch uses two.

    With two, each writes the name of the collective it has completed into the group's status, a string, without a lock
    (``ProcessGroupGloo::runLoop``, as of torch 2.14). A name longer than 15 characters is on the heap, such as
    ``ALLGATHER_COALESCED`` of a functional all-gather: if another collective of the group ends at the same moment, both
    threads free the same block, and the rank dies of SIGABRT or SIGSEGV, then or later. Ring attention has an
    all-gather of keys and an all-to-all of their gradients in flight. A single thread runs them in call order, as
    NCCL's stream does.
    """
    group: Any = dist.ProcessGroupGloo
    as_torch_does = group.__init__

    def made(self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        """Make a group over the interfaces in GLOO_SOCKET_IFNAME, or that of the host name, as torch does."""
        options = group._Options()
        options._threads, options._timeout = 1, timeout
        named = os.environ.get("GLOO_SOCKET_IFNAME")
        devices = [group.create_device(interface=name) for name in named.split(",")] if named else []
        options._devices = devices or [group.create_default_device()]
        for name, value in others.items():
            setattr(options, name, value)
        as_torch_does(self, store, rank, size, options)

    group.__init__ = made


def patience_for(step_minutes: float | None) -> timedelta:
    """Return the timeout of collectives: longer than the watchdog's, which can name the missing rank.

    ``step_minutes`` is the watchdog's limit of a step; ``None`` is no limit.
    """
    return ENDLESS if step_minutes is None else FIRST_STEP * timedelta(minutes=step_minutes) + PATIENCE


def be_patient(patience: timedelta) -> None:
    """Set the timeout of all process groups of this rank: with NCCL, torch gives a mesh's groups only 10 minutes."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # before torch 2.14
    for group, (backend, _) in list(dist.distributed_c10d._world.pg_map.items()):
        if "fake" not in backend:
            set_timeout(patience, group)


class PresentCollectives(HostCollectives):
    """Collectives of the ranks ``present``, in ascending order, through a store; they also answer for the others."""

    is_complete = False

    def __init__(self, present: Sequence[int], rank: int, size: int, store: dist.Store) -> None:
        super().__init__()
        self._ranks, self._size = Present(present, rank, store), size

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's value; for an absent rank, the value of the rank that answers for it."""
        return self._ranks.gather(value, range(self._size))

    def reduce(self, numbers: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Return the sum or the maximum over the ranks present."""
        of_ranks = torch.stack(list(self._ranks.exchange(numbers, self._ranks.ranks).values()))
        return of_ranks.sum(0) if operation == dist.ReduceOp.SUM else of_ranks.amax(0)

    def barrier(self) -> None:
        """Wait for the ranks present."""
        self._ranks.exchange(None, self._ranks.ranks)


def _host_collectives(world: World, backend: str, store: dist.Store, patience: timedelta) -> HostCollectives:
    """Return the small collectives of the ranks, which do not go through device memory."""
    if world.present:
        return PresentCollectives(world.present, world.rank, world.size, store)
    if "nccl" not in backend:
        return HostCollectives()
    group = dist.new_group(backend="gloo", timeout=patience)
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    group.bound_device_id = None  # otherwise torch 2.11 would keep a number on that device for each barrier
    return HostCollectives(group)


def _open(world: World, host: str, port: int) -> dist.TCPStore:
    """Open the store that rank 0 serves.

    In a thread that may be abandoned: a foreign server on that port that accepts but never answers would block torch
    forever, and the main thread must handle signals.
    """
    outcome: Future[dist.TCPStore] = Future()
    arrival, apart = _arrival(world), world.started_by.starts_apart
    until = time.monotonic() + arrival.total_seconds() - 0.5

    def attempt() -> None:
        try:
            _resolve(host, port, until if apart else 0.0)  # torch would retry for minutes, with a poor message
            served = dist.TCPStore(
                host,
                port,
                world.size,
                is_master=world.rank == 0,
                timeout=PATIENCE,
                wait_for_workers=False,
                master_listen_fd=address.listen(host, port, apart)[1] if world.rank == 0 else None,
                multi_tenant=True,  # so that init_process_group("env://") in a third-party model gets its own store
            )
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(served)

    Thread(target=attempt, daemon=True, name="rendezvous").start()
    if not wait([outcome], arrival.total_seconds()).done:
        rule = f"no rank 0 answers at {host}:{port} within {arrival.seconds} s"
        raise NotMet([Problem("MASTER_ADDR", host, rule, _REACHABLE)])
    try:
        return outcome.result()
    except socket.gaierror as error:
        rule = f"rank {world.rank} cannot resolve this name: {error.strerror}"
        raise NotMet([Problem("MASTER_ADDR", host, rule, _RESOLVABLE)]) from None
    except Exception as error:
        if world.rank:
            raise
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "the port is taken" if taken else str(error)  # without torch's details of sockets
        rule = f"rank 0 cannot listen on {host}:{port}: {reason}"
        raise NotMet([Problem("MASTER_PORT", port, rule, _OTHER_PORT)]) from None


def _resolve(host: str, port: int, until: float) -> None:
    """Raise socket.gaierror if a name still does not resolve at the time ``until``: its container may start later."""
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except socket.gaierror:
            if time.monotonic() > until:
                raise
        time.sleep(min(1.0, max(until - time.monotonic(), 0.1)))


def _await_all(store: dist.TCPStore, world: World, place: str, identity: str) -> None:
    """Wait until every rank has arrived, under the launch's name, as another launch may serve the same port."""
    arrived, complete = f"ptdbench {identity} arrived", f"ptdbench {identity} complete"
    count = store.add(arrived, 1)
    if count == world.size:
        store.set(complete, "")
    if count > world.size:
        rule = f"more than {world.size} ranks came to {place}: another launch uses it too"
        raise NotMet([Problem("MASTER_PORT", place.rpartition(":")[2], rule, _OTHER_PORT)])
    try:
        store.wait([complete], _arrival(world))
    except dist.DistNetworkError:
        rule = f"rank 0 left {place} before all ranks had arrived"
        raise NotMet([Problem(world.launcher, place, rule, "its own output says why")]) from None
    except dist.DistStoreError:
        rule = f"{store.add(arrived, 0)} of {world.size} ranks arrived within {_arrival(world).seconds} s"
        raise NotMet([Problem(world.launcher, place, rule, _REACHABLE)]) from None
