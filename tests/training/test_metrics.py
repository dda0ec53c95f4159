from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from ptdbench.measure import ceiling
from ptdbench.measure.ceiling import Measured
from ptdbench.measure.hardware import environment
from ptdbench.records.schema import Metrics
from ptdbench.training import metrics as train_metrics
from ptdbench.training.metrics import Measurement, against_higher_ceiling, metrics
from ptdbench.workloads import train
from tests.conftest import composed
from tests.parallel.ranks import each, on_ranks
from tests.workloads.made_job import job

# Two ranks, the first step slow; the others take 2.0 s in all.
MEASURED = Measurement(
    step_seconds=[9.0, 0.5, 0.25, 0.25, 1.0],
    samples_per_step=16,
    tokens_per_sample=128,
    flops_per_sample=3e12,
    flops_reason=None,
    world_size=2,
    device_name="NVIDIA A100-SXM4-80GB",
    dtype="bf16",
    warmup_steps=1,
)


def figures(**changes: Any) -> Metrics:
    return metrics(replace(MEASURED, **changes))


def test_figures_by_hand():
    results = metrics(MEASURED)
    assert results.samples_per_second == pytest.approx(4 * 16 / 2.0)
    assert results.samples_per_second_per_device == pytest.approx(16)
    assert results.tokens_per_second == pytest.approx(4096)
    assert results.tokens_per_second_per_device == pytest.approx(2048)
    assert results.model_flops_per_second == pytest.approx(96e12)
    assert results.mfu == pytest.approx(48 / 312)  # per device, of an A100's dense bf16 peak
    assert (results.mfu_reason, results.mfu_of_bf16) == (None, None)
    assert (results.step_seconds.median, results.step_seconds.mean) == (pytest.approx(0.375), pytest.approx(0.5))


def test_mfu_by_half_of_attention_of_fp8_and_of_images():
    results = figures(masked_flops_per_sample=1e12)
    assert results.causal_flops_per_second == pytest.approx(64e12)
    assert (results.mfu, results.mfu_causal) == (pytest.approx(48 / 312), pytest.approx(32 / 312))
    for unknown in (figures(), figures(flops_per_sample=None, masked_flops_per_sample=0.0)):
        assert unknown.causal_flops_per_second is unknown.mfu_causal is None
    without = figures(masked_flops_per_sample=0.0)
    assert without.mfu_causal == without.mfu
    results = figures(device_name="NVIDIA H200", dtype="fp8")
    assert (results.mfu, results.mfu_of_bf16) == (pytest.approx(48 / 1978.9), pytest.approx(48 / 989.4))
    results = figures(tokens_per_sample=None)
    assert results.tokens_per_second is results.tokens_per_second_per_device is None
    assert results.samples_per_second == pytest.approx(32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_name": "cpu"}, "CPU"),
        ({"device_name": "NVIDIA Unheard Of"}, "NVIDIA Unheard Of"),
        ({"dtype": "fp64"}, "fp64"),
        ({"flops_per_sample": None, "flops_reason": "a model of one's own"}, "a model of one's own"),
        ({"flops_per_sample": None}, "FLOPs are unknown"),
        ({"step_seconds": []}, "no step"),
    ],
)
def test_mfu_is_null_with_its_reason(change, reason):
    results = figures(**change)
    assert results.mfu is None
    assert reason in results.mfu_reason
    assert (results.samples_per_second is None) == (results.step_seconds.median is None) == (reason == "no step")


def test_the_peak_of_ranks_with_different_gpus_is_not_that_of_rank_0(monkeypatch):
    names = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: names[0])
    monkeypatch.setattr(train_metrics, "dtype_of", lambda _: "bf16")
    job: Any = SimpleNamespace(
        device=torch.device("cuda", 0),
        peers=[SimpleNamespace(device=f"cuda:{place} {name}") for place, name in enumerate(names)],
        spec=SimpleNamespace(virtual=None),
    )
    both = " and ".join(names)
    assert train_metrics.device_name(job) == both
    assert train_metrics.ceiling_of_run(job) == (None, f"the ranks have different GPUs: {both}")


