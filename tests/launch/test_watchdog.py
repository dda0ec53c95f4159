"""The watchdog: who is named, who is ended, and who is left in peace."""

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from ptdbench.files import write_json
from ptdbench.launch import local, rendezvous, watchdog
from ptdbench.launch.watchdog import JOINED, State, Watchdog, verdict
from ptdbench.launch.world import World, discover
from tests.ports import free_port
from tests.refusals import Abridged

#: Seconds; short, and yet enough for a thread's turn on a machine that is busy with other tests.
LIMIT = 2.5

#: What is too long for a step and not for what else takes its time.
LONG = 1.5 * LIMIT

SPIN = "spin (model.py:33)"
BUSY = State(step=12, patience=-0.1, place=SPIN)
WAITS = State(step=12, patience=-0.1, place="all_reduce", waits=True)
ELSEWHERE = replace(WAITS, place="broadcast")
LEFT = State(step=13, left=True)
AHEAD = replace(BUSY, begun=15, place="zeros_like (loss.py:7)")
BEHIND = replace(BUSY, begun=12)
ALONE = replace(WAITS, step=None, phase=JOINED, place="init_process_group")
LEAVES = replace(BUSY, phase=watchdog.LEFT)


#: How messages of most cases go on after the rank.
STUCK = "finished step 12 for 60 s:"
PEERS = "peers waiting in all_reduce"


@pytest.mark.parametrize(("heard", "rank", "message"), [
    ({0: WAITS, 1: None}, 1, f"rank 1 has not {STUCK} stopped, or unreachable ({PEERS})"),
    ({0: None, 1: WAITS, 2: None, 3: ELSEWHERE, 4: BUSY}, 0,
     f"ranks 0, 2 have not {STUCK} stopped, or unreachable ({PEERS}, broadcast)"),
    ({0: WAITS, 1: BUSY, 2: LEFT}, 1, f"rank 1 has not {STUCK} in {SPIN} ({PEERS})"),
    ({0: WAITS, 1: BUSY, 2: BUSY}, 1, f"ranks 1, 2 have not {STUCK} in {SPIN} ({PEERS})"),
    ({0: BUSY, 1: replace(BUSY, place="sleep (model.py:34)")}, 0,
     f"no rank has {STUCK} rank 0 in {SPIN}, rank 1 in sleep (model.py:34)"),
    ({0: BUSY}, 0, f"rank 0 has not {STUCK} in {SPIN}"),
    ({0: WAITS, 1: ELSEWHERE, 2: WAITS}, 0,
     f"no rank has {STUCK} ranks 0, 2 waiting in all_reduce, rank 1 waiting in broadcast"),
    ({0: replace(WAITS, step=None), 1: replace(WAITS, step=1)}, 0,
     "no rank has finished the first step for 60 s: all waiting in all_reduce"),
    ({0: AHEAD, 1: BEHIND, 2: replace(AHEAD, begun=14)}, 1,
     f"rank 1 has not {STUCK} in {SPIN} (peers in step 15)"),
    ({0: AHEAD, 1: BEHIND, 2: replace(WAITS, begun=15, place="synchronize")}, 1,
     f"rank 1 has not {STUCK} in {SPIN} (peers waiting in synchronize)"),
    ({0: replace(AHEAD, step=13), 1: replace(AHEAD, step=13), 2: AHEAD}, 2,
     f"rank 2 has not {STUCK} in zeros_like (loss.py:7) (peers in step 15)"),
    ({0: ALONE, 1: None, 2: ALONE}, 1,
     "rank 1 has not joined the others for 60 s: never came, stopped, … (peers waiting in init_process_group)"),
    ({0: ALONE, 1: ALONE}, 0, "no rank has joined the others for 60 s: all waiting in init_process_group"),
    ({0: LEFT, 1: LEAVES}, 1, f"rank 1 has not left the process group for 60 s: in {SPIN}"),
    (dict.fromkeys(range(100)) | {100: WAITS}, 0,
     f"ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more have not {STUCK} stopped, … ({PEERS})"),
])  # fmt: skip
def test_verdict_names_the_rank_to_blame(heard, rank, message):
    assert verdict(heard, 60.0) == (rank, Abridged(f"{message}; stacks in failures/"))


