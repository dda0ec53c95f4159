"""Submissions, as far as they need no cluster: which jobs share an array, what a job is given, one after another."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hydra.core.plugins import Plugins

from ptdbench import entry, search_path, terminal
from ptdbench.launch import local, slurm
from ptdbench.launch.slurm import Partition, SlurmError
from ptdbench.problems import ConfigError
from ptdbench.records import ledger, store
from ptdbench.setup import resume
from ptdbench.setup.compose import compose_all
from ptdbench.sweep import execution, status, submission, watch
from ptdbench.sweep.execution import Agenda
from ptdbench.sweep.submission import Array, arrays
from tests.refusals import Abridged, refusal_of


def numbers(runs):
    return [[[run.number for run in job] for job in array] for array in arrays(runs)]


class TestArrays:
    def test_jobs_of_one_shape_share_one_wherever_they_stand(self, asked):
        assert numbers(asked("parallel=ddp,fsdp", "cluster.nodes=1,2")) == [[[0], [2]], [[1], [3]]]
        assert numbers(asked("cluster.ranks_per_node=auto,2")) == [[[0], [1]]]  # two, where there is no GPU

    @pytest.mark.parametrize("override", [
        "cluster.time_minutes=5,10", "cluster.cpus_per_rank=1,2", "cluster.setup=[],[umask]",
        "cluster.srun_args=[],[--label]", "+cluster.extra.nice=1,2",
    ])  # fmt: skip
    def test_differing_job_options_need_separate_arrays(self, asked, override):
        assert numbers(asked(override)) == [[[0]], [[1]]]


class TestSameNodes:
    def test_a_job_for_each_block_of_repeats_and_an_array_of_those_with_as_many_runs(self, asked):
        runs = asked("parallel=ddp,fsdp", "sweep.same_nodes=true", "repeat.runs=3")
        assert numbers(runs) == [[[0, 1], [2, 3], [4, 5]]]
        assert numbers(runs[1:]) == [[[1]], [[2, 3], [4, 5]]]  # of a sweep that goes on

    def test_all_runs_are_one_job_and_one_that_is_refused_is_in_none(self, asked):
        assert numbers(asked("train.global_batch=16,15,8", "sweep.same_nodes=true")) == [[[0, 2]]]

    @pytest.mark.parametrize(("overrides", "line"), [
        (["cluster.nodes=1,2"], "cluster.nodes=1,2: … one job, which has one value; give one value, or …"),
        (["cluster.srun_args=[],[--label]"], "cluster.srun_args=[],[--label]: … which has one value; …"),
        (["parallel=single,ddp"], "sweep.same_nodes=true: one job has one shape, …: 1 node x 1 rank with 0 GPUs a "
         "node, 1 node x 2 ranks with 0 GPUs a node; start a sweep for each"),
        (["parallel=ddp,fsdp", "cluster.requeue=true", "checkpoint.every_steps=5"],
         "cluster.requeue=true: … would begin again with the first one; omit one of them, and sweep.resume …"),
    ])  # fmt: skip
    def test_runs_of_differing_shapes_are_refused_as_one_job(self, asked, overrides, line):
        runs = asked(*overrides, "sweep.same_nodes=true")
        assert Abridged(line) in refusal_of(arrays, runs).splitlines()

    def test_runs_that_ask_for_other_gpus(self, asked, monkeypatch):
        monkeypatch.setattr(slurm, "partitions", lambda: [Partition("debug", True, (2,))])
        with pytest.raises(ConfigError, match="1 node x 2 ranks with 0 GPUs a node, 1 node x 2 ranks with 2 GPUs a n"):
            arrays(asked("cluster.ranks_per_node=2", "device=cpu,cuda", "sweep.same_nodes=true"))

    def test_each_run_is_a_step_and_one_that_fails_ends_no_other(self, asked):
        runs = asked("parallel=ddp,fsdp", "sweep.same_nodes=true")
        text = Array([runs, runs], "both", Path("/sweep")).script({})
        for number, line in enumerate(line for line in text.splitlines() if line.startswith("srun ")):
            assert f" --output=/sweep/logs/%A_%a/{number}/%A_%a_%t_log.out " in line
            place = f"${{SLURM_ARRAY_TASK_ID:-0}} * 2 + {number}"
            assert line.endswith(f' ptdbench run "${{ptdbench_runs[{place}]}}" || failed=$?')
        assert number == 1
        assert f"\nptdbench_runs=({' '.join(['/sweep/0_toy_ddp', '/sweep/1_toy_fsdp'] * 2)})\n" in text
        assert "#SBATCH --output=/sweep/logs/%A_%a_slurm.log\n" in text
        assert text.endswith("\nexit $failed\n")


@pytest.mark.parametrize(("count", "together", "variables", "job"), [
    (1, False, {"SLURM_JOB_ID": "7"}, "7"),
    (2, False, {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, "7_1"),
    (2, True, {"SLURM_JOB_ID": "7"}, "7"),
])  # fmt: skip
def test_a_job_makes_the_folders_of_its_output_as_it_may_start_before_others_do(
    asked, tmp_path, count, together, variables, job
):
    """And srun is given no token, which may have expired."""
    sweep, srun = tmp_path / "my sweep", tmp_path / "srun"
    (sweep / "logs").mkdir(parents=True)  # for the file of the flag --output
    srun.write_text("#!/bin/sh\necho ${SLURM_JWT-no token}; echo trouble >&2\n")
    srun.chmod(0o755)
    runs = asked(f"seed={','.join(map(str, range(count)))}", f"sweep.same_nodes={str(together).lower()}")
    text = Array([runs] if together else [[run] for run in runs], "toy", sweep).script({})
    assert f"#SBATCH --output='{sweep}/logs/{'%A_%a' if '_' in job else '%j'}_slurm.log'\n" in text
    environ = {**variables, "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JWT": "token"}
    done = subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    steps = count if together else 1
    folder = sweep / "logs" / job
    assert (folder / f"{job}_0_log.out").read_text() == "no token\n" * steps
    assert (folder / f"{job}_0_log.err").read_text() == "trouble\n" * steps
    assert [path.name for path in sorted(folder.glob("?"))] == [*map(str, range(count))] * together


@pytest.mark.parametrize(("variables", "asked_for", "requeued"), [
    ({"SLURM_JOB_ID": "7"}, True, "requeue 7\n"),
    ({"SLURM_JOB_ID": "7"}, False, ""),
    ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, True, "requeue 7_0\n"),
])  # fmt: skip
def test_the_script_requeues_its_job_where_a_rank_in_a_container_asks_for_it(
    asked, tmp_path, variables, asked_for, requeued
):
    image = ["cluster.container.image=/i.sif", "cluster.container.kind=apptainer"]
    runs = asked("cluster.requeue=true", "checkpoint.every_steps=5", *image)
    _, _, end = Array([runs], "toy", tmp_path / "my sweep").script({}).partition("failed=0\n")
    (tmp_path / "my sweep").mkdir()
    if asked_for:
        (tmp_path / "my sweep" / f".requeue-{variables['SLURM_JOB_ID']}").touch()
    commands = "set -e; failed=0; srun() { return 3; }; scontrol() { echo $*; }\n"
    for said in (requeued, ""):  # once
        done = subprocess.run(
            ["bash", "-c", commands + end], env=variables | {"PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (3, said)


@pytest.mark.parametrize(("options", "flags"), [
    ({}, ["--signal=USR2@120", "--array=0-1%2"]),
    ({"signal_delay_s": 0, "array_parallelism": 1}, ["--signal=USR2@0", "--array=0-1%1"]),
    ({"signal_delay_s": None, "array_parallelism": 0}, ["--signal=USR2@120", "--array=0-1%0"]),
])  # fmt: skip
def test_options_of_the_launcher_are_passed_to_sbatch_and_0_is_a_number_too(asked, tmp_path, options, flags):
    lines = Array([[run] for run in asked("seed=0,1")], "toy", tmp_path).script(options).splitlines()
    assert {f"#SBATCH {flag}" for flag in flags} <= {line.replace("'", "") for line in lines}


class TestSubmission:
    """A SLURM that answers as a test wants; what is noted down when, and what is taken back."""

    @pytest.fixture
    def launch(self, asked, tmp_path, monkeypatch):
        canceled = []
        monkeypatch.setattr(slurm, "cancel_named", lambda names: canceled.extend(names) or ["101"])

        def it(answer, *overrides):
            monkeypatch.setattr(slurm, "submit", answer)
            runs = asked(*(overrides or ["cluster.nodes=1,2,4"]))
            agenda = Agenda(tmp_path, runs)
            submission.submit(tmp_path, [agenda.open(number) for number in range(len(runs))], {})

        it.canceled = canceled
        return it

    def test_every_job_is_noted_down_before_and_after_it_is_submitted(self, launch, tmp_path):
        seen = []

        def answer(script):
            seen.append([job.id for job in ledger.read(tmp_path).jobs])
            return str(100 + len(seen))

        launch(answer)
        assert seen == [[None], ["101", None], ["101", "102", None]]
        noted = ledger.read(tmp_path).jobs
        assert [job.id for job in noted] == ["101", "102", "103"]
        assert len({job.name for job in noted}) == 3
        assert {job.cluster for job in noted} == {"here"}
        assert [(tmp_path / "logs" / id / f"{id}_submission.sh").exists() for id in ("101", "102", "103")] == [True] * 3
        assert launch.canceled == []

    def test_runs_that_share_a_job_are_each_noted_down_with_their_place_in_it(self, launch, tmp_path):
        launch(lambda script: "101", "parallel=ddp,fsdp", "sweep.same_nodes=true")
        noted = ledger.read(tmp_path).jobs
        assert [(job.id, job.element, job.step, job.directory) for job in noted] == [
            ("101", None, 0, "0_toy_ddp"),
            ("101", None, 1, "1_toy_fsdp"),
        ]
        for one in noted:
            assert Path(one.log) == tmp_path / "logs" / "101" / str(one.step)

    def test_a_refusal_takes_back_what_was_submitted_and_says_so_in_the_records(self, launch, tmp_path, capsys):
        answers = iter(["101"])

        def answer(script):
            if found := next(answers, None):
                return found
            raise SlurmError("Job violates accounting/QOS policy")

        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(ConfigError, match="nothing was submitted: Job violates accounting/QOS policy"):
            launch(answer)
        assert launch.canceled == [f"ptdbench-toy_ddp-{name.rpartition('-')[2]}" for name in launch.canceled]
        assert len(launch.canceled) == 3  # by name: SLURM may have taken one without an answer
        assert "canceled what SLURM had taken already: 101" in capsys.readouterr().err
        rows = store.read_results(tmp_path)
        assert {row.error.type for row in rows} == {"NotSubmitted"}
        assert len(rows) == 3
        assert (tmp_path / "thesis.txt").read_text() == "mine"
        told = [*watch.reasons(status.settle(tmp_path))]
        assert [line.partition(": ")[2] for line in told] == [
            "failed: NotSubmitted: nothing was submitted: Job violates accounting/QOS policy"
        ] * 3

    def test_a_signal_in_the_middle_of_a_submission_waits_for_the_answer_and_another_for_what_is_canceled(
        self, launch, tmp_path, monkeypatch
    ):
        def answer(script):
            os.kill(os.getpid(), signal.SIGINT)
            return "101"

        cancel = slurm.cancel_named
        monkeypatch.setattr(slurm, "cancel_named", lambda names: os.kill(os.getpid(), signal.SIGINT) or cancel(names))
        with pytest.raises(local.Stopped):
            launch(answer)
        assert ledger.read(tmp_path).jobs[0].id == "101"
        assert len(launch.canceled) == 3
        assert {row.error.type for row in store.read_results(tmp_path)} == {"NotSubmitted"}


def test_a_job_gets_the_directory_of_its_run_whose_record_has_the_rest(asked, tmp_path, monkeypatch):
    """Nothing of Hydra, so that a job starts with no configuration to compose."""
    scripts = []
    monkeypatch.setattr(slurm, "submit", lambda script: scripts.append(script) or "101")
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "--config-dir", "my own"])
    (run,) = asked("+hydra.job.env_set.FOO=1")
    submission.submit(tmp_path, [Agenda(tmp_path, [run]).open(0)], {})
    assert store.load_record(tmp_path / "0_toy_ddp")["variables"] == {"FOO": "1"}
    (script,) = scripts
    assert f"\nptdbench_runs=({tmp_path}/0_toy_ddp)\n" in script
    typed = shlex.split(next(line for line in script.splitlines() if "PTDBENCH_TYPED" in line))[1].partition("=")[2]
    monkeypatch.setattr(sys, "argv", ["submit"])
    monkeypatch.setenv("PTDBENCH_TYPED", typed)
    assert terminal.command() == "python train.py --config-dir 'my own'"


def test_the_script_searches_for_a_micro_batch_before_it_starts_the_ranks_and_says_how(asked, tmp_path):
    runs = asked("train.micro_batch=max", "cluster.nodes=2", "cluster.srun_args=[--label]")
    *_, last = Array([runs], "toy", tmp_path).script({}).strip().splitlines()
    search, _, ranks = last.partition(" && ")
    place, run = "${ptdbench_runs[${SLURM_ARRAY_TASK_ID:-0} * 1 + 0]}", [*search_path.module("ptdbench"), "run"]
    *words, shape, tries, directory = shlex.split(search)
    assert (words, shape, directory) == ([sys.executable, "-u", *run], "--shape=2x2x0", place)
    step = shlex.split(tries.removeprefix("--tries="))
    assert (step[0], step[-7:]) == ("srun", ["--label", sys.executable, "-u", *run])
    assert "--open-mode=append" in step
    assert shlex.split(ranks) == [*step, place]
    assert numbers(asked("train.micro_batch=4,max,8,best")) == [[[0], [2]], [[1], [3]]]  # no array with others


class TestFollowed:
    """Batch by batch, as results decide: those of a search, and of repeats."""

    @pytest.fixture
    def search(self, asked, monkeypatch):
        """Carry out batches by jobs that end at once; what the sweeper is told of each run."""

        def it(agenda, batches):
            words = ["cluster=slurm", "model=toy", "hydra/sweeper=optuna", "seed=1,2"]
            words += ["hydra/launcher=submitit_slurm", "hydra.launcher.array_parallelism=1"]
            told = []

            def instantiate(*, config, hydra_context, task_function):
                def sweep(arguments):
                    for batch in batches:
                        told.append(task_function(batch, sum(len(done) for done in told)))

                return SimpleNamespace(sweep=sweep)

            monkeypatch.setattr(Plugins.instance(), "instantiate_sweeper", instantiate)
            execution.search(agenda, compose_all(words, multirun=True))
            return told

        return it

    def test_jobs_are_waited_for_and_their_objectives_told(self, search, tmp_path, monkeypatch):
        """The numbers go on, and a job that fails raises when the sweeper asks for its result."""
        submitted, told = [], []
        monkeypatch.setattr(slurm, "submit", lambda script: submitted.append(script) or str(100 + len(submitted)))

        def follow(sweep_directory, known):
            told.append(sorted(known))
            jobs = ledger.read(sweep_directory).jobs
            for one in jobs:
                directory = sweep_directory / one.directory
                written = store.load_record(directory)
                seed = written["config"]["seed"]
                done = {"status": "ok", "metrics": {"samples_per_second": 8.0 * seed}} if seed < 3 else {"error": None}
                store.write_record(directory, written | done)
            return {one.directory for one in jobs}

        monkeypatch.setattr(watch, "follow", follow)
        words = ["cluster=slurm", "model=toy"]
        batches = [[[*words, "seed=1"], [*words, "seed=2"]], [[*words, "seed=3"]]]
        first, (second,) = search(Agenda(tmp_path, searches=True), batches)
        assert [done.return_value for done in first] == [8.0, 16.0]
        with pytest.raises(ValueError, match=r"^2_toy_ddp_seed-3: failed, so that it has no throughput$"):
            _ = second.return_value
        names = ["0_toy_ddp_seed-1", "1_toy_ddp_seed-2", "2_toy_ddp_seed-3"]
        assert [one.directory for one in ledger.read(tmp_path).jobs] == names
        assert told == [[], names[:2]]
        assert "#SBATCH --array=0-1%1" in submitted[0]  # as the launcher that was typed has it

    def test_a_block_of_repeats_waits_for_the_one_before(self, asked, tmp_path, monkeypatch):
        happened = []

        def follow(sweep_directory, known):
            happened.append(f"{len(known)} known")
            return {job.directory for job in ledger.read(sweep_directory).jobs}

        monkeypatch.setattr(slurm, "submit", lambda script: happened.append("submitted") or str(len(happened)))
        monkeypatch.setattr(watch, "follow", follow)
        words = ["parallel=ddp,fsdp", "repeat.runs=auto", "repeat.max=3"]
        composed = compose_all(["cluster=slurm", "model=toy", *words], multirun=True)
        execution.run_all(Agenda.of(composed, asked(*words), tmp_path, None), composed)
        assert happened == ["submitted", "0 known", "submitted", "2 known", "submitted", "4 known"]
        records = [store.read_record(tmp_path / job.directory) for job in ledger.read(tmp_path).jobs]
        assert [record.option("repeat.block", int) for record in records] == [0, 0, 1, 1, 2, 2]

    def test_jobs_that_an_earlier_start_left_in_the_queue_are_waited_for_once(self, tmp_path, monkeypatch):
        told = []
        monkeypatch.setattr(watch, "follow", lambda _, known: told.append(known) or {"0_toy_ddp"})
        agenda = Agenda(tmp_path, queued=frozenset({"0_toy_ddp"}), searches=True)
        execute = execution.executor(agenda, compose_all(["cluster=slurm", "model=toy"], multirun=True))
        for _ in range(2):
            execute([])
        assert told == [set()]

    def test_uncomposable_choice_of_a_sweeper_ends_the_search(self, search, tmp_path):
        with pytest.raises(ConfigError, match=r"^command line=model=toy x=1: Could not override 'x'"):
            search(Agenda(tmp_path, searches=True), [[["model=toy", "x=1"]]])


@pytest.mark.parametrize(("overrides", "lines"), [
    (["cluster.nodes=1,2", "seed=0,1,2"], ["1 node x 2 ranks (3 jobs)", "2 nodes x 2 ranks (3 jobs)"]),
    (["parallel=ddp,fsdp", "sweep.same_nodes=true"], ["1 node x 2 ranks (1 job of 2 runs)"]),
])  # fmt: skip
def test_a_line_for_each_array_of_jobs(asked, monkeypatch, capsys, overrides, lines):
    scripts = []
    monkeypatch.setattr(slurm, "test", lambda script: scripts.append(script) or "Job 5 to start at noon")
    assert submission.show_test_only(asked(*overrides), {}) == 0
    assert capsys.readouterr().out.splitlines() == [f"{line}: Job 5 to start at noon" for line in lines]
    assert ["#SBATCH --array=0-2%" in script for script in scripts] == ["3 jobs" in line for line in lines]


@pytest.mark.parametrize("name", ["top5%u", "100%", "a%j", "back\\slash", "two\nlines"])
def test_a_path_in_which_slurm_would_replace_something_is_refused(tmp_path, name):
    rule = r"%, \ and line breaks in the path of a job's output mean something else to SLURM"
    told = f"hydra.sweep.dir={tmp_path}/{name}: {rule}; give one without them"
    assert refusal_of(submission.check_path, tmp_path / name) == told
    submission.check_path(tmp_path)


def test_submit_test_tells_both_kinds_of_refusals(asked, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "test", Mock(side_effect=SlurmError("Invalid account")))
    runs = asked("train.global_batch=16,15")
    assert submission.show_test_only(runs, {}) == 1
    out, err = capsys.readouterr()
    refused, would_be = err.splitlines()
    assert "train.global_batch=15: must be a multiple of " in refused
    assert (out, would_be) == ("", "1 node x 2 ranks (1 job): SLURM would refuse it: Invalid account")
    with pytest.raises(ConfigError, match="nothing was submitted, because SLURM refuses 1 node x 2 ranks: Invalid acc"):
        submission.require_accepted(runs, {})


def test_a_submission_that_is_not_followed_tells_what_is_refused(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "test", lambda script: "would start")
    monkeypatch.setattr(slurm, "submit", lambda script: "101")
    asked()  # a SLURM that answers
    for batch, refused in (("16,15", 1), ("16,32", 0)):
        words = ["cluster=slurm", "cluster.submit=detach", "model=toy", f"train.global_batch={batch}"]
        composed = compose_all(words, multirun=True)
        assert entry._on_cluster(composed, composed.configs[0].cluster, resume.Line(words, None))[0] == refused
        assert capsys.readouterr().err.count("train.global_batch=15: must be a multiple of ") == refused


def test_a_resumed_sweep_asks_slurm_only_for_what_it_lacks(asked, tmp_path, monkeypatch, capsys):
    scripts = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "test", lambda script: scripts.append(script) or "would start")
    monkeypatch.setattr(slurm, "submit", lambda script: "101")
    monkeypatch.setattr(slurm, "queue", lambda jobs: {})
    monkeypatch.setattr(status, "GRACE", 0.0)
    asked()  # a SLURM that answers

    def start(submit: str, goes_on: Path | None) -> list[str]:
        scripts.clear()
        words = ["cluster=slurm", "model=toy", "train.steps=3,4", f"cluster.submit={submit}", "hydra.sweep.dir=sweep"]
        composed = compose_all(words, multirun=True)
        assert entry._on_cluster(composed, composed.configs[0].cluster, resume.Line(words, goes_on))[0] == 0
        return capsys.readouterr().out.splitlines()

    assert "submitted 2 jobs: 101_0 101_1" in start("detach", None)
    store.unlock(tmp_path / "sweep")
    nothing = "nothing to submit: everything is ok, or still in the queue"
    for number, lines in enumerate((["1 node x 2 ranks (1 job): would start"], [nothing])):
        (path,) = (tmp_path / "sweep").glob(f"{number}_*")
        store.write_record(path, store.load_record(path) | {"status": "ok", "error": None})
        assert (start("test", tmp_path / "sweep"), len(scripts)) == (lines, 1 - number)
    assert (start("detach", tmp_path / "sweep"), scripts) == ([nothing], [])
