"""Runs that were interrupted go on as if nothing had happened; sweeps do what is missing."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from omegaconf import OmegaConf

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Manifest
from ptdbench.launch.world import World
from ptdbench.problems import ConfigError
from ptdbench.records import ledger, record, store
from ptdbench.setup import config, resume
from tests import forked
from tests.conftest import composed, record_of, run_on_shared_ranks
from tests.daily import cases
from tests.launch.patient import patient
from tests.programs import until

pytestmark = pytest.mark.ranks

TOY = ("model=toy", "train.global_batch=12", "device=cpu")
GPT = (
    "model=gpt_tiny", "model.layers=3", "model.width=32", "model.sequence_length=32", "train.global_batch=12",
    "device=cpu",
)  # fmt: skip


Layout = tuple[str, int]


def on(layout: Layout) -> tuple[str, ...]:
    strategy, ranks = layout
    return (*GPT, *f"parallel={strategy}".split(), f"cluster.ranks_per_node={ranks}", "checkpoint.every_steps=3")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout, int], dict[str, Any]]:
    """The record of a run of a layout that stopped after so many steps; each is run once."""

    @cache
    def begin(layout: Layout, steps: int) -> dict[str, Any]:
        return run_on_shared_ranks(tmp_path_factory.mktemp("begun"), *on(layout), f"train.steps={steps}")

    return begin


#: tests/checkpoints/test_state.py has the state of each layout under others.
LAYOUTS: list[Layout] = [
    ("ddp", 2), ("fsdp", 3), ("pdp", 2), ("ddp", 3), ("tp parallel.sequence=true", 4), ("fsdp parallel.context=2", 4),
    ("hsdp", 4), ("ddp parallel.optimizer=zero1", 2), ("pdp", 3), ("fsdp parallel.pipeline=2", 4),
]  # fmt: skip
CHANGES: list[tuple[Layout, Layout]] = [
    (("ddp", 2), ("fsdp", 2)), (("hsdp", 4), ("pdp", 2)), (("tp", 2), ("fsdp", 4)), (("3d", 8), ("single", 1)),
    (("fsdp parallel.context=2", 4), ("tp", 4)), (("ddp", 2), ("hsdp parallel.pipeline=2", 8)),
]  # fmt: skip


@cases("layout", LAYOUTS, daily=LAYOUTS[:3], ids=lambda layout: f"{layout[0]}-{layout[1]}")
def test_the_losses_are_those_of_a_run_that_was_not_interrupted(shared_run, begun, layout):
    whole, half = begun(layout, 6), begun(layout, 3)
    rest = shared_run(*on(layout), "train.steps=6", f"resume={half['directory']}")
    assert rest["error"] is None
    assert half["losses"] == whole["losses"][:3]
    assert rest["losses"] == whole["losses"]  # bit for bit
    assert [(one["first_step"], one["steps"]) for one in rest["segments"]] == [(0, 3), (3, 3)]
    assert re.fullmatch(r"after step 3, from [^, ]+", rest["remarks"]["resumed"])  # in the shape that it had


@cases(("first", "then"), CHANGES, daily=CHANGES[:3])
def test_another_strategy_and_another_world_go_on_with_the_same_numbers(shared_run, begun, first, then):
    whole, half = begun(("single", 1), 6), begun(first, 3)
    rest = shared_run(*on(then), "train.steps=6", f"resume={half['directory']}")
    assert rest["error"] is None
    assert rest["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert rest["world_size"] == then[1]
    ranks = [f"{size} rank{'s' * (size > 1)}" for _, size in (then, first)]
    assert re.search(rf", with {ranks[0]}( \(.*\))? instead of {ranks[1]}( \(.*\))?$", rest["remarks"]["resumed"])


def test_the_loss_scale_goes_on_where_it_was(shared_run):
    """Its value shows in no loss: the one in the checkpoint is exchanged for another."""
    scaled = (*TOY, "parallel=ddp", "precision=fp16", "checkpoint.every_steps=2")
    half = shared_run(*scaled, "train.steps=2")
    checkpoint = Path(half["directory"]) / "checkpoints" / "step-00000002"
    written = checkpoint_dir.read_manifest(checkpoint)
    scaler = {**written.facts["scaler"], "scale": 512.0}
    assert scaler != written.facts["scaler"]
    checkpoint_dir.write_manifest(checkpoint, replace(written, facts={**written.facts, "scaler": scaler}))
    rest = shared_run(*scaled, "train.steps=4", f"resume={half['directory']}")
    assert rest["error"] is None
    last = checkpoint_dir.read_manifest(Path(rest["directory"]) / "checkpoints" / "step-00000004")
    assert last.facts["scaler"]["scale"] == 512.0


def saved(directory: Path) -> list[int]:
    """The steps of which there are whole checkpoints, and 0."""
    found = directory.glob("checkpoints/step-????????/manifest.json")
    return [0, *sorted(int(path.parent.name.removeprefix("step-")) for path in found)]


SIGNALS = [["SIGUSR2", "SIGTERM"], ["SIGINT", "SIGINT"]]


def test_a_run_that_is_stopped_saves_and_goes_on_in_its_directory(tmp_path):
    """Twice, by other signals each, and then to its end."""
    run, waits = tmp_path / "run", tmp_path / "waits"
    words = (*patient(waits), "parallel=ddp", "train.steps=2000", "train.max_minutes=null")
    words += ("checkpoint.every_steps=100",)
    stops = [0]
    losses: list[float] = []
    for signals in SIGNALS:
        with forked.started(*(["resume=run"] if losses else [*words, "hydra.run.dir=run"]), cwd=tmp_path) as process:
            until(lambda: saved(run)[-1] > stops[-1] or process.poll() is not None)
            assert process.poll() is None, process.said()
            for name in signals:
                process.send_signal(getattr(signal, name))
            ended = process.communicate()
        assert ended.returncode == 128 + getattr(signal, signals[0])
        stopped = record_of(run)
        done = len(stopped["losses"])
        assert (stopped["status"], stopped["error"]["type"]) == ("preempted", "Stopped"), ended
        assert stops[-1] < done < 2000
        assert stopped["losses"][: stops[-1]] == losses
        assert f"after step {done} of 2000; it has saved: python train.py resume=" in stopped["error"]["message"]
        assert saved(run)[-1] == done
        stops.append(done)
        losses = stopped["losses"]

    waits.unlink()
    again = forked.with_ranks("resume=run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    finished = record_of(run)
    assert (finished["status"], len(finished["losses"])) == ("ok", 2000)
    assert finished["losses"][: stops[-1]] == losses
    assert [one["steps"] for one in finished["segments"]] == [b - a for a, b in pairwise([*stops, 2000])]
    assert finished["fingerprint"] == stopped["fingerprint"]

    complete = forked.train_py("resume=run", cwd=tmp_path)
    assert complete.returncode == 1
    assert complete.stderr.strip() == (
        "resume=run: is complete, with 2000 of 2000 steps; try train.steps=4000, to train on from there"
    )


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run on two ranks that was stopped, as it lies there: ``run``."""
    resolved, run = config.read(composed(*TOY)).resolved, tmp_path / "run"
    checkpoint_dir.begin(partial := checkpoint_dir.partial(run, 4))
    checkpoint_dir.write_manifest(partial, Manifest(4, 2, resolved["model"], {}, {}, "", 0.0))
    checkpoint_dir.publish(partial)
    store.write_record(run, record.begin(resolved, run, {}, list(TOY)) | {"status": "preempted"})
    return run


