"""From the options of a cluster to the shape of a job and the flags of sbatch; the last word has a real SLURM."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ptdbench.launch import slurm as commands
from ptdbench.launch.slurm import Partition, SlurmError
from ptdbench.problems import as_typed
from ptdbench.setup.compose import compose_all
from ptdbench.setup.config import Slurm
from ptdbench.setup.runs import Shape
from ptdbench.sweep.resources import Step, check, flags, script, setup_lines, shape
from tests.conftest import read
from tests.daily import cases
from tests.programs import call, until
from tests.refusals import Abridged, refusal_of

#: The test cluster's partitions and two more kinds.
KNOWN = [
    Partition("debug", True, (2,)), Partition("short", False, (2,)), Partition("gpu", False, (8,)),
    Partition("mixed", False, (0, 4)), Partition("cpu", False, (0,)),
]  # fmt: skip

ONE_EACH = Shape(1, 2, 2, None)


@cache
def defaults() -> Slurm:
    found = read("cluster=slurm").cluster
    return found


def asked(**options: Any) -> Slurm:
    """The options of ``conf/cluster/slurm.yaml`` with some of them changed."""
    return replace(defaults(), **options)


def every(available: int) -> int:
    """What ddp, fsdp and pdp take."""
    return available


def one(available: int) -> int:
    """What parallel=single takes."""
    return 1


def shape_of(device: str = "auto", ranks: Callable[[int], int] = every, **options: Any) -> Shape:
    return shape(asked(**options), device, ranks, KNOWN)


def refused(device: str = "auto", known: list[Partition] = KNOWN, **options: Any) -> str:
    return refusal_of(shape, asked(**options), device, every, known)


def problems(known: list[Partition] = KNOWN, **options: Any) -> list[str]:
    """What is wrong with these options, at the shape that they come to."""
    cluster = asked(**options)
    return [str(problem) for problem in check(cluster, shape(cluster, "auto", every, known), known)]


class TestShape:
    @pytest.mark.parametrize(("options", "expected"), [
        ({}, (1, 2, 2)), ({"nodes": 2}, (2, 2, 2)), ({"nodes": "auto"}, (1, 2, 2)),
        ({"partition": "gpu"}, (1, 8, 8)), ({"partition": "gpu", "ranks_per_node": 3}, (1, 3, 3)),
        ({"partition": "gpu", "gpus_per_node": 4}, (1, 4, 4)),
        ({"partition": "gpu", "gpus_per_node": 4, "ranks_per_node": 2}, (1, 2, 4)),
        ({"partition": "mixed", "ranks_per_node": 2}, (1, 2, 2)),
        ({"partition": "debug,short"}, (1, 2, 2)), ({"partition": "cpu"}, (1, 2, 0)),
        ({"partition": ""}, (1, 2, 2)),
        ({"partition": "cpu", "ranks_per_node": 16, "cpus_per_rank": 4}, (1, 16, 0, 4)),
        ({"gpus_per_node": 0}, (1, 2, 0)), ({"gpus_per_node": 0, "ranks_per_node": 4}, (1, 4, 0)),
        ({"gres": "gpu:volta:2"}, (1, 2, 2)), ({"gres": "gpu:1", "partition": "gpu"}, (1, 1, 1)),
        ({"gres": "lscratch:100", "partition": "gpu"}, (1, 8, 8)),
        # On CPUs no GPU is asked for that nobody uses, but a partition may take no job that asks for none.
        *(({"device": "cpu"} | more, (1, 2, 0)) for more in ({}, {"gres": "gpu:volta:2"}, {"partition": "mixed"})),
        ({"device": "cpu", "gpus_per_node": 1, "ranks_per_node": 1}, (1, 1, 1)),
        # A strategy that takes fewer devices leaves the others to others, unless they are asked for.
        ({"ranks": one, "partition": "gpu"}, (1, 1, 1)),
        ({"ranks": one, "partition": "gpu", "gpus_per_node": 8}, (1, 1, 8)),
        ({"ranks": one, "gres": "gpu:volta:2"}, (1, 1, 2)),
    ])  # fmt: skip
    def test_auto_becomes_what_is_there(self, options, expected):
        assert shape_of(**options) == Shape(*expected, *[None] * (4 - len(expected)))

    @pytest.mark.parametrize(("options", "message"), [
        ({"partition": "mixed"}, "cluster.gpus_per_node=auto: nodes of mixed have 0 or 4 GPUs; try 4, 0"),
        ({"partition": "gpux"}, "cluster.partition=gpux: there is no such partition"),
        ({"known": KNOWN[1:3]}, "cluster.partition=null: this cluster has no default partition; try short, gpu"),
        ({"device": "cuda", "partition": "cpu"}, "device=cuda: the nodes that this job would get"),
        ({"device": "cuda", "gpus_per_node": 0}, "device=cuda: "),
    ])  # fmt: skip
    def test_gpus_that_cannot_be_counted_or_that_nobody_has(self, options, message):
        assert refused(**options).startswith(message)

    def test_where_slurm_cannot_be_asked_a_number_is_needed(self):
        assert "give the number, or 0 for none" in refused(known=[])
        assert "give the number, or 0 for none" in refused(known=[], ranks_per_node=2)
        for options in ({"gpus_per_node": 4}, {"gres": "gpu:4"}):
            assert shape(asked(**options), "auto", every, []) == Shape(1, 4, 4, None)
        assert shape(asked(), "cpu", every, []) == Shape(1, 2, 0, None)


class TestCheck:
    @pytest.mark.parametrize("options", [
        {},
        {"partition": "short,gpu", "nodes": 4, "time_minutes": 600, "gpus_per_node": 8},
        {"gpus_per_node": 2, "gres": "gpu:volta:2"},
        {"gpus_per_node": 0, "ranks_per_node": 4},
        {"mail_type": "END"},
        {"mem_gb": 0},
        {"mem_gb": None, "extra": {"mem-per-cpu": "2G"}},
        {"extra": {"reservation": "friday", "nice": 100, "contiguous": True, "hold": False}},
    ])  # fmt: skip
    def test_what_fits_is_not_refused(self, options):
        assert problems(**options) == []

    @pytest.mark.parametrize(("options", "problem"), [
        ({"partition": "gpus", "gpus_per_node": 0},
         "partition=gpus: there is no such partition; SLURM has debug, short, gpu, mixed, cpu; try gpu"),
        ({"ranks_per_node": 2, "gpus_per_node": 1}, "ranks_per_node=2: must not exceed the GPUs of a node …, 1: …; "
         "try auto, 1, or cluster.gpus_per_node=0 for ranks without GPUs"),
        ({"gpus_per_node": 1, "gres": "gpu:volta:2", "ranks_per_node": 1},
         "gpus_per_node=1: cluster.gres=gpu:volta:2 asks for 2 GPUs a node; try auto, 2"),
    ])  # fmt: skip
    def test_what_cannot_be_had_is_refused_once(self, options, problem):
        assert problems(**options) == [Abridged(f"cluster.{problem}")]

    @pytest.mark.parametrize(("flag", "value", "said"), [
        *((flag, value, f"would contradict what ptdbench passes to sbatch; use {own}") for flag, value, own in (
            ("ntasks-per-node", 1, "cluster.ranks_per_node"), ("mem", 1, "cluster.mem_gb"),
            ("array", 1, "-m and lists of values: "), ("job-name", "x", "workload.label"),
            ("signal", "USR1@9", "hydra.launcher.signal_delay_s"), ("requeue", "true", "cluster.requeue"),
            ("no-requeue", "true", "cluster.requeue"), ("clusters", "other", "SLURM_CLUSTERS"))),
        *(("comment", value, "must be text, a number, or true for a flag without a value")
          for value in (["n1", "n2"], {"a": 1})),
        *((flag, 1, "is no flag of sbatch: these have small letters, digits, - and _")
          for flag in ("a b", "É", "x=y", "")),
    ])  # fmt: skip
    def test_what_is_no_extra_flag(self, flag, value, said):
        (found,) = problems(extra={flag: value})
        assert found.startswith(f"cluster.extra.{flag}={as_typed(value)}: {said}")

    def test_all_that_is_wrong_is_said_at_once_and_contradictions_also_without_slurm(self):
        found = problems(partition="nowhere", gpus_per_node=7, gres="gpu:2", extra={"time": 1})
        options = {problem.partition("=")[0] for problem in found}
        assert options == {"cluster.partition", "cluster.gpus_per_node", "cluster.extra.time"}
        assert problems(known=[], partition="nowhere", gpus_per_node=8) == []
        assert len(problems(known=[], gpus_per_node=1, ranks_per_node=2)) == 1


class TestFlags:
    def test_what_is_not_asked_for_is_not_passed_and_memory_is_rounded_up(self):
        cluster = asked(gpus_per_node=0, partition="", account="", gres="", extra={"hold": False, "nice": None})
        wanted = {"job_name": "a run", "nodes": 2, "ntasks_per_node": 4, "time": 60}
        kept = {"no_requeue": True}  # else SLURM starts it anew when a node fails
        assert flags(cluster, Shape(2, 4, 0, None), "a run") == wanted | kept
        # Down would turn the least memory into all of it.
        assert flags(asked(mem_gb=0.0001), ONE_EACH, "x")["mem"] == "1M"
        assert flags(asked(mem_gb=0), ONE_EACH, "x")["mem"] == "0M"

    def test_every_option_has_its_flag(self):
        options = {
            "partition": "gpu", "account": "me", "qos": "high", "constraint": "a100&ib", "dependency": "afterok:1",
            "mail_user": "me@example.org", "mail_type": "END", "chdir": "/data",
        }  # fmt: skip
        more = {"exclusive": True, "requeue": True, "mem_gb": 1.5, "time_minutes": 90}
        cluster = asked(**options, **more, extra={"nice": 5, "mem-bind": "local"})
        assert flags(cluster, Shape(1, 2, 2, 3), "x") == {
            "job_name": "x", "nodes": 1, "ntasks_per_node": 2, "cpus_per_task": 3, "gpus_per_node": 2, "time": 90,
            "mem": "1536M", "exclusive": True, "requeue": True, "nice": 5, "mem_bind": "local", **options,
        }  # fmt: skip

    def test_typed_gpus_replace_the_number_and_are_left_alone_by_a_job_without_gpus(self):
        found = flags(asked(gres="gpu:volta:2,lscratch:9"), ONE_EACH, "x")
        assert (found["gres"], "gpus_per_node" in found) == ("gpu:volta:2,lscratch:9", False)
        found = flags(asked(gres="lscratch:9"), ONE_EACH, "x")
        assert (found["gres"], found["gpus_per_node"]) == ("lscratch:9", 2)
        without = Shape(1, 2, 0, None)
        assert "gres" not in flags(asked(gres="gpu:volta:2"), without, "x")
        assert flags(asked(gres="gpu:volta:2,lscratch:9"), without, "x")["gres"] == "lscratch:9"


class TestSetup:
    def shell(self, cluster: Slurm, home: Path, shape: Shape = ONE_EACH) -> subprocess.CompletedProcess[str]:
        """Run the lines in a shell that has no ``module`` yet, and then ``env``."""
        lines = [*setup_lines(cluster, shape), "echo reached", "env"]
        environ = {"PATH": "/usr/bin:/bin", "MODULESHOME": str(home)}
        return subprocess.run(
            ["bash", "-c", "\n".join(lines)], env=environ, check=False, capture_output=True, text=True
        )

    @pytest.fixture
    def modules(self, tmp_path: Path) -> Path:
        """A site's modules, of which only gcc/12 and "cuda 12" can be loaded; the init file ends with a failure."""
        init = tmp_path / "init" / "bash"
        init.parent.mkdir()
        init.write_text(
            'module() { shift; for name; do case $name in gcc/12|"cuda 12") echo "loaded $name";; *) return 1;; '
            "esac; done; }\nfalse\n"
        )
        return tmp_path

    def test_modules_are_loaded_in_a_shell_that_is_no_login_shell(self, modules):
        done = self.shell(asked(modules=["gcc/12", "cuda 12"], setup=["echo then me"]), modules)
        assert done.stdout.splitlines()[:4] == ["loaded gcc/12", "loaded cuda 12", "then me", "reached"]

    @pytest.mark.parametrize(("options", "home", "said"), [
        ({"modules": ["gcc/12", "nvhpc"], "setup": ["echo then me"]}, "", "loaded gcc/12\n"),
        ({"modules": ["gcc/12"]}, "nowhere", ""),
        ({"setup": ["source /nowhere/bin/activate"]}, "", ""),
    ])  # fmt: skip
    def test_what_does_not_load_or_fails_ends_the_job(self, modules, options, home, said):
        done = self.shell(asked(**options), modules / home)
        assert (done.returncode != 0, done.stdout) == (True, said)

    def test_cores_of_a_rank_reach_srun_and_its_threads_where_they_are_asked_for(self, tmp_path):
        told = self.shell(asked(), tmp_path, Shape(1, 2, 0, 3)).stdout.splitlines()
        assert {"SLURM_KILL_BAD_EXIT=1", "SRUN_CPUS_PER_TASK=3", "OMP_NUM_THREADS=3"} <= set(told)
        told = self.shell(asked(setup=["export OMP_NUM_THREADS=1"]), tmp_path, Shape(1, 2, 0, 3)).stdout.splitlines()
        assert "OMP_NUM_THREADS=1" in told
        told = self.shell(asked(), tmp_path).stdout
        assert ("SLURM_KILL_BAD_EXIT=1" in told, "SRUN_CPUS" in told, "OMP_NUM" in told) == (True, False, False)


