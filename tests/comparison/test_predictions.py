"""The order of predicted steps."""

import math

import pytest

from ptdbench.comparison.ranking import RESIDUAL, prediction_error, rank_predicted
from tests.report.made import made

ERRORS = {"products": 0.1, "messages": 0.2}


def plan(name, seconds, products=1.0):
    """A plan whose step spends a share of its time on products, and the rest on messages."""
    parts = {"products": seconds * products, "messages": seconds * (1 - products)}
    step = {"step_seconds": seconds, "tokens_per_second": 1000 / (seconds or 1), "parts": parts, "errors": ERRORS}
    fields = {"directory": name, "kind": "planned"}
    return made({**fields, "predicted": step if seconds else {"reason": "none"}})


def test_errors_cancel_as_far_as_steps_are_made_of_the_same():
    alike = prediction_error(plan("a", 1.0, 0.5).predicted, plan("b", 2.0, 0.5).predicted)
    assert alike == pytest.approx(math.sqrt(2) * RESIDUAL)
    apart = prediction_error(plan("a", 1.0, 1.0).predicted, plan("b", 2.0, 0.5).predicted)
    assert apart == pytest.approx(math.sqrt(2 * RESIDUAL**2 + (0.1 * 0.5) ** 2 + (0.2 * 0.5) ** 2))


def test_ranks_overlap_where_intervals_do():
    places = rank_predicted(
        [plan("slow", 1.3), plan("none", 0), plan("first", 1.0), plan("near", 1.02), plan("mixed", 1.1, 0.2)]
    )
    names = [place.alternative.runs[0].directory for place in places]
    assert names == ["first", "near", "mixed", "slow", "none"]
    assert [place.rank for place in places] == [(1, 3), (1, 3), (1, 4), (3, 4), None]
    near = places[1].against_best
    assert near.ratio == pytest.approx(1 / 1.02)
    assert math.log(near.high / near.ratio) == pytest.approx(1.96 * math.sqrt(2) * RESIDUAL, rel=1e-3)
    assert rank_predicted([plan("single", 1.0)])[0].rank is None
