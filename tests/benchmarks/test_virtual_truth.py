"""Reserved memory of virtual GPUs, against what has been published for real ones."""

import sys

import pytest

from benchmarks import tables, virtual_truth
from benchmarks.script import read
from ptdbench.setup import choices
from tests.conftest import ROOT
from tests.programs import call

#: Rows of benchmarks/virtual/published.csv without compilation, on 8 and on 128 GPUs, and one that is left out.
ROWS = ("0", "7", "4")
PUBLISHED = (sys.executable, "-m", "benchmarks", "virtual-truth", "published", "--only")


@pytest.mark.ranks
@pytest.mark.thorough
def test_eager_rows_are_within_three_percent(environ):
    done = call(*PUBLISHED, *ROWS, cwd=ROOT, environ=environ, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rows are off by" in done.stdout


def test_runs_that_were_measured_are_known_with_their_options_and_peaks():
    runs = [(device, figures) for device, _, figures in tables.of_gpu_check()]
    assert {device for device, _ in runs} <= set(virtual_truth.DEVICES)
    assert len(runs) >= 6
    for device, figures in runs:
        typed = virtual_truth.on_virtual(figures["overrides"])
        assert choices.virtual(read(*typed, f"virtual={virtual_truth.DEVICES[device]}")).gpu.name == device
        assert 0 < figures["peak_memory_bytes"] <= figures["peak_reserved_bytes"]
