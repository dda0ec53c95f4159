"""Ranks that meet, and ranks that do not, as processes of their own."""

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ptdbench.launch import rendezvous
from ptdbench.launch.world import World, discover
from ptdbench.problems import ConfigError, Problem
from ptdbench.virtual.absent import Answers, Present
from tests.conftest import ROOT
from tests.ports import free_port
from tests.programs import call
from tests.refusals import Abridged, refusal_of

#: A rank: it meets the others, agrees with them, and tells what it knows then.
RANK = """
import json, os, sys
import torch, torch.distributed as dist
from ptdbench.launch import rendezvous
from ptdbench.launch.world import discover

world = discover(os.environ)
said = rendezvous.agree("word", world, lambda: f"from {world.rank}")
assert discover(os.environ) == world
with rendezvous.process_group(world, "gloo", torch.device("cpu"), key="run"):
    total = torch.tensor([world.rank + 1])
    dist.all_reduce(total)
if "env://" in sys.argv:  # as a stranger's code would
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
told = {"said": said, "total": int(total)} | {name: os.environ[name] for name in names}
os.write(1, (json.dumps(told) + "\\n").encode())  # in one piece: ranks share the terminal
"""


def srun(job: str, rank: int) -> dict[str, str]:
    """The environment of one of two tasks on two nodes, of which the first is this machine."""
    return {
        "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": str(rank),
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost,elsewhere",
    }  # fmt: skip


def told(environ: Mapping[str, str], *arguments: str, prefix: Sequence[str] = ()) -> list[dict[str, str]]:
    """What the ranks of a process say that takes part, by rank."""
    command = (*prefix, sys.executable, "-c", RANK, *arguments)
    done = call(*command, cwd=ROOT, environ=environ, timeout=120)  # longer than any of these waits for a peer
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: int(line["RANK"]))


