"""Ranks that take one job after the other: what starting them costs is paid once for the tests of a module."""

import gc
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from ptdbench.launch import local, rendezvous, settings
from ptdbench.launch.world import World, discover
from ptdbench.records import ownership, record
from ptdbench.run import door
from ptdbench.run.door import reopen
from ptdbench.setup import config
from ptdbench.setup.config import RANKS_WITHOUT_GPU
from tests.ports import free_port


def carry_out(composed: DictConfig, directory: Path) -> None:
    """Carry out a run as a command line does that asks for it alone: rank 0 opens it, and its record says the rest."""
    world = discover(os.environ)
    if world is None:
        if opened(composed, directory, None):
            door.run(directory)
    elif rendezvous.agree(f"{directory}", world, lambda: str(opened(composed, directory, world))) == str(True):
        door.run(directory)


def opened(composed: DictConfig, directory: Path, world: World | None) -> bool:
    """Open a run, and return whether it can be executed."""
    ownership.open_record(directory, record.begin(config.read(composed).resolved, directory, {}))
    return reopen(directory, world)


class Failed(Exception):
    """What a rank failed with."""


class SharedRanks:
    """Ranks by world size, started when they are first asked for.

    A job that fails takes its ranks with it, and the next one gets others.
    """

    def __init__(self) -> None:
        self._launches: dict[int, _Launch] = {}

    def call(self, size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``body(*arguments)`` returns in each of ``size`` ranks, by rank.

        Raises:
            Failed: With the traceback of the rank that failed first.
        """
        launch = self._launches.get(size) or self._launches.setdefault(size, _Launch(size))
        try:
            return launch.call(body, arguments)
        except BaseException:
            self._launches.pop(size).end()
            raise

    def run(self, composed: DictConfig, directory: Path) -> None:
        """Carry out a run, in the way of a sweep under torchrun; why it failed is in its record."""
        try:
            self.call(_world_size(composed), carry_out, composed, directory)
        except Failed:
            assert (directory / "record.json").exists()

    def end(self) -> None:
        while self._launches:
            self._launches.popitem()[1].end()


def _world_size(composed: DictConfig) -> int:
    asked = composed.cluster.ranks_per_node
    if asked != "auto":
        return int(asked)
    return 1 if composed.parallel.name == "single" else RANKS_WITHOUT_GPU


class _Launch:
    def __init__(self, size: int) -> None:
        local.warm_up()
        context = multiprocessing.get_context("forkserver")
        environ = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        }  # fmt: skip
        self._ours: list[Connection] = []
        self._ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._ours.append(ours)
            self._ranks.append(context.Process(target=_serve, args=(place, theirs), daemon=True))
            self._ranks[-1].start()
            theirs.close()  # so that the end of a rank is seen

    def call(self, body: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        for ours in self._ours:
            ours.send((dict(os.environ), sys.path, body, arguments))
        results: dict[Connection, Any] = {}
        while len(results) < len(self._ours):
            for ours in wait([ours for ours in self._ours if ours not in results]):
                results[ours] = _result(ours, self._ours.index(ours))
        return [results[ours] for ours in self._ours]

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join()
        for ours in self._ours:
            ours.close()


def _result(of_rank: Connection, rank: int) -> Any:
    try:
        done, value = of_rank.recv()
    except EOFError:
        raise Failed(f"rank {rank} has ended") from None
    if not done:
        raise Failed(f"rank {rank}: {value}")
    return torch.load(io.BytesIO(value), weights_only=False)


def _serve(place: Mapping[str, str], jobs: Connection) -> None:
    """In a rank: do jobs until one fails here or nobody has another."""
    local._die_with_server()
    multiprocessing.current_process()._config["daemon"] = False  # proofs of plans start processes
    everywhere = settings.own_cores()
    gc.unfreeze = lambda: None  # or each run would collect garbage from among all that is imported once more
    while True:
        try:
            present, sys.path[:], body, arguments = jobs.recv()
        except EOFError:
            return
        for name in os.environ.keys() - present.keys():
            del os.environ[name]
        os.environ.update({**present, **place})
        settings.bind_cores(
            max(1, len(everywhere) // int(place["WORLD_SIZE"])), everywhere
        )  # not as the last job left it
        value = io.BytesIO()
        try:
            torch.save(body(*arguments), value)
        except BaseException:
            jobs.send((False, traceback.format_exc()))
            return
        jobs.send((True, value.getvalue()))


#: For whole runs; they end after each module, see tests/conftest.py.
RANKS = SharedRanks()
