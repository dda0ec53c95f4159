"""Which runs are carried out, and that each appears together with its record."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Manifest
from ptdbench.records import store
from ptdbench.report.labels import titles
from ptdbench.setup.compose import compose_all
from ptdbench.sweep import blocks
from ptdbench.sweep.execution import Agenda, SweepEta
from tests.refusals import Abridged, refusal_of
from tests.report.made import made


def test_repeats_share_a_title_and_a_search_knows_no_number(asked, monkeypatch, tmp_path):
    eta, counts = SweepEta(asked("seed=0", "repeat.runs=50")), []
    monkeypatch.setattr("ptdbench.sweep.execution.titles", lambda drafts: counts.append(len(drafts)) or titles(drafts))
    assert [eta.heading(number).title for number in range(3)] == ["toy ddp"] * 3
    assert counts == [1]
    runs = asked("seed=0,1")
    agenda = Agenda(tmp_path, runs[:1], searches=True)
    assert str(agenda.eta.heading(0)) == "[1] toy ddp"
    agenda.runs.append(runs[1])
    assert str(agenda.eta.heading(1)) == "[2] toy ddp seed=1"


def test_runs_to_come_take_the_mean_of_those_that_ended_well(asked):
    *seeds, larger = [*asked("seed=0,1"), *asked("train.global_batch=32")]
    eta = SweepEta([*seeds, replace(larger, alternative=2)])
    names = ["[1/3] toy ddp b16 seed=0", "[2/3] toy ddp b16 seed=1", "[3/3] toy ddp b32"]
    assert [str(eta.heading(number)) for number in range(3)] == names
    eta.to_come = [0, 1, 2]

    def later():
        return [eta.heading(number).later_seconds for number in range(3)]

    eta.ended(0, 90.0, made({"status": "oom"}))
    assert later() == [None] * 3
    eta.ended(0, 20.0, made({"status": "ok"}))
    assert later() == [40.0, 20.0, None]
    eta.ended(1, 30.0, made({"status": "ok"}))
    assert later() == [50.0, 25.0, None]
    eta.to_come = [0, 2]  # one is in the queue
    assert later() == [25.0, 25.0, None]


def done(folder: Path, name: str = "0_toy_ddp", status: str = "ok") -> dict:
    written = store.load_record(folder / name) | {"status": status, "error": None}
    store.write_record(folder / name, written)
    return written


def test_finished_queued_and_other_runs_are_skipped(asked, tmp_path):
    runs = asked("train.global_batch=16,32,64,15")
    Agenda(tmp_path, runs).open(0)
    written = done(tmp_path)
    agenda = Agenda(tmp_path, runs, queued=frozenset({"1_toy_ddp"}))
    assert agenda.to_do(range(4)) == [2]  # the last one is refused
    opened = [agenda.open(number) for number in range(4)]
    assert [job and job.number for job in opened] == [None, None, 2, None]
    assert store.load_record(tmp_path / "0_toy_ddp") == written
    only = Agenda(tmp_path, runs, only="1_toy_ddp")
    assert [bool(only.open(number)) for number in range(3)] == [False, True, False]


def test_ok_and_diverged_runs_are_not_repeated(asked, tmp_path):
    runs, others = asked("seed=0"), asked("optimizer.lr=3")
    again = []
    for status in ("ok", "diverged", "failed", "oom", "timeout", "preempted"):
        Agenda(tmp_path / status, runs).open(0)
        done(tmp_path / status, status=status)
        again += [status] if Agenda(tmp_path / status, runs).open(0) else []
        assert Agenda(tmp_path / status, others).to_do([0]) == [0]
    assert again == ["failed", "oom", "timeout", "preempted"]


def test_a_run_that_was_done_with_other_options_is_done_again_and_says_so(asked, tmp_path, capsys):
    Agenda(tmp_path, asked("seed=0")).open(0)
    written = done(tmp_path)
    written["config"]["model"]["width"] = 7  # as if the file in conf/ had changed since
    for name in ("seed", "compile", "timeout_minutes"):  # as an earlier version that did not have them
        del written["config"][name]
    store.write_record(tmp_path / "0_toy_ddp", written)
    capsys.readouterr()
    assert Agenda(tmp_path, asked("seed=0")).open(0) is not None
    named = "model.width=7 (here 64), compile=not set (here false), seed=not set (here 0), 1 more"
    assert capsys.readouterr().err == f"0_toy_ddp: was done with other options, {named}; done again\n"
    done(tmp_path)
    assert Agenda(tmp_path, asked("seed=0", "cluster.time_minutes=50")).open(0) is None  # with more time it is the same
    assert Agenda(tmp_path, asked("seed=0", "cluster.nodes=2")).open(0) is not None


def saved(folder: Path, world_size: int) -> Manifest:
    checkpoint = folder / "0_toy_ddp" / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    checkpoint_dir.write_manifest(checkpoint, was := Manifest(3, world_size, {"name": "toy"}, {}, {}, "2.14", 0.0))
    return was


def test_a_run_with_checkpoints_of_other_options_is_left_as_it_is(asked, tmp_path, capsys):
    """As where a list in a file has changed, or the file itself: it would go on with their weights."""
    runs, others = asked("optimizer.lr=0.1"), asked("optimizer.lr=0.3")
    Agenda(tmp_path, runs).open(0)
    written = done(tmp_path)
    saved(tmp_path, runs[0].summary["world_size"])
    capsys.readouterr()
    agenda = Agenda(tmp_path, [*others, asked("train.global_batch=15,16")[0]])
    for number in range(2):  # the second one is refused
        assert agenda.open(number) is None
    assert agenda.skipped == ["0_toy_ddp"] * 2
    text = "has checkpoints of other options, optimizer.lr=0.1 (here 0.3); remove them, or start another sweep; skipped"
    assert capsys.readouterr().err.splitlines()[0] == f"directory={tmp_path / '0_toy_ddp'}: {text}"
    assert store.load_record(tmp_path / "0_toy_ddp") == written
    shutil.rmtree(tmp_path / "0_toy_ddp" / "checkpoints")
    assert Agenda(tmp_path, others).open(0) is not None


def test_a_search_that_goes_on_tells_its_sweeper_the_same_of_what_has_ended_and_replaces_none_of_it(asked, tmp_path):
    runs, others = asked("seed=0,1"), asked("seed=7,8")
    for number, status in enumerate(("oom", "preempted")):
        Agenda(tmp_path, runs, searches=True).open(number)
        written = store.load_record(tmp_path / f"{number}_toy_ddp") | {"status": status, "error": None}
        store.write_record(tmp_path / f"{number}_toy_ddp", written)
    agenda = Agenda(tmp_path, runs, searches=True)
    assert agenda.open(0) is None
    text = Abridged("…, seed=0 (here 7), and the sweeper chooses other values now; start another …")
    assert refusal_of(Agenda(tmp_path, others, searches=True).open, 0) == text
    assert store.load_record(tmp_path / "0_toy_ddp")["status"] == "oom"
    assert agenda.open(1) is not None
    assert Agenda(tmp_path, others, searches=True).open(1) is not None  # which has not been told


def test_a_run_that_would_go_on_in_another_shape_is_left_as_it_is(asked, tmp_path, capsys):
    """As where a partition has other nodes than it had."""
    (run,) = asked("reshape=false")
    Agenda(tmp_path, [run]).open(0)
    begun = store.load_record(tmp_path / "0_toy_ddp")
    was = saved(tmp_path, run.summary["world_size"] + 1)
    capsys.readouterr()
    assert Agenda(tmp_path, [run]).open(0) is None
    assert f"instead of {was.world_size} ranks, which may change its numbers; " in capsys.readouterr().err
    assert store.load_record(tmp_path / "0_toy_ddp") == begun
    assert Agenda(tmp_path, asked("reshape=true")).open(0) is not None


class TestRepeats:
    @pytest.fixture
    def agenda(self, asked, tmp_path):
        def of(*overrides):
            words = ["cluster=slurm", "model=toy", *overrides]
            return Agenda.of(compose_all(words, multirun=True), asked(*overrides), tmp_path, None)

        return of

    def test_each_run_knows_its_block_and_has_a_directory_of_its_own(self, agenda, tmp_path):
        repeated = agenda("parallel=ddp,fsdp", "repeat.runs=3")
        names = [run.subdirectory for run in repeated.runs]
        assert len(set(names)) == 6
        assert names[3].removeprefix("3") == names[0].removeprefix("0")  # ABBA
        assert names[2].removeprefix("2") == names[1].removeprefix("1")
        for number, name in enumerate(names):
            repeated.open(number)
            written = store.load_record(tmp_path / name)
            assert written["overrides"][-1] == f"repeat.block={number // 2}"
            assert written["config"]["repeat"]["block"] == number // 2
        named = agenda("parallel=ddp,fsdp", "repeat.runs=2", "hydra.sweep.subdir='${parallel.name}_${repeat.block}'")
        assert {run.subdirectory for run in named.runs} == {"ddp_0", "ddp_1", "fsdp_0", "fsdp_1"}

    def test_they_come_in_one_batch_or_block_by_block(self, agenda):
        assert agenda("parallel=ddp,fsdp", "repeat.runs=4").batches() == [range(8)]
        by_block = agenda("parallel=ddp,fsdp", "repeat.runs=auto", "repeat.max=4")
        assert by_block.batches() == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
        assert [by_block.runs[batch[0]].block for batch in by_block.batches()] == [0, 1, 2, 3]

    def test_the_blocks_that_are_over_are_counted(self, agenda, tmp_path, monkeypatch):
        counts = []
        monkeypatch.setattr(blocks.StoppingRule, "__call__", lambda _, where, blocks: counts.append(blocks) or True)
        repeated = agenda("parallel=ddp,fsdp", "repeat.runs=auto", "repeat.max=4")
        assert [repeated.is_settled(number) for number in (0, 2, 6)] == [True] * 3
        assert counts == [0, 1, 3]
        assert not agenda("parallel=ddp,fsdp", "repeat.runs=4").is_settled(6)
        assert not replace(repeated, only="6_toy_ddp").is_settled(6)  # the one that is meant

    def test_refused_run_is_one_row_for_all_blocks(self, agenda, tmp_path):
        repeated = agenda("train.global_batch=15,16", "repeat.runs=3")
        assert sum(repeated.open(number) is not None for number in range(6)) == 3
        (row,) = store.read_results(tmp_path)
        assert (row.error.type, row.config["repeat"]["block"]) == ("ConfigError", 0)
        assert len(list(tmp_path.glob("*/record.json"))) == 4

    def test_a_block_that_was_typed_is_kept_and_typed_once_and_may_be_refused(self, agenda, tmp_path):
        repeated = agenda("train.global_batch=15,16", "repeat.block=1")
        assert [run.overrides.count("repeat.block=1") for run in repeated.runs] == [1, 1]
        assert repeated.open(0) is None
        (row,) = store.read_results(tmp_path)
        assert (row.status, row.config["repeat"]["block"]) == ("failed", 1)