def check_places(ranks: list[dict[str, str]], sizes: tuple[int, ...], host: str) -> None:
    """Ranks of nodes of these sizes have met on the host, and each knows its place."""
    count = sum(sizes)
    common = {"said": "from 0", "total": count * (count + 1) // 2, "WORLD_SIZE": str(count)}
    common |= {"MASTER_ADDR": host, "MASTER_PORT": ranks[0]["MASTER_PORT"]}
    places = [{"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)} for size in sizes for local in range(size)]
    assert ranks == [common | place | {"RANK": str(rank)} for rank, place in enumerate(places)]


@pytest.fixture
def job() -> str:
    return str(uuid.uuid4().int)


@pytest.mark.ranks
def test_srun_tasks_meet(environ, job):
    stale = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "5"}
    with ThreadPoolExecutor(2) as tasks:
        first, second = tasks.map(lambda rank: told(environ | srun(job, rank) | stale, "env://"), (0, 1))
    check_places(first + second, (1, 1), "localhost")


@pytest.mark.thorough
def test_srun_ranks_of_two_nodes_meet_on_the_first(slurm):
    check_places(told(slurm, prefix=["srun", "-N2", "-n3", "--ntasks-per-node=2"]), (2, 1), "n1")


@pytest.mark.thorough
def test_mpirun_ranks_meet_on_the_allocations_first_node(slurm, mpirun):
    check_places(told(slurm, prefix=["salloc", "-N2", "--ntasks-per-node=2", *mpirun]), (2, 2), "n1")


class TestNotMet:
    """What ranks hear that do not find each other, in threads of this process."""

    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch):
        monkeypatch.setattr(rendezvous, "ARRIVAL", timedelta(seconds=1))

    @pytest.fixture
    def taken(self) -> Iterator[str]:
        """A port on which somebody listens, accepts and says nothing."""
        with socket.create_server(("", 0)) as listener:
            yield str(listener.getsockname()[1])

    def refused(self, *environs: dict[str, str]) -> list[str]:
        """What those ranks hear that are refused; none leaves before the others."""
        with ThreadPoolExecutor() as threads:
            outcomes = [threads.submit(rendezvous.meet, environ) for environ in environs]
            errors = [outcome.exception() for outcome in outcomes]
        assert all(error is None or isinstance(error, rendezvous.NotMet) for error in errors), errors
        return [str(error) for error in errors if error]

    def test_taken_port_unknown_host_and_silent_server_are_refused(self, job, taken):
        told = f"MASTER_PORT={taken}: rank 0 cannot listen on localhost:{taken}: the port is taken; set …"
        assert self.refused(srun(job, 0) | {"MASTER_PORT": taken}) == [Abridged(told)]
        told = "MASTER_ADDR=nowhere.invalid: rank 1 cannot resolve this name: …; set MASTER_ADDR to a name or …"
        assert self.refused(srun(job, 1) | {"MASTER_ADDR": "nowhere.invalid"}) == [Abridged(told)]
        told = f"MASTER_ADDR=localhost: no rank 0 answers at localhost:{taken} within 1 s; set MASTER_ADDR to …"
        assert self.refused(srun(job, 1) | {"MASTER_PORT": taken}) == [Abridged(told)]

    def test_ranks_of_two_launches_and_surplus_ones_are_refused(self, job):
        here = {"MASTER_PORT": str(free_port())}
        told = Abridged(f"srun=localhost:{here['MASTER_PORT']}: 1 of 2 ranks arrived within 1 s; …")
        assert self.refused(srun(job, 0) | here, srun(f"{job}1", 1) | here) == [told] * 2
        here = {"MASTER_PORT": (port := str(free_port()))}
        told = f"MASTER_PORT={port}: more than 2 ranks came to localhost:{port}: another launch uses it …"
        assert self.refused(*(srun(job, rank) | here for rank in (0, 1, 1))) == [Abridged(told)]


def test_launch_name_is_shared_and_changes_with_a_requeue(job, monkeypatch):
    names = []
    for rank, requeued in ((0, {}), (1, {}), (0, {"SLURM_RESTART_COUNT": "1"})):
        for name, value in (srun(job, rank) | requeued).items():
            monkeypatch.setenv(name, value)
        rendezvous.launch_name.cache_clear()
        names.append(rendezvous.launch_name(discover(os.environ)))
    rendezvous.launch_name.cache_clear()
    assert names == [f"slurm-{job}.0-0", f"slurm-{job}.0-0", f"slurm-{job}.0-1"]


def test_restarted_ranks_see_no_keys_of_the_earlier_start(monkeypatch):
    shared = dist.HashStore()  # as torchrun's, which outlives them
    monkeypatch.setattr(rendezvous.dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 1)]))
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    first, second = (rendezvous.meet(torchrun | {"TORCHELASTIC_RESTART_COUNT": count}) for count in "01")
    first.set("launch", "one")
    assert (first.check(["launch"]), second.check(["launch"])) == (True, False)


@pytest.mark.parametrize("who", [0, 1, 2, None], ids=["rank 0", "rank 1", "rank 2", "what rank 0 looks for"])
def test_refused_rank_ends_all_and_rank_0_says_why(monkeypatch, who):
    shared = dist.HashStore()
    monkeypatch.setattr(rendezvous, "store", lambda: shared)
    refused = ConfigError([Problem("device", "cuda", "is half full")])

    def find():
        if who is None:
            raise refused
        return pytest.fail("nothing is to be made")

    def agree(rank):
        own = refused if rank == who else None
        return refusal_of(rendezvous.agree, "word", World(rank, 3, rank, 3, "srun"), find, own)

    with ThreadPoolExecutor(3) as ranks:
        told = list(ranks.map(agree, range(3)))
    assert told[0] == (f"rank={who}: " if who else "") + "device=cuda: is half full"
    assert told[1:] == [
        str(refused) if rank == who else f"rank={rank}: another rank is refused, and says why" for rank in (1, 2)
    ]


def test_failed_rank_0_ends_all(monkeypatch):
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=20))
    monkeypatch.setattr(rendezvous, "store", lambda: shared)
    find = Mock(side_effect=OSError(28, "No space left on device"))
    with ThreadPoolExecutor(2) as ranks:
        both = [ranks.submit(rendezvous.agree, "word", World(rank, 2, rank, 2, "srun"), find) for rank in (0, 1)]
    assert [type(one.exception()) for one in both] == [OSError, ConfigError]


def test_exported_variables_describe_the_same_world(job):
    environ = {"RANK": "1", "MASTER_ADDR": "n1"}
    rendezvous.export(World(0, 2, 0, 1, "torchrun"), environ)
    assert environ == {"RANK": "1", "MASTER_ADDR": "n1"}
    environ = srun(job, 1)
    world = discover(environ)
    rendezvous.export(world, environ)
    before = dict(environ)
    rendezvous.export(discover(environ), environ)
    assert environ == before
    assert discover(environ) == world


