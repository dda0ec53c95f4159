"""The ledger of predicted steps: what is written there is what would be predicted now."""

import pytest

from benchmarks import time_truth as subject


def test_predictions_are_those_of_the_ledger():
    rows = [*subject.rows()]
    expected = subject.written()
    assert {row.name for row in rows} == {*expected}
    changed = "a prediction has changed: make time-truth, and give the reason in CHANGELOG.md"
    for row in rows:
        assert row.prediction.seconds == pytest.approx(expected[row.name], rel=0.01), f"{row.name}: {changed}"
        assert row.path.stat().st_size < 200_000
