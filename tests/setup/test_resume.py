"""``resume=<run>`` and ``sweep.resume=<sweep>``: the command lines that they stand for, without running them."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import MISSING, OmegaConf

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Manifest
from ptdbench.launch.world import World
from ptdbench.problems import ConfigError
from ptdbench.records import ledger, record, store
from ptdbench.setup import resume
from ptdbench.setup.compose import compose_all
from ptdbench.setup.config import Config
from tests import forked
from tests.refusals import Abridged, refusal_of
from tests.sweep.made import CONFIG


def test_a_damaged_record_is_one_line_and_its_run_starts_over(tmp_path):
    (tmp_path / "record.json").write_text("{")
    refusal = (
        f"resume={tmp_path}: {tmp_path / 'record.json'} is damaged: …; type the overrides again, in a new directory"
    )
    assert refusal_of(resume.read, [f"resume={tmp_path}"], multirun=False, world=None) == Abridged(refusal)


class TestLine:
    @staticmethod
    def line(overrides: list[str], world: World | None = None) -> resume.Line:
        return resume.read(overrides, False, world)

    def begun(self, directory: Path, overrides: list[str], **changes: Any) -> Path:
        config = {**CONFIG, "cluster": {"name": "local"}, **changes.pop("config", {})}
        directory.mkdir(parents=True)
        store.write_record(directory, record.begin(config, directory, {}, overrides) | changes)
        return directory

    def submitted(self, tmp_path: Path, *overrides: str) -> Path:
        cluster = {"cluster": {"name": "slurm", "submit": "wait"}}
        run = self.begun(tmp_path / "sweep" / "0_toy_ddp", ["cluster=slurm", "model=toy"], config=cluster)
        job = ledger.Job(0, "ptdbench-x", None, "7", "1 node", "0_toy_ddp", "logs/7")
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

    @pytest.mark.parametrize(("more", "gone"), [
        ("parallel=ddp", ["parallel=pdp", "parallel.schedule=gpipe"]),  # a schedule is of the pipeline
        ("parallel=pdp", ["parallel=pdp"]), ("model=toy", ["model=toy"]), ("seed=1", []),
        ("parallel=ddp,pdp", ["parallel=pdp"]),  # its options are for all
        ("data=text", []), ("data=digits", ["data.seed=3"]),  # the default is text
    ])  # fmt: skip
    def test_options_of_a_choice_end_with_it(self, tmp_path, more, gone):
        typed = ["model=toy", "parallel=pdp", "parallel.schedule=gpipe", "model.width=7", "data.seed=3"]
        kept = [word for word in typed if word not in gone]
        run = self.begun(tmp_path / "run", typed)
        (run / ".hydra").mkdir()
        (run / ".hydra/hydra.yaml").write_text("hydra: {runtime: {choices: {data: text, parallel: ddp}}}")
        assert self.line([f"resume={run}", more]).overrides == [*kept, more, f"resume='{run}'"]

    def test_in_another_directory_it_is_a_run_of_its_own(self, tmp_path):
        run = self.begun(tmp_path / "run", ["model=toy"])
        words = ["model=toy", f"hydra.run.dir={tmp_path}/rest"]
        assert self.line([f"resume={run}", words[1]]) == resume.Line([*words, f"resume='{run}'"], None)
        assert self.line([f"resume={run}", f"hydra.run.dir={run}"]).goes_on == run

    @pytest.mark.parametrize(("option", "file"), [("resume", ".hydra/hydra.yaml"), ("sweep.resume", "multirun.yaml")])
    def test_what_was_composed_from_another_file_is_refused(self, tmp_path, option, file):
        run = self.begun(tmp_path / "run", ["model=toy"])
        (run / ".hydra").mkdir()
        ledger.begin(run, ["model=toy"])
        (run / file).write_text("hydra: {job: {config_name: mine}, overrides: {task: []}}")
        with pytest.raises(ConfigError, match=rf"^{option}={run}: .* from mine\.yaml, .* add --config-name mine$"):
            self.line([f"{option}={run}"])
        resume.read([f"{option}={run}"], False, None, "mine")

    @pytest.mark.parametrize(
        ("option", "file"), [("resume", "sweep/0_toy_ddp/record.json"), ("sweep.resume", "sweep/sweep.json")]
    )
    def test_what_may_not_be_read_is_not_damaged(self, tmp_path, monkeypatch, option, file):
        self.submitted(tmp_path)

        def read(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        for module in (store, ledger):
            monkeypatch.setattr(module, "read_bytes", read)
        place = (tmp_path / file).parent
        refusal = f"{tmp_path / file} cannot be read (Permission denied); give one that you may read"
        assert refusal_of(self.line, [f"{option}={place}"]) == f"{option}={place}: {refusal}"

    @pytest.mark.parametrize("extra", ["+cluster.extra.nice=5", "++cluster.extra.nice=5", "cluster=site_gpu"])
    def test_what_was_said_of_the_cluster_does_not_travel(self, tmp_path, extra):
        """Nor is the shape known of one on record that is no group."""
        run = self.begun(tmp_path / "run", ["model=toy", extra])
        for _ in range(2):
            assert self.line([f"resume={run}"]).overrides == ["model=toy", f"hydra.run.dir='{run}'"]
            written = store.load_record(run)
            store.write_record(run, {**written, "config": {**written["config"], "cluster": 7}})

    @pytest.mark.parametrize(("more", "world", "shape"), [
        ([], None, {"nodes": 1, "ranks_per_node": 4, "cpus_per_rank": 12}),
        (["train.steps=20"], None, {"nodes": 1, "ranks_per_node": 4, "cpus_per_rank": 12}),
        (["cluster.ranks_per_node=2"], None, {"nodes": 1, "cpus_per_rank": 12}),
        (["cluster=site"], None, {"nodes": 1, "ranks_per_node": 4, "gpus_per_node": 4, "cpus_per_rank": 12}),
        (["cluster=slurm"], None, {}),  # another cluster has shapes of its own
        ([], World(0, 4, 0, 4, "torchrun", 1), {"nodes": 1, "ranks_per_node": 4, "cpus_per_rank": 12}),
        ([], World(0, 4, 0, 2, "torchrun", 2), {"cpus_per_rank": 12}),  # its world is what there is
    ])  # fmt: skip
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

    @pytest.mark.parametrize("more", [["parallel=fsdp"], ["cluster=other"]], ids=" ".join)
    def test_a_new_run_is_not_asked_for_another_shape(self, tmp_path, more):
        run = self.begun(tmp_path / "run", ["model=toy"])
        self.line([f"resume={run}", *more, "reshape=false"])
        with pytest.raises(ConfigError, match=r"^reshape=true: is for a run that continues .* all but resume and the"):
            self.line([f"resume={run}", *more, "reshape=true"])

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
        for wrong in (
            "cluster.nodes=4", "cluster.mem_gb=8", "model=gpt_tiny", "cluster=local", "hydra.sweep.dir=x", "resume=x",
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=f"continues the sweep as it was, and {wrong} would change it"):
                self.line([f"sweep.resume={sweep}", wrong])

    @pytest.mark.parametrize("more", [[], ["hydra.launcher.array_parallelism=4"]], ids=" ".join)
    def test_what_was_typed_of_hydras_options_holds_unless_it_is_typed_anew(self, tmp_path, more):
        run = self.submitted(tmp_path, "hydra.sweeper.n_trials=9")
        environment = ["+hydra.job.env_set.NCCL_ALGO=Ring", "hydra.searchpath=[file:///own]"]
        places = ["hydra.sweep.subdir=${model.name}_${hydra.job.num}"]  # other directories with each run
        parallel = ["hydra.launcher.array_parallelism=2"]
        own = ["hydra.sweep.dir=x", "hydra.mode=MULTIRUN", "hydra/launcher=ptdbench", "hydra.sweeper.n_trials=9"]
        typed = [*environment, *places, *parallel, *own]
        (run / ".hydra").mkdir()
        for path in (run / ".hydra" / "hydra.yaml", tmp_path / "sweep" / "multirun.yaml"):
            written = {"job": {"num": MISSING}, "overrides": {"hydra": typed}, "sweep": {"subdir": "${hydra.job.num}"}}
            OmegaConf.save({"hydra": written}, path)
        line = self.line([f"sweep.resume={tmp_path / 'sweep'}", *more])
        assert line.overrides[3:-2] == [*environment, *places, *(more or parallel)]
        typed.remove(*places)  # then runs keep the directories that the default gave them
        OmegaConf.save({"hydra": written}, tmp_path / "sweep" / "multirun.yaml")
        names = self.line([f"sweep.resume={tmp_path / 'sweep'}", *more]).overrides[-3 - bool(more)]
        assert names == "hydra.sweep.subdir='${hydra.job.num}'"
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
        refusal = Abridged("…sweep.json is damaged: …; check with squeue that none of its jobs…")
        for word in (f"resume={run}", f"sweep.resume={tmp_path / 'sweep'}"):
            assert refusal_of(self.line, [word]) == refusal


TOY = ("model=toy", "train.global_batch=12", "device=cpu")


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """A run of two ranks that is complete, and of which there is a checkpoint: ``run``."""
    words = [*TOY, "train.steps=4", "checkpoint.every_steps=2"]
    asked, run = compose_all(words).configs[0].resolved, tmp_path / "run"
    checkpoint_dir.begin(partial := checkpoint_dir.partial(run, 4))
    facts = {"segments": [{"first_step": 0, "steps": 4, "layout": {"replicate": 2}}]}
    checkpoint_dir.write_manifest(partial, Manifest(4, 2, asked["model"], facts, {}, "", 0.0))
    checkpoint_dir.publish(partial)
    store.write_record(run, record.begin(asked, run, {}, words) | {"status": "ok", "error": None, "steps": 4})
    return run


class TestRefused:
    def refused(self, *arguments: str, cwd: Path) -> str:
        done = forked.train_py(*arguments, cwd=cwd)
        assert done.returncode == 1
        assert not (cwd / "outputs").exists()
        (line,) = done.stderr.strip().splitlines()
        return line

    def test_directory_without_a_run_is_refused(self, tmp_path):
        assert "resume=nowhere: there is no run" in self.refused("resume=nowhere", cwd=tmp_path)

    def test_a_run_that_is_given_as_a_sweep(self, ended, tmp_path):
        refusal = "sweep.resume=run: is a run; try python train.py resume=run"
        assert self.refused("sweep.resume=run", cwd=tmp_path) == refusal

    def test_another_model_with_the_difference(self, ended, tmp_path):
        rule = "a run begins with the weights of its model"
        said = self.refused("resume=run", "model.width=7", cwd=tmp_path)
        assert said == f"model=toy: resume={ended} holds toy with width=64 (here 7); {rule}"
        said = self.refused("resume=run", "model=gpt_tiny", cwd=tmp_path)  # however much differs
        assert said == f"model=gpt_tiny: resume={ended} holds toy; {rule}"

    @pytest.mark.parametrize(("option", "target"), [
        ("model._target_", "torch.load"), ("model._target_", "torch.hub.load"), ("data._target_", "joblib.load"),
        ("model._target_", "torch.os.system"), ("model.config.0._target_", "builtins.exec"),
        ("optimizer.defaults._target_", "hydra.utils.get_method"), ("model.a.b._target_", "subprocess.Popen"),
        ("model.config._target_", "${oc.decode:os.system}"),
    ])  # fmt: skip
    def test_a_record_that_names_what_runs_any_code(self, ended, option, target):
        inner: Any = target
        for name in reversed(option.split(".")):
            inner = [inner] if name == "0" else {name: inner}
        foreign = Config(inner)
        rule = f"resume={ended}: its record names {target}, which may run any code"
        again = f"python train.py resume={ended} {option}={target}"
        refusal = f"{rule}; if you trust whoever wrote it, try {again}"
        assert refusal_of(resume.check_targets, [f"resume={ended}"], [foreign]) == refusal
        resume.check_targets([f"resume={ended}", f"{option}={target}"], [foreign])
        resume.check_targets([f"{option}={target}"], [foreign])  # nobody's record

    def test_another_model_than_that_of_the_checkpoint_is_not_built(self, ended, tmp_path):
        (tmp_path / "evil.py").write_text("open('ran', 'w').close()")
        words = [*TOY, "train.steps=6", "checkpoint.every_steps=2", "model._target_=evil.Model"]
        store.write_record(ended, store.load_record(ended) | {"status": "preempted", "steps": 2, "overrides": words})
        said = f"model=toy: resume={Path('run')} holds toy; a run begins with the weights of its model"
        assert self.refused("resume=run", cwd=tmp_path) == said
        assert self.refused("resume=run", "train.steps=7", cwd=tmp_path) == said.replace("=run", f"={ended}")
        assert not (tmp_path / "ran").exists()

    def test_a_run_without_checkpoints(self, ended, tmp_path):
        shutil.rmtree(ended / "checkpoints")
        said = self.refused("resume=run", "train.steps=6", cwd=tmp_path)
        assert "run: holds no complete checkpoint; omit it to start over" in said

    def test_a_checkpoint_after_which_no_step_is_left(self, ended, tmp_path):
        said = self.refused("resume=run", "train.steps=3", cwd=tmp_path)
        remedy = "try 8, to train on from there, or profile=true, to trace steps of it"
        assert said == f"train.steps=3: resume={ended} has taken 4 steps, and none is left; {remedy}"

    def test_another_shape_in_its_own_place_and_results_are_not_overwritten(self, ended, tmp_path):
        before = (ended / "record.json").read_bytes()
        said = self.refused(*TOY, "train.steps=3", "hydra.run.dir=run", cwd=tmp_path)
        assert "hydra.run.dir=run: it already holds results; try resume=run" in said
        assert (ended / "record.json").read_bytes() == before
        (ended / "record.json").write_text(json.dumps(store.load_record(ended) | {"status": "preempted"}))
        before = (ended / "record.json").read_bytes()
        said = self.refused("resume=run", "cluster.ranks_per_node=3", cwd=tmp_path)
        assert said.startswith("reshape=false: run would continue with 3 ranks (replicate=3) instead of 2 ranks (rep")
        assert (ended / "record.json").read_bytes() == before