def work(environ: dict[str, str], folder: Path, how: str, culprit: int, server: tuple[str, int] | None) -> None:
    """In a rank: step under a watchdog until ``culprit`` does in step 3 what ``how`` says."""
    world = discover(os.environ)
    world = dataclasses.replace(world, launcher="srun" if server else "local")
    rank = world.rank
    (folder / f"{rank}.pid").write_text(str(os.getpid()))

    def report(blamed: int, message: str, stacks: str) -> None:
        write_json(folder / f"{rank}.json", [blamed, message, stacks])  # whole, as another rank may end this one

    if how in ("absent", "ahead", "remain"):
        without_collectives(world, folder, how, culprit, report)
        return
    with rendezvous.process_group(world, "gloo", torch.device("cpu"), key=str(folder)) as store:
        # Under srun rank 0 serves the store.
        shared = dist.TCPStore(*server, world.size, is_master=rank == 0) if server else store
        with Watchdog(world, shared, folder, LIMIT, report) as watchdog:
            for step in range(1000):
                if step == 3 and rank == culprit:
                    (folder / "begun").touch()
                    misbehave(how)
                dist.recv(torch.ones(1)) if step == 3 and how == "recv" else dist.all_reduce(torch.ones(1))
                watchdog.beat(step + 1)


def without_collectives(
    world: World, folder: Path, how: str, culprit: int, report: Callable[[int, str, str], None]
) -> None:
    """Under a watchdog from beginning to end; ``culprit`` is absent, its device gets stuck, or it does not leave."""
    is_culprit = world.rank == culprit
    if is_culprit:
        (folder / "begun").touch()
    if how == "absent":
        watchdog.JOIN_OR_LEAVE_SECONDS = 4 * LIMIT  # the others need not come at the same time
        time.sleep(120 if is_culprit else 0)
    if is_culprit and how == "remain":
        dist.destroy_process_group = lambda: time.sleep(60)
    store, device = rendezvous.run_store(str(folder)), torch.device("cpu")
    with (
        Watchdog(world, store, folder, LIMIT, report) as dog,
        rendezvous.process_group(world, "gloo", device, str(folder), dog.limited),
        dog.following(lambda: 3 if is_culprit else 5),
    ):
        dist.barrier()
        watchdog.JOIN_OR_LEAVE_SECONDS = LIMIT
        for step in range(2000 if how == "ahead" else 1):  # hosts get on, and devices do not
            dog.beat(step + 1)
            time.sleep(0.02)


def misbehave(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how == "spin":
        pass


def ended(folder: Path, how: str, culprit: int, server: tuple[str, int] | None = None) -> dict[int, list]:
    """Let three ranks work until the watchdog ends them; what those report that do. None of them lives on."""
    with pytest.raises(local.RankDied) as caught:
        local.start(work, 3, folder, how, culprit, server)
    assert set(caught.value.exit_codes.values()) - {0} == {1}
    assert time.time() - (folder / "begun").stat().st_mtime < (60 if how == "absent" else LIMIT + 10)
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)
    reports = {rank: json.loads(path.read_text()) for rank in range(3) if (path := folder / f"{rank}.json").exists()}
    assert reports
    return reports


def stacks(folder: Path) -> dict[int, str]:
    files = sorted(folder.glob("stacks-rank-*.txt"))
    return {int(path.stem.rpartition("-")[2]): path.read_text() for path in files}