@pytest.mark.parametrize(("minutes", "waits"), [(None, 24 * 60), (10, 60), (60, 210)])
def test_timeout_of_collectives_exceeds_the_watchdogs(minutes, waits):
    assert rendezvous.patience_for(minutes).total_seconds() == 60 * waits


@pytest.mark.parametrize(("named", "devices"), [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_gloo_has_one_thread_and_the_named_interfaces(monkeypatch, named, devices):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    monkeypatch.setattr(rendezvous, "run_store", lambda key: dist.HashStore())
    alone, patience = World(0, 1, 0, 1, "local"), timedelta(seconds=33)
    with rendezvous.process_group(alone, "gloo", torch.device("cpu"), "key", patience=patience):
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        assert (options._threads, options._timeout, len(options._devices)) == (1, patience, devices)


@pytest.mark.parametrize(("backend", "bound"), [("gloo", None), ("nccl", "cuda:1"), ("cpu:gloo,cuda:nccl", "cuda:1")])
def test_only_nccl_groups_are_bound_to_a_device(monkeypatch, backend, bound):
    """Groups of gloo that are bound to a GPU cannot be split, and torch 2.11 tries to."""
    options = {}
    monkeypatch.setattr(rendezvous, "run_store", lambda key: None)
    monkeypatch.setattr(rendezvous.dist, "init_process_group", lambda *_, **given: options.update(given))
    monkeypatch.setattr(rendezvous.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(rendezvous.dist, "new_group", lambda **_: rendezvous.dist.ProcessGroup(1, 2))
    with rendezvous.process_group(World(1, 2, 1, 2, "local"), backend, torch.device("cuda", 1), "key"):
        pass
    assert options["device_id"] == (bound and torch.device(bound))


def in_each(present, size, ask):
    """What ``ask(collectives, rank)`` returns on each of the ranks that are there."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(present)) as threads:
        return list(
            threads.map(lambda rank: ask(rendezvous.PresentCollectives(present, rank, size, store), rank), present)
        )


def test_present_ranks_answer_for_absent_ones():
    assert (
        in_each([1, 4], 6, lambda collectives, rank: collectives.gather(f"r{rank}"))
        == [["r1", "r1", "r1", "r1", "r4", "r4"]] * 2
    )

    def ask(collectives, rank):
        numbers = torch.tensor([float(rank), -1.0])
        collectives.barrier()
        return [collectives.reduce(numbers, how).tolist() for how in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)]

    assert in_each([0, 131, 255], 256, ask) == [[[386.0, -3.0], [255.0, -1.0]]] * 3


def test_the_nearest_rank_that_sends_as_far_answers_for_an_absent_stage():
    store, stages = dist.HashStore(), [4, 5, 6, 7]
    first, last = (Present([4, 7], rank, store) for rank in (4, 7))
    for shape in ("hidden", "logits"):
        first.send(shape, 1, stages)
    last.send("gradient", -1, stages)
    assert [last.receive(1, stages) for _ in range(2)] == ["hidden", "logits"]
    assert first.receive(-1, stages) == "gradient"
    with pytest.raises(RuntimeError, match="run the first and last stage, --ranks 4,7"):
        Present([4], 4, store).receive(-1, stages)


def test_store_answers_for_absent_ranks():
    store = Answers(8)
    assert store.add("arrived", 1) == 8
    assert store.get("name of a communicator") == bytes(128)
    assert not store.check(["a rank has failed"])
    store.set("mine", "1")
    assert (store.get("mine"), store.check(["mine"])) == (b"1", True)


def test_name_of_a_container_that_starts_later_is_awaited(monkeypatch):
    outcomes = iter([socket.gaierror(-2, "unknown"), None])

    def resolve(*_: object) -> None:
        if error := next(outcomes):
            raise error

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    rendezvous._resolve("later", 1, until=time.monotonic() + 0.2)
    outcomes = iter([socket.gaierror(-2, "unknown")])
    with pytest.raises(socket.gaierror, match="unknown"):
        rendezvous._resolve("never", 1, until=0.0)
