"""The same command under every launcher: whole commands, as they are typed, with real launchers.

Most of a test's time is Python and torch starting once for each rank, so that each of these runs is worth its seconds.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ptdbench.launch import settings
from tests.conftest import outputs, record_of
from tests.daily import cases
from tests.launch.faulty import FAULTY
from tests.ports import free_port
from tests.programs import TORCHRUN, TRAIN, call

pytestmark = pytest.mark.ranks

AGENT = (sys.executable, "-m", "torch.distributed.run")
HELLO = ("workload=hello",)  # with any device, on which the ranks have to agree
TOY = ("model=toy", "train.steps=4", "device=cpu")

Done = subprocess.CompletedProcess[str]


def alone(command: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> Done:
    return call(*command, cwd=cwd, environ=environ)


def the_record(cwd: Path) -> dict[str, Any]:
    (directory,) = outputs(cwd)
    (path,) = directory.rglob("record.json")
    return record_of(path.parent)


def said_hello(done: Done, cwd: Path, ranks: int, launcher: str) -> list[dict[str, Any]]:
    """The ranks, after a look at what every launcher has to bring about: one table, with every rank once."""
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.count("rank  local  of  node") == 1
    assert f"{ranks} rank" in done.stdout
    assert f"started by {launcher}, over gloo at " in done.stdout
    record = the_record(cwd)
    assert (record["status"], record["world_size"], record["launcher"]) == ("ok", ranks, launcher)
    assert [rank["rank"] for rank in record["hello"]["ranks"]] == list(range(ranks))
    return record["hello"]["ranks"]


def places(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [(rank["node"], rank["local_rank"], rank["local_size"]) for rank in ranks]


class TestHello:
    """Where ranks of srun, mpirun and torchrun find themselves is tested in tests/launch/test_rendezvous.py too."""

    def test_plain_python_starts_local_ranks(self, tmp_path, environ):
        """Whatever the shell says of an earlier session and of threads: the config is what the record shows."""
        stale = {"RANK": "3", "LOCAL_RANK": "1", "MASTER_PORT": "29500", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}
        shell = {**environ, **stale, "OMP_NUM_THREADS": "7"}
        ranks = said_hello(alone([*TRAIN, *HELLO, "cluster.cpus_per_rank=1"], tmp_path, shell), tmp_path, 2, "local")
        assert places(ranks) == [(socket.gethostname(), 0, 2), (socket.gethostname(), 1, 2)]
        assert_bound(ranks)

    @pytest.mark.thorough
    def test_torchrun_in_an_srun(self, tmp_path, slurm):
        rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint=n1:{free_port()}"]
        launcher = [*AGENT, "--nnodes=2", "--nproc_per_node=2", *rendezvous]
        done = alone(["srun", "-N2", "--ntasks-per-node=1", *launcher, TRAIN[1], *HELLO], tmp_path, slurm)
        ranks = said_hello(done, tmp_path, 4, "torchrun")
        assert sorted(places(ranks)) == [("n1", 0, 2), ("n1", 1, 2), ("n2", 0, 2), ("n2", 1, 2)]

    def test_variables_of_any_launcher(self, tmp_path, environ):
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [{**environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
        with ThreadPoolExecutor(2) as ranks:
            first, second = ranks.map(lambda environ: alone([*TRAIN, *HELLO, "cluster=env"], tmp_path, environ), places)
        assert (second.returncode, second.stdout) == (0, ""), second.stderr
        ranks = said_hello(first, tmp_path, 2, "env")
        assert [(rank["local_rank"], rank["local_size"]) for rank in ranks] == [(0, 2), (1, 2)]

    def test_slurm_job_binds_ranks_to_cores(self, tmp_path, slurm):
        asked = ["cluster=slurm", "cluster.cpus_per_rank=1"]
        ranks = said_hello(alone([*TRAIN, *HELLO, *asked], tmp_path, slurm), tmp_path, 2, "srun")
        node = ranks[0]["node"]
        assert node in ("n1", "n2")
        assert places(ranks) == [(node, 0, 2), (node, 1, 2)]
        assert_bound(ranks)


def assert_bound(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Each of the ranks of a node has one core of its own, where there are as many, and one thread."""
    assert [(rank["threads"], rank["settings"]["OMP_NUM_THREADS"]) for rank in ranks] == [(1, "1")] * len(ranks)
    if len(settings.own_cores()) >= len(ranks):
        assert [rank["cores"] for rank in ranks] == [[core] for core in sorted(settings.own_cores())[: len(ranks)]]


class TestTraining:
    def trained(self, done: Done, cwd: Path) -> dict[str, Any]:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("step ms") == 1  # one table
        record = the_record(cwd)
        assert (record["status"], len(record["losses"])) == ("ok", 4)
        assert len(record["rank_step_seconds"]) == record["world_size"] == 2
        assert set(record["metrics"]["startup_seconds"]) == {"import", "config", "rendezvous", "build", "first_step"}
        return record

    def test_mpirun(self, tmp_path, mpirun, environ):
        command = [*mpirun, "-np", "2", *TRAIN, *TOY, "parallel=ddp", "cluster.ranks_per_node=2"]
        record = self.trained(alone(command, tmp_path, environ), tmp_path)
        assert (record["parallel"], record["launcher"]) == ("ddp", "openmpi")

    def test_two_agents_of_torchrun(self, tmp_path, environ):
        """Each is a node, with a rank on it."""
        meeting = ("--master_addr=localhost", f"--master_port={free_port()}")
        agent = [*AGENT, "--nnodes=2", "--nproc_per_node=1", *meeting]
        commands = [[*agent, f"--node_rank={node}", TRAIN[1], *TOY, "parallel=pdp"] for node in (0, 1)]
        with ThreadPoolExecutor(2) as nodes:
            first, second = nodes.map(lambda command: alone(command, tmp_path, environ), commands)
        assert (second.returncode, "step ms" in second.stdout) == (0, False), second.stderr
        record = self.trained(first, tmp_path)
        assert (record["parallel"], record["launcher"]) == ("pdp", "torchrun")
        assert None not in record["losses"]  # the last stage's, on the other node


