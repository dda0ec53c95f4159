"""Comparing predicted steps: which of them is faster than another, given the errors of what they are made of.

A step is made of products, memory-bound work, messages and so on. The error of a part is common to all steps on a
device, so it cancels as far as two steps have the same share of it; what is left of each step's own is the residual.
"""

import math
from collections.abc import Sequence
from itertools import permutations
from statistics import NormalDist

from ptdbench.comparison.alternatives import Alternative
from ptdbench.comparison.ranking import Standing
from ptdbench.comparison.significance import LEVEL, Comparison, ranks
from ptdbench.records.run_record import RunRecord
from ptdbench.records.schema import Predicted

#: Standard deviation of the logarithm of a predicted step that no part explains: kernels and gaps of its own.
RESIDUAL = 0.012


def error(step: Predicted, other: Predicted) -> float:
    """Return the standard deviation of the logarithm of two predicted steps' ratio, both with times."""
    first, second = ({name: spent / (each.step_seconds or 1.0) for name, spent in (each.parts or {}).items()}
                     for each in (step, other))  # fmt: skip
    shares = {**(other.errors or {}), **(step.errors or {})}
    parts = (share * (first.get(name, 0.0) - second.get(name, 0.0)) for name, share in shares.items())
    return math.sqrt(sum(part**2 for part in parts) + 2 * RESIDUAL**2)


def rank(plans: Sequence[RunRecord]) -> list[Standing]:
    """Rank plans by their predicted steps, fastest first; those without a time come last.

    Ranges of ranks hold simultaneously, intervals one by one. Only plans of the same global batch may be compared, so
    rates are.
    """
    timed = sorted((plan for plan in plans if rate_of(plan)), key=lambda plan: -rate_of(plan))
    level = LEVEL / max(1, math.comb(len(timed), 2))
    wide, narrow = (NormalDist().inv_cdf(1 - chance / 2) for chance in (level, LEVEL))
    slower: list[set[int]] = [set() for _ in timed]
    for fast, slow in permutations(range(len(timed)), 2):
        difference = math.log(rate_of(timed[fast]) / rate_of(timed[slow]))
        if difference > wide * error(timed[fast].predicted, timed[slow].predicted):
            slower[slow].add(fast)
    places = [
        Standing(
            alternative=Alternative([plan], {}),
            rank=ends if len(timed) > 1 else None,
            rate=rate_of(plan),
            ratio=rate_of(plan) / rate_of(timed[0]),
            against_best=_against(plan, timed[0], narrow) if number else None,
            number=number,
            faster=slower[number],
        )
        for number, (plan, ends) in enumerate(zip(timed, ranks(slower), strict=True))
    ]
    return [*places, *(Standing(Alternative([plan], {})) for plan in plans if not rate_of(plan))]


def rate_of(plan: RunRecord) -> float:
    """Return the predicted throughput of a plan; 0 without one."""
    return plan.predicted.tokens_per_second or plan.predicted.samples_per_second or 0.0


def _against(plan: RunRecord, best: RunRecord, quantile: float) -> Comparison:
    margin = math.exp(quantile * error(plan.predicted, best.predicted))
    ratio = rate_of(plan) / rate_of(best)
    return Comparison(ratio, ratio / margin, ratio * margin, runs=0, is_paired=False, detectable=margin - 1)
