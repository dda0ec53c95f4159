"""Sweeps whose runs Hydra's Optuna chooses by the results of the earlier ones."""

import json

import pytest
from omegaconf import OmegaConf

from ptdbench.records.record import objective_value
from ptdbench.records.run_record import typed
from tests import forked
from tests.launch.faulty import FAULTY
from tests.report.made import made

OPTUNA = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.n_trials=3")
SEEDED = (*OPTUNA, "hydra.sweeper.sampler.seed=1")
RUN = ("model=toy", "parallel=single", "train.steps=4", "device=cpu")


def rows(sweep):
    return [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]


@pytest.mark.ranks
class TestOptuna:
    def test_it_is_told_each_runs_throughput_and_a_run_that_fails_ends_nothing(self, tmp_path):
        search = ("optimizer.lr=interval(1e-4,1e-2)", "train.micro_batch=16,5", "hydra.sweep.dir=sweep")
        done = forked.with_ranks(*SEEDED, *RUN, *search, cwd=tmp_path)
        sweep, records = tmp_path / "sweep", rows(tmp_path / "sweep")
        names = [record["directory"].rpartition("/")[2].partition("_lr-")[0] for record in records]
        assert names == ["0_toy_single", "1_toy_single", "2_toy_single"]
        assert {record["config"]["train"]["micro_batch"] for record in records} == {16, 5}  # as this seed draws them
        for record in records:
            assert (record["status"] == "ok") == (record["config"]["train"]["micro_batch"] == 16)
        assert len({record["config"]["optimizer"]["lr"] for record in records}) == 3
        assert done.returncode == 1  # not all were ok
        best = max((typed(record).throughput or 0, record["directory"]) for record in records)
        found = OmegaConf.load(sweep / "optimization_results.yaml")
        assert found.best_value == best[0]  # and not the smallest, which is Optuna's own default
        assert f"search       {sweep.relative_to(tmp_path)}/optimization_results.yaml" in done.stdout.splitlines()
        assert "Traceback" not in done.stdout + done.stderr

        again = forked.with_ranks("sweep.resume=sweep", cwd=tmp_path)  # of the same seed: it is told the same again
        assert again.returncode == 1
        assert rows(sweep) == records
        assert OmegaConf.load(sweep / "optimization_results.yaml") == found

    def test_where_no_run_is_ok_it_says_so_in_one_line(self, tmp_path):
        words = (*FAULTY, "+model.how=raise", "+model.rank=0", "parallel=single", "device=cpu", "optimizer.lr=1,2")
        done = forked.with_ranks(*OPTUNA, *words, "hydra.sweeper.n_trials=1", "hydra.sweep.dir=sweep", cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("hydra/sweeper=optuna: ended early: ")
        assert len(rows(tmp_path / "sweep")) == 1
        assert done.stdout.count("status\n") == 1  # the table all the same


def test_a_search_whose_runs_cannot_be_is_refused_before_the_first(tmp_path):
    search = ("model=toy", "model.width=0", "optimizer.lr=interval(1e-4,1e-2)")
    done = forked.train_py(*OPTUNA, *search, cwd=tmp_path)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert done.stderr.startswith("model.width=0: ")
    assert done.stderr.count("\n") == 1


RECORD = made({
    "metrics": {"tokens_per_second": None, "samples_per_second": 8.0},
    "evaluations": [{"loss": 2.0, "top1": 0.5}, {"loss": None, "top1": 0.75}, {"loss": 3.0, "top1": 0.25}],
})  # fmt: skip


def test_it_is_one_figure_of_the_record_if_that_is_ok_and_has_it():
    tokens = RECORD | {"metrics": {"tokens_per_second": 128.0, "samples_per_second": 8.0}}
    for record, name, expected in (
        (RECORD, "throughput", 8.0), (tokens, "throughput", 128.0), (RECORD, "held_out_loss", 2.0),
        (RECORD, "held_out_accuracy", 0.75), (RECORD | {"status": "failed"}, "throughput", None),
        (RECORD | {"evaluations": []}, "held_out_loss", None),
        (made({"metrics": None}), "throughput", None),
    ):  # fmt: skip
        assert objective_value(record, name) == expected
