from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptdbench.measure.results import Ceiling
from ptdbench.records.schema import Metrics
from ptdbench.setup.training_spec import Flops
from ptdbench.training import metrics as train_metrics
from ptdbench.training.metrics import Measurement, metrics

# Two ranks, whose steps take 2.0 s in all.
MEASURED = Measurement(
    seconds=[0.5, 0.25, 0.25, 1.0], samples_per_step=16, tokens_per_sample=128, flops=Flops(3e12),
    world_size=2, device_name="NVIDIA A100-SXM4-80GB", dtype="bf16",
)  # fmt: skip


def figures(**changes: Any) -> Metrics:
    return metrics(replace(MEASURED, **changes))


def test_figures_by_hand():
    results = metrics(MEASURED)
    assert results.samples_per_second == pytest.approx(4 * 16 / 2.0)
    assert results.tokens_per_second == pytest.approx(4096)
    assert results.model_flops_per_second == pytest.approx(96e12)
    assert results.mfu == pytest.approx(48 / 312)  # per device, of an A100's dense bf16 peak
    assert results.mfu_reason is None
    assert (results.step_seconds.median, results.step_seconds.mean) == (pytest.approx(0.375), pytest.approx(0.5))


def test_mfu_by_half_of_attention_of_fp8_and_of_images():
    results = figures(flops=Flops(3e12, 1e12))
    assert (results.mfu, results.mfu_causal) == (pytest.approx(48 / 312), pytest.approx(32 / 312))
    for unknown in (figures(), figures(flops=Flops(None, 0.0))):
        assert unknown.mfu_causal is None
    without = figures(flops=Flops(3e12, 0.0))
    assert without.mfu_causal == without.mfu
    results = figures(device_name="NVIDIA H200", dtype="fp8")
    assert results.mfu == pytest.approx(48 / 1978.9)
    results = figures(tokens_per_sample=None)
    assert results.tokens_per_second is None
    assert results.samples_per_second == pytest.approx(32)


@pytest.mark.parametrize(("change", "reason"), [
    ({"device_name": "cpu"}, "CPU"),
    ({"device_name": "NVIDIA Unheard Of"}, "NVIDIA Unheard Of"),
    ({"dtype": "fp64"}, "fp64"),
    ({"flops": Flops(reason="a model of one's own")}, "a model of one's own"),
    ({"flops": Flops()}, "FLOPs are unknown"),
    ({"seconds": []}, "no step"),
])  # fmt: skip
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
    assert train_metrics.ceiling_of_run(job) is None


def test_the_share_of_the_ceiling_by_hand():
    ceiling = Ceiling(
        "NVIDIA H200", "550", "2.15", "bf16", None, ranks=2, shape="8x8x8", flops_per_second=240e12,
        share_of_peak=None, peak_reason=None,
    )  # fmt: skip

    def related(**changes: Any) -> tuple[Any, ...]:
        results = figures(**changes)
        return results.ceiling_flops_per_second, results.share_of_ceiling

    assert related(ceiling=ceiling) == (240e12, pytest.approx(48 / 240))  # 48 TFLOP/s on each device
    assert related(ceiling=None) == (None, None)
    assert related(flops=Flops(), ceiling=ceiling) == (240e12, None)