class TestRefused:
    def refused(self, run: Path, *more: str) -> str:
        """The only line that is said where it is to go on; nothing is written."""
        before = (run / "record.json").read_bytes()
        done = forked.train_py("resume=run", *more, cwd=run.parent)
        assert done.returncode == 1
        assert ((run / "record.json").read_bytes(), [*run.parent.iterdir()]) == (before, [run])
        (line,) = done.stderr.strip().splitlines()
        return line

    def test_another_model_with_the_difference(self, stopped):
        rule = "a run begins with the weights of its model"
        said = self.refused(stopped, "model.width=7")
        assert said == f"model=toy: resume={stopped} holds toy with width=64 (here 7); {rule}"
        said = self.refused(stopped, "model=gpt_tiny")  # however much differs
        assert said == f"model=gpt_tiny: resume={stopped} holds toy; {rule}"

    def test_another_shape_in_its_own_place(self, stopped):
        said = self.refused(stopped, "cluster.ranks_per_node=3")
        assert said.startswith(
            "reshape=false: run would go on with 3 ranks (replicate=3) instead of 2 ranks, which may"
        )


class TestLine:
    """What a command line stands for, without running it."""

    @staticmethod
    def line(overrides: list[str], world: World | None = None) -> resume.Line:
        return resume.read(overrides, False, world)

    def begun(self, directory: Path, overrides: list[str], **changes: Any) -> Path:
        config = {
            "workload": {"name": "train"}, "model": {"name": "toy"}, "parallel": {"name": "ddp"}, "precision": "fp32",
            "train": {"global_batch": 8, "steps": 9}, "cluster": {"name": "local"}, **changes.pop("config", {}),
        }  # fmt: skip
        directory.mkdir(parents=True)
        store.write_record(directory, record.begin(config, directory, {}, overrides) | changes)
        return directory

    def submitted(self, tmp_path: Path, *overrides: str) -> Path:
        """A sweep on SLURM with one run."""
        cluster = {"cluster": {"name": "slurm", "submit": "wait"}}
        run = self.begun(tmp_path / "sweep" / "0_toy_ddp", ["cluster=slurm", "model=toy"], config=cluster)
        job = ledger.Job(0, "ptdbench-x", None, "7", "toy_ddp", "1 node", [], "0_toy_ddp", "logs/7")
        ledger.write(tmp_path / "sweep", ledger.Ledger(["cluster=slurm", "model=toy", *overrides], [job]))
        return run

    def test_a_run_goes_on_as_it_was_typed_also_by_a_link_to_it(self, tmp_path):
        begins = "resume='/of/another'"  # until it has a checkpoint of its own
        typed = ["model=toy", "+model.how='a b'"]
        run = self.begun(tmp_path / "o'clock" / "run", [*typed, "cluster.ranks_per_node=3", begins])
        (link := tmp_path / "latest").symlink_to(run)
        named = f"'{tmp_path}/o\\'clock/run'"
        line = self.line([f"resume={link}", "cluster.ranks_per_node=2"])
        assert line == resume.Line([*typed, begins, "cluster.ranks_per_node=2", f"hydra.run.dir={named}"], run)
        again = self.line([f"resume={link}", "seed=1"])
        assert again.overrides == [*typed, "seed=1", f"resume={named}"]

    def test_what_is_no_run_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match=r"^resume=\S+/nowhere: there is no run"):
            self.line([f"resume={tmp_path}/nowhere"])

    def test_in_another_directory_it_is_a_run_of_its_own(self, tmp_path):
        run = self.begun(tmp_path / "run", ["model=toy"])
        words = ["model=toy", f"hydra.run.dir={tmp_path}/rest"]
        assert self.line([f"resume={run}", words[1]]) == resume.Line([*words, f"resume='{run}'"], None)
        assert self.line([f"resume={run}", f"hydra.run.dir={run}"]).goes_on == run

    @pytest.mark.parametrize(("option", "file"), [("resume", ".hydra/hydra.yaml"), ("sweep.resume", "multirun.yaml")])
    def test_what_was_composed_from_another_file_is_refused(self, tmp_path, option, file):
        run = self.begun(tmp_path / "run", ["model=toy"])
        (run / ".hydra").mkdir()
        (run / file).write_text("hydra: {job: {config_name: mine}, overrides: {task: []}}")
        with pytest.raises(ConfigError) as caught:
            self.line([f"{option}={run}"])
        assert str(caught.value) == (
            f"{option}={run}: was composed from mine.yaml, and this would be from config.yaml; add --config-name mine"
        )
        resume.read([f"{option}={run}"], False, None, "mine")

    @pytest.mark.parametrize("extra", ["+cluster.extra.nice=5", "++cluster.extra.nice=5", "cluster=site_gpu"])
    def test_what_was_said_of_the_cluster_does_not_travel(self, tmp_path, extra):
        """Nor is the shape known of one on record that is no group."""
        run = self.begun(tmp_path / "run", ["model=toy", extra])
        for _ in range(2):
            assert self.line([f"resume={run}"]).overrides == ["model=toy", f"hydra.run.dir='{run}'"]
            written = store.load_record(run)
            store.write_record(run, {**written, "config": {**written["config"], "cluster": 7}})

    @pytest.mark.parametrize(
        ("more", "world", "shape"),
        [
            ([], None, {"nodes": 1, "ranks_per_node": 4, "cpus_per_rank": 12}),
            (["train.steps=20"], None, {"nodes": 1, "ranks_per_node": 4, "cpus_per_rank": 12}),
            (["cluster.ranks_per_node=2"], None, {"nodes": 1, "cpus_per_rank": 12}),
            (["cluster=site"], None, {"nodes": 1, "ranks_per_node": 4, "gpus_per_node": 4, "cpus_per_rank": 12}),
            (["cluster=slurm"], None, {}),  # another cluster has shapes of its own
            ([], World(0, 4, 0, 4, "torchrun", 1), {"nodes": 1, "ranks_per_node": 4, "cpus_per_rank": 12}),
            ([], World(0, 4, 0, 2, "torchrun", 2), {"cpus_per_rank": 12}),  # its world is what there is
        ],
    )
    def test_its_shape_is_kept_unless_it_is_typed_anew(self, tmp_path, more, world, shape):
        was = {"name": "site", "nodes": 1, "ranks_per_node": 4, "cpus_per_rank": 12, "gpus_per_node": 4}
        run = self.begun(tmp_path / "run", ["model=toy", "cluster=site"], config={"cluster": was})
        line = self.line([f"resume={run}", *more], world)
        kept = [f"cluster.{name}={value}" for name, value in shape.items()]
        assert line.overrides[:-1] == ["model=toy", *kept, *more]

    def test_another_shape_is_asked_for_each_time(self, tmp_path):
        run = self.begun(tmp_path / "run", ["model=toy", "reshape=true"])
        for more in ([], ["reshape=true"]):
            line = self.line([f"resume={run}", *more])
            assert line == resume.Line(["model=toy", *more, f"hydra.run.dir='{run}'"], run)
        self.submitted(tmp_path, "reshape=true")
        for more in ([], ["reshape=true"]):
            line = self.line([f"sweep.resume={tmp_path / 'sweep'}", *more])
            assert line.overrides[:-2] == ["cluster=slurm", "model=toy", *more]

    def test_a_run_of_a_job_is_submitted_again_in_its_sweep(self, tmp_path):
        run = self.submitted(tmp_path, "parallel=ddp,fsdp", "cluster.time_minutes=5")
        line = self.line([f"resume={run}", "cluster.time_minutes=60"])
        assert (line.goes_on, line.only) == (tmp_path / "sweep", "0_toy_ddp")
        assert line.overrides == [
            "cluster=slurm", "model=toy", "parallel=ddp,fsdp", "cluster.time_minutes=60", "hydra.mode=MULTIRUN",
            f"hydra.sweep.dir='{tmp_path / 'sweep'}'",
        ]  # fmt: skip

    def test_inside_of_a_job_it_goes_on_in_this_job(self, tmp_path):
        run = self.submitted(tmp_path)
        line = self.line([f"resume={run}"], World(0, 2, 0, 2, "srun", 1))
        assert (line.goes_on, line.only) == (run, None)
        assert "cluster=slurm" not in line.overrides

    @pytest.mark.parametrize("place", ["cluster=slurm", "cluster=site_gpu", "hydra/launcher=submitit_slurm"])
    def test_on_another_cluster_it_is_a_run_of_its_own_that_begins_there(self, tmp_path, place):
        run = self.begun(tmp_path / "run", ["model=toy"])
        line = self.line([f"resume={run}", place])
        assert line == resume.Line(["model=toy", place, f"resume='{run}'"], None)

    @pytest.mark.parametrize(("launcher", "nodes"), [("srun", None), ("srun", ["n1"]), ("torchrun", ["n1", "n2"])])
    def test_a_run_of_a_launcher_does_not_become_processes_of_a_login_node(self, tmp_path, launcher, nodes):
        run = self.begun(tmp_path / "run", ["model=toy"], launcher=launcher, nodes=nodes)
        with pytest.raises(ConfigError, match=f"its ranks were started by {launcher}"):
            self.line([f"resume={run}"])

    def test_a_sweep_may_get_more_time_and_nothing_else(self, tmp_path):
        self.submitted(tmp_path, "cluster.nodes=1,2", "cluster.mem_gb=1,2")
        sweep = tmp_path / "sweep"
        line = self.line([f"sweep.resume={sweep}", "cluster.time_minutes=60", "+cluster.extra.nice=5"])
        assert line.overrides[-4:-2] == ["cluster.time_minutes=60", "+cluster.extra.nice=5"]
        for wrong in ("cluster.nodes=4", "cluster.mem_gb=8", "model=gpt_tiny", "cluster=local", "hydra.sweep.dir=x"):
            with pytest.raises(ConfigError, match=f"goes on with the sweep as it was, and {wrong} would change it"):
                self.line([f"sweep.resume={sweep}", wrong])

    @pytest.mark.parametrize("more", [[], ["hydra.launcher.array_parallelism=4"]], ids=" ".join)
    def test_what_was_typed_of_hydras_options_holds_unless_it_is_typed_anew(self, tmp_path, more):
        run = self.submitted(tmp_path, "hydra.sweeper.n_trials=9")
        environment = ["+hydra.job.env_set.NCCL_ALGO=Ring", "hydra.searchpath=[file:///own]"]
        parallel = ["hydra.launcher.array_parallelism=2"]
        typed = [
            *environment,
            *parallel,
            "hydra.sweep.dir=x",
            "hydra.mode=MULTIRUN",
            "hydra/launcher=ptdbench",
            "hydra.sweeper.n_trials=9",
        ]
        (run / ".hydra").mkdir()
        for path in (run / ".hydra" / "hydra.yaml", tmp_path / "sweep" / "multirun.yaml"):
            OmegaConf.save({"hydra": {"overrides": {"hydra": typed}}}, path)
        line = self.line([f"sweep.resume={tmp_path / 'sweep'}", *more])
        assert line.overrides[3:-2] == [*environment, *(more or parallel)]
        (tmp_path / "sweep" / "sweep.json").unlink()  # the run alone
        assert self.line([f"resume={run}"], World(0, 2, 0, 2, "srun", 1)).overrides[1:-1] == environment
        assert self.line([f"resume={run}", "seed=1"]).overrides[1:-2] == environment

    def test_a_repeat_goes_on_in_its_block_and_alone(self, tmp_path):
        typed = ["model=toy", "repeat.runs=auto", "repeat.max=9", "repeat.tied_within=0.1", "repeat.block=1"]
        run = self.begun(tmp_path / "run", typed)
        in_place = ["model=toy", "repeat.block=1", f"hydra.run.dir='{run}'"]
        assert self.line([f"resume={run}"]) == resume.Line(in_place, run)
        another = self.line([f"resume={run}", "train.steps=20"])
        assert another.overrides == ["model=toy", "train.steps=20", f"resume='{run}'"]

    def test_what_was_typed_is_known_without_a_record(self, tmp_path):
        run = self.begun(tmp_path / "run", ["model=toy"])
        (run / "record.json").write_text("{")
        (run / ".hydra").mkdir()
        typed = ("model=toy", "cluster.ranks_per_node=4", "cluster=site", "repeat.runs=auto", "repeat.block=1")
        (run / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in typed))
        kept = ["model=toy", "repeat.block=1", "cluster.ranks_per_node=4", f"hydra.run.dir='{run}'"]
        assert self.line([f"resume={run}"]) == resume.Line(kept, run)

    def test_a_sweep_may_get_more_blocks_of_repeats_in_the_same_order(self, tmp_path):
        self.submitted(tmp_path, "repeat.runs=2", "repeat.seed=3")
        sweep = tmp_path / "sweep"
        for more in (["repeat.runs=3"], ["repeat.runs=auto", "repeat.max=9", "repeat.tied_within=0.1"]):
            line = self.line([f"sweep.resume={sweep}", *more])
            kept = ["cluster=slurm", "model=toy", "repeat.seed=3", *more]
            assert line.overrides == [*kept, "hydra.mode=MULTIRUN", f"hydra.sweep.dir='{sweep}'"]
        with pytest.raises(ConfigError, match=r"repeat\.seed=4 would change it"):
            self.line([f"sweep.resume={sweep}", "repeat.seed=4"])

    def test_a_damaged_list_of_jobs_is_refused(self, tmp_path):
        run = self.submitted(tmp_path)
        (tmp_path / "sweep" / "sweep.json").write_text("{")
        for words in ([f"resume={run}"], [f"sweep.resume={tmp_path / 'sweep'}"]):
            with pytest.raises(ConfigError, match=r"sweep\.json is damaged: .*; see with squeue that none of its jobs"):
                self.line(words)


