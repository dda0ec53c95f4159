"""A run that passes its ceiling: measured again once, the higher one counts, and what happened is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from omegaconf import DictConfig

from ptdbench.measure import ceiling, gemm
from ptdbench.measure.ceiling import Measured
from ptdbench.measure.hardware import environment
from ptdbench.training.passed import conclude
from ptdbench.workloads import train
from tests.conftest import composed
from tests.parallel.ranks import on_ranks
from tests.workloads.made_job import job

METRICS = {
    "model_flops_per_second": 72e9, "ceiling_flops_per_second": 30.1e9, "ceiling_beside_load": True,
    "share_of_ceiling": 36 / 30.1, "ceiling_reason": None, "mfu": None,
}  # fmt: skip


def test_a_higher_one_counts():
    metrics, remark = conclude(METRICS, 2, Measured(45e9, "512x512x512", beside_load=False))
    assert remark == "ceiling re-measured: was 30.1 GFLOP/s, taken beside other load; now 45.0 GFLOP/s"
    assert (metrics["ceiling_flops_per_second"], metrics["ceiling_beside_load"]) == (45e9, False)
    assert (metrics["share_of_ceiling"], metrics["mfu"]) == (pytest.approx(0.8), None)


def test_a_share_that_stays_above_is_neither_cut_nor_left_without_a_reason():
    metrics, remark = conclude({**METRICS, "ceiling_beside_load": False}, 2, Measured(32e9, "", beside_load=False))
    assert metrics["share_of_ceiling"] == 36 / 32
    assert remark.startswith("ceiling re-measured: was 30.1 GFLOP/s; now 32.0 GFLOP/s; the model reaches 112.5% of it")
    assert "model FLOPs count attention in full" in remark
    _, remark = conclude(METRICS, 2, Measured(32e9, "", beside_load=True))
    assert remark.endswith("the model reaches 112.5% of it: other load slowed the products down")


def test_a_lower_one_does_not_count_and_one_may_be_impossible_to_measure():
    metrics, remark = conclude(METRICS, 2, Measured(20e9, "", beside_load=False))
    assert (metrics["ceiling_flops_per_second"], metrics["ceiling_beside_load"]) == (30.1e9, True)
    assert "20.0 GFLOP/s is not above the earlier 30.1 GFLOP/s, taken beside other load; the model" in remark
    metrics, remark = conclude(METRICS, 2, "workload.shapes=512x512x512: takes 9 GiB")
    assert metrics == {**METRICS, "share_of_ceiling": pytest.approx(36 / 30.1)}
    assert remark.startswith("ceiling passed, and not re-measured: workload.shapes=512x512x512: takes 9 GiB; the ")


def trained(directory: Path, options: DictConfig, cache: str, known: float) -> tuple[Any, int, float]:
    """The fields of a run, how often products were measured, and the ceiling that is kept then."""
    with mock.patch.dict("os.environ", XDG_CACHE_HOME=cache):
        key = ceiling.key(environment("cpu"), None, "fp32", 1)
        ceiling.keep(key, Measured(known, "2x2x2", beside_load=True))
        measured = mock.Mock(wraps=gemm.measure)
        with mock.patch.object(gemm, "measure", measured), mock.patch.dict(gemm.AUTO_SHAPES, cpu=("64",)):
            outcome = train.Train()(job(directory, options))
        kept = ceiling.look_up(key)
        assert kept
        return outcome.fields, measured.call_count, kept.flops_per_second


TOY = ("model=toy", "device=cpu", "parallel=ddp", "train.steps=4", "profile.steps=0")


@pytest.mark.ranks
def test_a_run_that_passes_it_measures_it_again_once_and_keeps_the_higher_one(tmp_path):
    (fields, times, kept), (_, elsewhere, _) = on_ranks(
        2, trained, tmp_path / "run", composed(*TOY), str(tmp_path / "cache"), 1.0
    )
    metrics = fields["metrics"]
    assert (times, elsewhere) == (1, 1)
    assert metrics["ceiling_flops_per_second"] == kept > 1.0
    assert metrics["share_of_ceiling"] == pytest.approx(metrics["model_flops_per_second"] / 2 / kept)
    assert fields["remarks"]["ceiling"].startswith("ceiling re-measured: was 1e-09 GFLOP/s, taken beside other load")


@pytest.mark.ranks
def test_a_run_below_it_does_not(tmp_path):
    (fields, times, kept), _ = on_ranks(2, trained, tmp_path / "run", composed(*TOY), str(tmp_path / "cache"), 1e30)
    assert (times, kept) == (0, 1e30)
    assert "ceiling" not in fields["remarks"]