def test_a_script_that_a_person_can_read():
    cluster = asked(partition="gpu", exclusive=True, srun_args=["--cpu-bind=cores"], setup=["ulimit -l unlimited"])
    command = ["python", "train.py", "model=gpt_small"]
    assert script(cluster, Shape(4, 8, 8, 12), "gpt_small ddp", [Step(command)], {"output": "logs/%j.log"}) == (
        "#!/bin/bash\n# 4 nodes x 8 ranks\n#SBATCH --job-name='gpt_small ddp'\n#SBATCH --partition=gpu\n"
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --cpus-per-task=12\n#SBATCH --gpus-per-node=8\n"
        "#SBATCH --time=60\n#SBATCH --exclusive\n#SBATCH --no-requeue\n#SBATCH --output=logs/%j.log\n\n"
        "set -e\nexport SLURM_KILL_BAD_EXIT=1\nexport SRUN_CPUS_PER_TASK=12\nexport OMP_NUM_THREADS=12\n"
        "ulimit -l unlimited\n\nsrun --kill-on-bad-exit=1 --cpu-bind=cores python train.py model=gpt_small\n"
    )


class TestRealSlurm:
    @pytest.fixture(autouse=True)
    def _there(self, slurm, monkeypatch, tmp_path):
        monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize(("options", "said"), [
        *((options, "") for options in (
            {"nodes": 2, "cpus_per_rank": 2}, {"nodes": 2, "ranks_per_node": 1}, {"gres": "gpu:2"},
            {"gpus_per_node": 0, "ranks_per_node": 4},
            {"partition": "short", "time_minutes": 5, "mem_gb": 1.5, "exclusive": True},
            {"partition": "debug,gpu", "mail_type": "END", "mem_gb": 0},
            {"extra": {"mem-per-cpu": "100M", "nice": 5, "contiguous": True}},
        )),
        *((options, said) for options, said in (
            ({"nodes": 3}, "Requested node configuration is not available"),
            ({"gpus_per_node": 4}, "Requested node configuration is not available"),
            ({"ranks_per_node": 4, "gpus_per_node": 0, "cpus_per_rank": 2},
             "Requested node configuration is not available"),
        )),
    ])  # fmt: skip
    def test_slurm_accepts_what_it_has_and_refuses_the_rest(self, options, said):
        cluster, known = asked(**options), commands.partitions()
        where = shape(cluster, "auto", every, known)
        text = script(cluster, where, "asked", [Step(["true"])], {"output": "log"})
        assert check(cluster, where, known) == []
        if said:
            with pytest.raises(SlurmError, match=said):
                commands.test(text)
        else:
            assert " to start at " in commands.test(text)

    @cases("several", [True, False], daily=[True], ids=lambda several: "two steps" if several else "one step")
    def test_a_rank_has_its_words_and_one_that_fails_ends_its_step_and_fails_the_job(self, slurm, tmp_path, several):
        words = ["model=gpt small", "x=[a,'b']", 'say="$HOME"', "#4", "a\\b", "*"]
        program = "import os, sys; print(os.environ['SLURM_PROCID'], os.environ['OMP_NUM_THREADS'], sys.argv[1:])"
        cluster = asked(nodes=2, cpus_per_rank=2, time_minutes=5, extra={"comment": """it's #1 "of" a \\ kind"""})
        where = shape(cluster, "auto", every, commands.partitions())
        fails = Step(["sh", "-c", "[ $SLURM_PROCID = 1 ] && exit 3; sleep 600"])
        steps = [fails, Step([sys.executable, "-c", program, *words])] if several else [fails]
        text = script(cluster, where, "two words", steps, {"output": f"{tmp_path}/a log %j"})
        job = call("sbatch", "--parsable", cwd=tmp_path, environ=slurm, told=text).stdout.strip()
        state = until(lambda: (found := commands.queue([job])[job]).is_over and found, 120)
        assert (state.state, state.reason) == ("FAILED", "NonZeroExitCode")
        said = [line for line in (tmp_path / f"a log {job}").read_text().splitlines() if str(words) in line]
        assert sorted(said) == [f"{rank} 2 {words}" for rank in range(4) if several]
        shown = call("scontrol", "show", "job", job, cwd=tmp_path, environ=slurm).stdout
        assert "JobName=two words" in shown
        assert """Comment=it's #1 "of" a \\ kind""" in shown