class TestSweep:
    def test_what_is_missing_is_done_and_nothing_else(self, tmp_path):
        arguments = ("-m", *TOY, "train.steps=2", "parallel=ddp,single", "hydra.sweep.dir=sweep")
        done = forked.with_ranks(*arguments, "train.global_batch=12,24", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        results = tmp_path / "sweep" / "results.jsonl"
        lines = results.read_text().splitlines(keepends=True)
        ended = [json.loads(line)["directory"] for line in lines]
        before = {name: (tmp_path / name / "record.json").stat().st_mtime_ns for name in ended}
        # As a killed sweep leaves it: one run was never begun, one has no end and the line of an earlier start.
        failed = json.dumps(json.loads(lines[2]) | {"status": "failed"})
        results.write_text("".join(lines[:2]) + f"{failed}\n")
        unfinished = record_of(tmp_path / ended[2])
        unfinished |= {"status": "failed", "error": {"rank": -1, "type": "Unfinished", "message": "", "traceback": ""}}
        (tmp_path / ended[2] / "record.json").write_text(json.dumps(unfinished))
        for path in (tmp_path / ended[3]).glob("*.json"):
            path.unlink()

        again = forked.with_ranks("-m", "sweep.resume=sweep", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        after = {name: (tmp_path / name / "record.json").stat().st_mtime_ns for name in ended}
        assert [after[name] == before[name] for name in ended] == [True, True, False, False]
        records = [json.loads(line) for line in results.read_text().splitlines()]
        assert [record["status"] for record in records] == ["ok"] * 4
        assert sorted(record["directory"] for record in records) == sorted(ended)
