import re

import pytest

from ptdbench.peaks import DENSE_PEAKS, dense_peak
from tests.conftest import ROOT


@pytest.mark.parametrize(("name", "dtype", "tflops"), [
    ("NVIDIA A100-SXM4-80GB", "bf16", 312), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
    ("NVIDIA A100-SXM4-80GB", "tf32", 156), ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
    ("NVIDIA H200", "fp8", 1978.9), ("NVIDIA B300 SXM6 AC", "fp8", 4500), ("Tesla V100-SXM2-32GB", "fp16", 125),
    ("AMD Instinct MI250X", "bf16", 191.5),  # of a die
])  # fmt: skip
def test_a_peak_is_that_of_the_data_sheet(name, dtype, tflops):
    assert dense_peak(name, dtype) == (pytest.approx(tflops * 1e12), None)


def test_a_peak_of_another_name_or_dtype_is_not_guessed():
    unknown = [
        "NVIDIA H200 NVL 2g.35gb",  # no more is a slice of this one
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice is not the device
        "NVIDIA A100-SXM-64GB",  # another chip than the A100 of the data sheet
        "Tesla V100-SXM2-32GB",  # a known device without such units
    ]
    for name in unknown:
        assert dense_peak(name, "bf16") == (None, f"no data-sheet peak on record for {name} in bf16")
    assert dense_peak("cpu", "fp32") == (None, "a CPU has no data-sheet peak")


@pytest.mark.parametrize("name", DENSE_PEAKS)
def test_peaks_are_dense_and_ordered(name):
    peaks = DENSE_PEAKS[name]
    assert set(peaks) <= {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert peaks.get("fp8", 2 * peaks["fp16"]) == pytest.approx(2 * peaks["fp16"], rel=0.02)  # everywhere so far
    assert peaks["fp32"] <= peaks.get("tf32", peaks["fp32"]) < peaks["fp16"] == peaks.get("bf16", peaks["fp16"])


def test_every_virtual_gpu_has_peaks_on_record():
    texts = (path.read_text() for path in ROOT.glob("conf/virtual/*.yaml"))
    names = {match[1] for text in texts if (match := re.search(r"^  name: (.*?)  +#", text, re.MULTILINE))}
    assert len(names) == 19
    assert names <= DENSE_PEAKS.keys()