class TestSiteFiles:
    """The examples of conf/cluster: each is the file it inherits, with what the site states."""

    def site(self, name: str, known: Partition, *more: str) -> tuple[Slurm, Shape]:
        found = compose_all([f"cluster={name}", *more], multirun=False)
        assert found.is_sweep
        assert found.launcher == "submitit_slurm"
        cluster = found.configs[0].cluster
        assert isinstance(cluster, Slurm)
        assert cluster.name == name
        where = shape(cluster, "auto", every, [known])
        assert check(cluster, where, [known]) == []
        return cluster, where

    def test_sites_with_gpus_and_with_modules(self):
        _, where = self.site("site_gpu", Partition("gpu", True, (8,)), "cluster.nodes=4")
        assert where == Shape(4, 8, 8, 12)
        cluster, where = self.site("site_modules", Partition("volta", True, (2,)))
        found = flags(cluster, where, "x")
        assert (found["account"], found["gres"]) == ("my_project", "gpu:volta:2")
        assert "module load gcc/12.2 cuda/12.8" in setup_lines(cluster, where)

    def test_a_session_submits_nothing(self):
        found = compose_all(["cluster=site_interactive"], multirun=False)
        assert not found.is_sweep
        assert found.launcher == "basic"
        cluster = found.configs[0].cluster
        assert not isinstance(cluster, Slurm)
        assert (cluster.nodes, cluster.ranks_per_node) == ("auto", "auto")
