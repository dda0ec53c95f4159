from dataclasses import replace

import pytest

from tests.refusals import refusal_of
from tests.virtual.conftest import DEVICE


def test_settings_are_what_the_library_reads_with_peaks_on_record():
    settings = DEVICE.settings()
    assert settings.endswith(";name=virtual NVIDIA Test 20GB")
    figures = dict(setting.split("=") for setting in settings.split(";")[:-1])
    assert (figures["major"], figures["minor"]) == ("9", "0")
    assert float(figures["bandwidth"]) == 1e12
    assert float(figures["bf16"]) == 800e12
    assert int(figures["memory"]) == int(figures["allocatable"]) == 20 << 30
    assert ";allocatable=7;" in replace(DEVICE, allocatable=7).settings()
    peaks = replace(DEVICE, name="Tesla V100-SXM2-32GB", peaks={"fp16": 1e14}).peaks
    assert peaks == {"fp32": pytest.approx(15.7e12), "fp16": 1e14}


@pytest.mark.parametrize(("changed", "message"), [
    ({"memory": 0}, "memory=0: must be a whole number of at least 1"),
    ({"allocatable": 0}, "allocatable=0: must be a whole number of at least 1"),
    ({"capability": "9"}, 'capability=9: must be two numbers; try "9.0"'),
    ({"context": 30 << 30}, "context=32212254720: must be less than the memory, 21474836480 bytes"),
    ({"bandwidth": 0.0}, "bandwidth=0.0: must be above 0"),
    ({"peaks": {"bf16": 0}}, "peaks.bf16=0: must be above 0"),
    ({"link": -1.0}, "link=-1.0: must be at least 0"),
    ({"name": " "}, "name= : must be a name"),
    ({"peaks": {"bf15": 1e12}}, "peaks.bf15=1000000000000.0: no such dtype; try bf16"),
])  # fmt: skip
def test_impossible_figure_is_refused(changed, message):
    assert refusal_of(replace, DEVICE, **changed) == message