def test_the_share_of_the_ceiling_by_hand_and_why_there_is_none():
    ceiling = (Measured(240e12, "8x8x8", beside_load=True), None)

    def related(**changes: Any) -> tuple[Any, ...]:
        results = figures(**changes)
        ceiling = results.ceiling_flops_per_second, results.ceiling_beside_load
        return *ceiling, results.ceiling_reason, results.share_of_ceiling

    assert related(ceiling=ceiling) == (240e12, True, None, pytest.approx(48 / 240))  # 48 TFLOP/s on each device
    assert related(ceiling=(None, "nobody has measured it")) == (None, None, "nobody has measured it", None)
    assert related(flops_per_sample=None, ceiling=ceiling) == (240e12, True, None, None)


METRICS = Metrics(
    model_flops_per_second=72e9, ceiling_flops_per_second=30.1e9, ceiling_beside_load=True, share_of_ceiling=36 / 30.1
)


def test_a_higher_one_counts():
    figures, remark = against_higher_ceiling(METRICS, 2, Measured(45e9, "512x512x512", beside_load=False))
    assert remark == "ceiling re-measured: was 30.1 GFLOP/s, measured under load; now 45.0 GFLOP/s"
    assert (figures.ceiling_flops_per_second, figures.ceiling_beside_load) == (45e9, False)
    assert figures.share_of_ceiling == pytest.approx(0.8)


def test_a_share_that_stays_above_is_neither_cut_nor_left_without_a_reason():
    quiet = msgspec.structs.replace(METRICS, ceiling_beside_load=False)
    figures, remark = against_higher_ceiling(quiet, 2, Measured(32e9, "", beside_load=False))
    assert figures.share_of_ceiling == pytest.approx(36 / 32)
    assert remark.startswith("ceiling re-measured: was 30.1 GFLOP/s; now 32.0 GFLOP/s; the model reaches 112.5% of it")
    assert "model FLOPs include the half of attention" in remark
    _, remark = against_higher_ceiling(METRICS, 2, Measured(32e9, "", beside_load=True))
    assert remark.endswith("the model reaches 112.5% of it: other load slowed down the products")


def test_a_lower_one_does_not_count_and_one_may_be_impossible_to_measure():
    figures, remark = against_higher_ceiling(METRICS, 2, Measured(20e9, "", beside_load=False))
    assert (figures.ceiling_flops_per_second, figures.ceiling_beside_load) == (30.1e9, True)
    assert "20.0 GFLOP/s, not above the earlier 30.1 GFLOP/s, measured under load; the model" in remark
    figures, remark = against_higher_ceiling(METRICS, 2, "workload.shapes=512x512x512: takes 9 GiB")
    assert figures == msgspec.structs.replace(METRICS, share_of_ceiling=pytest.approx(36 / 30.1))
    assert remark.startswith("ceiling exceeded, but not re-measured: workload.shapes=512x512x512: takes 9 GiB; the ")


def trained(directory: Path, earlier: float) -> tuple[Any, int, float]:
    """In a rank: the outcome of a run, how often products were measured, and the ceiling that is kept then."""
    options = composed("model=toy", "device=cpu", "parallel=ddp", "train.steps=4", "profile.steps=0")
    with mock.patch.dict("os.environ", XDG_CACHE_HOME=f"{directory}-cache"):
        key = ceiling.key_of(environment("cpu"), torch.device("cpu"), "fp32")
        ceiling.store_ceiling(key, Measured(earlier, "2x2x2", beside_load=True))
        measured = mock.Mock(wraps=ceiling.measure)
        with mock.patch.object(ceiling, "measure", measured), mock.patch.dict(ceiling.AUTO_SHAPES, cpu=("64",)):
            outcome = train.Train()(job(directory, options))
        kept = ceiling.look_up(key)
        return (outcome.metrics, outcome.remarks), measured.call_count, kept.flops_per_second


@pytest.mark.ranks
def test_a_run_that_passes_it_measures_it_again_once_and_keeps_the_higher_one_and_one_below_does_not(tmp_path):
    passes, stays_below = runs = [(tmp_path / "passes", 1.0), (tmp_path / "stays below", 1e30)]
    of_first, of_other = on_ranks(2, each, trained, runs)
    (figures, remarks), times, kept = of_first[passes]
    assert (times, of_other[passes][1]) == (1, 1)
    assert figures.ceiling_flops_per_second == kept > 1.0
    assert figures.share_of_ceiling == pytest.approx(figures.model_flops_per_second / 2 / kept)
    assert remarks.ceiling.startswith("ceiling re-measured: was 1e-09 GFLOP/s, measured under load")
    (_, remarks), times, kept = of_first[stays_below]
    assert (times, kept, remarks.ceiling) == (0, 1e30, None)