def test_failing_srun_rank_ends_all_with_its_traceback(tmp_path, slurm):
    words = (*FAULTY, "train.steps=5", "device=cpu", "+model.how=raise", "+model.rank=1")
    done = alone(["srun", "-N2", "--ntasks-per-node=1", *TRAIN, *words], tmp_path, slurm)
    assert done.returncode != 0
    record = the_record(tmp_path)
    error = record["error"]
    assert (record["status"], error["rank"], error["type"]) == ("failed", 1, "RuntimeError")
    assert error["message"] == "this one is on purpose"
    assert "faulty.py" in error["traceback"]
    shown = " ".join(done.stdout.split())  # the line is as wide as the terminal, or wrapped
    assert "ddp: failed on rank 1: RuntimeError: this one is on purpose at faulty.py:" in shown


class TestSignals:
    """Whom a signal reached first is to blame, unless it reached all; whatever the launcher sends because of it."""

    ALONE = (*FAULTY, "device=cpu", "train.steps=1000", "+model.rank=1", "hydra.run.dir=run")

    @pytest.mark.thorough
    @pytest.mark.parametrize("how", ["kill", "term"])
    def test_srun_signal_to_the_last_rank_is_blamed(self, tmp_path, slurm, how):
        srun = ["srun", "-N2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
        self.blamed(alone([*srun, *TRAIN, *self.ALONE, f"+model.how={how}"], tmp_path, slurm), tmp_path, how)

    @pytest.mark.thorough
    @pytest.mark.parametrize("how", ["kill", "term"])
    def test_mpirun_signal_to_the_last_rank_is_blamed(self, tmp_path, mpirun, environ, how):
        command = [*mpirun, "-np", "2", *TRAIN, *self.ALONE, f"+model.how={how}"]
        self.blamed(alone(command, tmp_path, environ), tmp_path, how)

    @cases("how", ["kill", "term"], daily=["term"])
    def test_torchrun_signal_to_the_last_rank_is_blamed(self, tmp_path, environ, how):
        self.blamed(alone([*TORCHRUN, *self.ALONE, f"+model.how={how}"], tmp_path, environ), tmp_path, how)

    def blamed(self, done: Done, cwd: Path, how: str) -> None:
        assert done.returncode != 0
        record = json.loads((cwd / "run" / "record.json").read_text())
        error = record["error"]
        if how == "term":
            assert (record["status"], error["type"]) == ("preempted", "Stopped"), error
            assert error["message"].startswith("stopped by SIGTERM after step ")
            return
        assert (record["status"], error["rank"]) == ("failed", 1), error
        assert error["message"].startswith("rank 1 left no report; rank 0 then saw: ")


RAY = """
import ray, ray.train
from ray.train.torch import TorchTrainer

def work():
    import ptdbench, torch
    torch.distributed.destroy_process_group()  # Ray's, at the address that is ours now
    run = ptdbench.train(["cluster=env", "model=toy", "train.steps=4", "device=cpu", "hydra.run.dir=FOLDER/run"])
    assert run["status"] == "ok"

ray.init(num_cpus=3, include_dashboard=False)
scale, place = ray.train.ScalingConfig(num_workers=2), ray.train.RunConfig(storage_path="FOLDER/ray")
TorchTrainer(work, scaling_config=scale, run_config=place).fit()
"""


@pytest.mark.thorough
def test_workers_of_ray_train(tmp_path, environ):
    pytest.importorskip("ray.train", reason="needs Ray: make test-all installs it", exc_type=ImportError)
    (tmp_path / "program.py").write_text(RAY.replace("FOLDER", str(tmp_path)))
    of_ray = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
    done = call(sys.executable, "program.py", cwd=tmp_path, environ={**environ, **of_ray}, timeout=500)
    assert done.returncode == 0, done.stderr
    record = record_of(tmp_path / "run")
    assert (record["status"], record["launcher"], record["world_size"]) == ("ok", "env", 2)


@pytest.mark.thorough
def test_other_world_than_configured_is_refused(tmp_path, mpirun, environ):
    """Said by rank 0, although mpirun ends it as soon as another rank has failed, and it is the last to start."""
    late = ["sh", "-c", '[ "$OMPI_COMM_WORLD_RANK" = 1 ] || sleep 6; exec "$@"', "sh"]
    asked = ["cluster.nodes=2", "cluster.ranks_per_node=4"]
    done = alone([*mpirun, "-np", "2", *late, *TRAIN, *TOY, *asked], tmp_path, environ)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert [line for line in done.stderr.splitlines() if line.startswith("cluster.")] == [
        "cluster.ranks_per_node=4: openmpi started 2 ranks on this node; try auto, 2",
        "cluster.nodes=2: openmpi started ranks on 1 node; try auto, 1",
    ]
