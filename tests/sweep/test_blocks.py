"""Repeats that are refused, and when ``repeat=auto`` ends."""

import math
import re
from dataclasses import replace

import pytest

from ptdbench.comparison import significance
from ptdbench.problems import ConfigError
from ptdbench.records import record, store
from ptdbench.setup.compose import Source, compose_all, conf_folder
from ptdbench.setup.config import Repeat
from ptdbench.sweep import blocks
from ptdbench.sweep.blocks import StoppingRule
from tests import forked
from tests.refusals import Abridged
from tests.report.made import keep, run
from tests.sweep.made import CONFIG

TOY = ("model=toy", "train.steps=4", "device=cpu")


def repeat(runs, *, most=20, seed=0, block=None):
    return Repeat(runs=runs, max=most, tied_within=0.02, seed=seed, block=block, series=None)


class TestRefused:
    @pytest.mark.parametrize(("typed", "said"), [
        (["repeat=0"], "repeat.runs=0: must be at least 1"),
        (["repeat=x"], "repeat.runs=x: must be a whole number or auto"),
        (["repeat=2.5"], "repeat.runs=2.5: must be a whole number or auto"),
        (["repeat=auto", "repeat.max=2"], "repeat.max=2: must be at least 3"),
        (["repeat.tied_within=1"], "repeat.tied_within=1: must be at least 0 and less than 1; try 0.02"),
        (["repeat.tied_within=-1%"], "repeat.tied_within=-1%: must be a number"),
        (["repeat=2", "repeat.block=2"], "repeat.block=2: there are 2 blocks, which count from 0; omit it …"),
        (["repeat=auto", "repeat.max=4", "repeat.block=4"], "repeat.block=4: there are 4 blocks, …; omit it …"),
        (["hydra/sweeper=optuna", "repeat=3"], "repeat.runs=3: hydra/sweeper=optuna … none; omit it, and …"),
        (["repeat=auto", "virtual=h100"], "virtual=h100: … repeat=auto has nothing to go by; omit repeat=auto, or …"),
    ])  # fmt: skip
    def test_what_there_cannot_be(self, typed, said):
        assert check(*typed) == Abridged(said)

    def test_repeats_need_a_sweep_and_somebody_who_waits(self):
        line = "repeat.runs=3: several runs are a sweep; add -m, as in python train.py -m repeat=3"
        assert check("repeat.runs=3", multirun=False) == line
        assert check("cluster=slurm", "cluster.submit=detach", "repeat=2") is None
        told = Abridged("cluster.submit=detach: repeat=auto needs …; try wait")
        assert check("cluster=slurm", "cluster.submit=detach", "repeat=auto") == told


class TestGoesOn:
    """The runs of a sweep must not be done again in the directories of others; ``repeat`` may stand in any file."""

    @pytest.mark.parametrize(("was", "now"), [(1, 3), (3, 1), (1, "auto"), ("auto", 1)])
    def test_with_another_order_is_refused(self, tmp_path, was, now):
        self.sweep(tmp_path, was)
        begun = "without" if was == 1 else "with"
        said = f"sweep.resume={tmp_path}: was begun {begun} repeats, and … another order now; start another sweep"
        assert check(f"repeat={now}", goes_on=tmp_path) == Abridged(said)

    @pytest.mark.parametrize(("was", "now"), [(1, 1), (2, 3), (3, "auto"), ("auto", 5), ("no records yet", 3)])
    def test_with_more_blocks_goes_on(self, tmp_path, was, now):
        if was != "no records yet":
            self.sweep(tmp_path, was)
        assert check(f"repeat={now}", goes_on=tmp_path) is None

    @staticmethod
    def sweep(folder, runs):
        """One whose first record is damaged."""
        for name in ("0_ddp", "1_ddp"):
            keep(folder, name, run("ddp", config={"repeat": {"runs": runs}}))
        (folder / "0_ddp" / "record.json").write_text("{")


def check(*overrides, goes_on=None, multirun=True):
    composed = compose_all([*TOY, *overrides], multirun)
    try:
        blocks.check(composed, goes_on)
    except ConfigError as error:
        return str(error)
    return None


class TestShown:
    """``repeat=5`` is a sweep by itself, and nothing runs where a sweep is only looked at."""

    @pytest.mark.parametrize(("words", "said"), [
        (["--cfg", "job", "--package", "repeat", "repeat=5"],
         r"# .*\nruns: 5\nmax: 60\ntied_within: 0.02\nseed: 0\nblock: null\nseries: null\n"),
        (["--cfg", "job", "--package", "repeat.runs", "repeat=5", "parallel=ddp,fsdp"],  # of several once each
         r"# run 0: [^#]*# run 1: [^#]*"),
        (["--cfg", "job", "--package", "cluster.nodes", "cluster=slurm", "cluster.nodes=1,2"],  # and no SLURM
         r"# run 0: .*\n1\n---\n# run 1: .*\n2\n"),
        (["--help", "repeat=5"], r"ptdbench: [\s\S]*"),
    ])  # fmt: skip
    def test_what_a_command_only_shows(self, tmp_path, words, said):
        done = forked.train_py(*words, *TOY, cwd=tmp_path)
        assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])
        assert re.fullmatch(said, done.stdout)

    @pytest.mark.parametrize("written", ["repeat: 3", "repeat.runs: 3"])
    def test_a_file_may_hold_it_among_the_lists_of_a_sweep(self, tmp_path, written):
        (tmp_path / "experiment").mkdir()
        text = f"# @package _global_\nhydra:\n  sweeper:\n    params:\n      {written}\n"
        (tmp_path / "experiment" / "often.yaml").write_text(text)
        composed = compose_all([*TOY, "experiment=often"], True, Source(conf_folder(), extra=str(tmp_path)))
        assert composed.configs[0].repeat.runs == 3