@pytest.mark.ranks
class TestStuck:
    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch):
        monkeypatch.setattr(local, "END_SECONDS", 1.0)  # that a stopped rank is given before it is killed

    def test_stopped_rank_is_named_and_killed(self, tmp_path):
        reports = ended(tmp_path, "stop", 0)
        assert list(stacks(tmp_path)) == [1, 2]
        assert all("all_reduce" in text for text in stacks(tmp_path).values())
        assert 0 not in reports
        for blamed, message, text in reports.values():
            assert blamed == 0
            assert message == Abridged(f"rank 0 has not finished step 3 for {LIMIT} s: … (peers waiting in …)…")
            assert "all_reduce" in text  # a witness's

    def test_spinning_rank_is_named_with_its_stacks(self, tmp_path):
        reports = ended(tmp_path, "spin", 1)
        assert list(stacks(tmp_path)) == [0, 1, 2]
        for blamed, message, text in reports.values():
            assert blamed == 1
            assert message.startswith(f"rank 1 has not finished step 3 for {LIMIT} s: in misbehave (test_watchdog.py")
            assert "peers waiting in all_reduce" in message
            assert "in misbehave" in text

    @pytest.mark.thorough
    @pytest.mark.parametrize(("how", "culprit", "begin"), [
        ("recv", 0, f"no rank has finished step 3 for {LIMIT} s: all waiting in recv; stacks in failures/"),
        ("absent", 1, "rank 1 has not joined the others for 10 s: never came, stopped, or unreachable"),
        ("remain", 2, "rank 2 has not left the process group for 2.5 s: in <lambda> (test_watchdog.py:"),
        # Hosts run ahead of their devices, of which one is behind.
        ("ahead", 1, f"rank 1 has not finished step 3 for {LIMIT} s: in without_collectives (test_"),
    ])  # fmt: skip
    def test_peers_report_who_holds_them_up(self, tmp_path, how, culprit, begin):
        reports = ended(tmp_path, how, culprit)
        assert list(reports) == [2] if how == "remain" else reports
        for blamed, message, _ in reports.values():
            assert blamed == culprit
            assert message.startswith(begin)

    @pytest.mark.thorough
    def test_stopped_rank_0_that_serves_the_store_is_named(self, tmp_path):
        for rank, (blamed, message, _) in ended(tmp_path, "stop", 0, ("localhost", free_port())).items():
            assert blamed == 0
            told = f"rank 0 does not answer: … (rank {rank} has not finished step 3 for {LIMIT} s: … all_reduce)…"
            assert message == Abridged(told)


def take_time(environ: dict[str, str], folder: Path) -> None:
    """In a rank: a first step, a pause and a suspension of all ranks longer than the limit; then no thread is left."""
    world = discover(os.environ)

    def report(*_: object) -> None:
        (folder / "alarm").touch()

    with rendezvous.process_group(world, "gloo", torch.device("cpu"), key=str(folder)) as store:
        with Watchdog(world, store, folder, LIMIT, report) as watchdog:
            time.sleep(LONG)
            for step in range(20):
                dist.all_reduce(torch.ones(1))
                watchdog.beat(step + 1)
                if step == 5 and world.rank == 0:
                    with watchdog.paused():
                        time.sleep(LONG)
                if step == 10:
                    suspend(world.rank)
                    time.sleep(LIMIT / 2)  # so that the threads get their turn before the step is over
            dist.barrier()
        names = [thread.name for thread in threading.enumerate()]
        assert not any(name.startswith("watchdog") for name in names), names
    (folder / f"{world.rank}.done").touch()


def suspend(rank: int) -> None:
    """Stop both ranks for a while, and let them go on together."""
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    time.sleep(LIMIT / 4)  # the threads see the step before this one, so that the suspension falls into one step
    if rank == 0:
        both = f"{pids[0]} {pids[1]}"
        subprocess.Popen(["sh", "-c", f"kill -STOP {both}; sleep {LONG}; kill -CONT {both}"]).wait()


@pytest.mark.ranks
def test_slow_run_is_left_alone(tmp_path):
    local.start(take_time, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.done", "1.done"]