#: Looks after three blocks, after five and after eight.
MOST = 8


@pytest.fixture
def sweep(tmp_path):
    """Adds the runs of an alternative to a sweep: its throughputs, block by block; ``None`` is a run that failed."""

    def add(parallel, throughputs):
        for block, rate in enumerate(throughputs):
            config = {**CONFIG, "parallel": {"name": parallel}, "repeat": {"block": block}}
            directory = tmp_path / f"{block}_{parallel}"
            written = record.begin(config, directory, {}) | {"world_size": 2, "nodes": ["n1"]}
            ended = {"status": "ok", "metrics": {"tokens_per_second": rate}} if rate else {}
            directory.mkdir()
            store.write_record(directory, written | {"error": None} | ended)
        return tmp_path

    return add


def settling(tied_within=0.02):
    return StoppingRule(replace(repeat("auto", most=MOST), tied_within=tied_within))


def alike(share):
    """Throughputs of eight blocks that go up and down by a share."""
    return [1000 * math.exp(share * sign) for sign in (1, -1, 1, -1, 1, -1, 1, -1)]


def test_it_stops_at_a_look_when_all_pairs_are_known_to_differ(sweep, capsys):
    assert significance.interim_looks(MOST) == [3, 5, 8]
    sweep("ddp", alike(0.001))
    sweep("fsdp", [1.1 * rate for rate in alike(0.002)])
    found = sweep("pdp", [1.3 * rate for rate in alike(0.003)])
    over = settling()
    assert [over(found, blocks) for blocks in (0, 1, 2)] == [False] * 3
    assert capsys.readouterr().err == ""
    assert over(found, 3)
    assert capsys.readouterr().err == "3 blocks of at most 8: settled\n"
    assert [over(found, blocks) for blocks in (4, 5)] == [True] * 2  # and stays so, without another look
    assert capsys.readouterr().err == ""


def test_it_goes_on_while_a_pair_is_open_and_says_which(sweep, capsys):
    sweep("ddp", alike(0.05))
    sweep("fsdp", [1.01 * rate for rate in alike(0.05)[::-1]])
    found = sweep("pdp", [9.0 * rate for rate in alike(0.05)])
    over = settling()
    assert [over(found, blocks) for blocks in (3, 4, 5)] == [False] * 3
    assert capsys.readouterr().err.splitlines() == [
        "3 blocks of at most 8: not settled between ddp and fsdp",
        "5 blocks of at most 8: not settled between ddp and fsdp",
    ]


def test_of_many_open_pairs_it_names_three(sweep, capsys):
    lots = {"ddp": (8, 10, 12), "fsdp": (10, 12, 8), "hsdp": (12, 8, 10), "pdp": (8, 12, 10)}
    for name, rates in lots.items():
        found = sweep(name, [100.0 * rate for rate in rates])
    assert not settling()(found, 3)
    assert capsys.readouterr().err == (
        "3 blocks of at most 8: not settled between ddp and fsdp; ddp and hsdp; ddp and pdp, and 3 other pairs\n"
    )


def test_tied_is_what_differs_by_at_most_the_share_that_was_asked_for(sweep):
    """And is known to: runs that differ by much more from each other say nothing."""
    sweep("ddp", [1000.0, 1002.0, 1000.0])
    found = sweep("fsdp", [1001.0, 1000.0, 1002.0])
    assert settling(tied_within=0.02)(found, 3)
    assert not settling(tied_within=0.0)(found, 3)
    assert not settling(tied_within=0.001)(found, 3)


@pytest.mark.parametrize("sign", [1, -1])
def test_tied_is_in_both_directions(sweep, sign):
    """One is perhaps a fifth slower, and at most one per cent faster."""
    sweep("ddp", [1000.0] * 3)
    found = sweep("fsdp", [1000.0 * math.exp(sign * share) for share in (0.125, 0.1, 0.075)])
    assert not settling(tied_within=0.02)(found, 3)
    assert settling(tied_within=0.25)(found, 3)


def test_with_what_has_failed_there_is_nothing_to_settle(sweep):
    sweep("ddp", alike(0.001))
    sweep("fsdp", [1.1 * rate for rate in alike(0.002)])
    found = sweep("pdp", [None] * MOST)
    assert settling()(found, 3)


def test_an_alternative_that_failed_now_and_then_needs_more_runs(sweep):
    sweep("ddp", alike(0.001)[:3])
    found = sweep("fsdp", [1100.0, None, None])
    assert not settling()(found, 3)


@pytest.mark.parametrize("rates", [alike(0.3), [None] * MOST], ids=["ok", "failed"])
def test_a_single_alternative_ends_at_the_first_look(sweep, rates, capsys):
    found = sweep("ddp", rates)
    over = settling()
    assert [over(found, blocks) for blocks in (1, 2, 3)] == [False, False, True]
    assert capsys.readouterr().err == "3 blocks of at most 8: nothing to compare\n"
