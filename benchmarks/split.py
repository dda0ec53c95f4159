"""Few long runs or many short ones: which narrow the interval of a ratio most in a given time.

    python -m benchmarks.split                                    # gpt_tiny: 5 minutes on two cores
    python -m benchmarks.split model=gpt_small train.steps=20     # a model of a second a step
    python -m benchmarks.split --sweep outputs/<sweep>            # the runs of an earlier call

The runs are long ones, and of each its first steps are taken for a short one: its throughput is that of the steps after
the warm-up that is found in those alone. How much such runs differ within blocks gives the interval of a ratio; how
long one would have taken is what a run takes besides its steps, and these steps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import numpy as np
from scipy import stats

import ptdbench
from benchmarks.script import parser_of, swept
from ptdbench.comparison import variation
from ptdbench.comparison.significance import LEVEL
from ptdbench.measure.timing import warmup_end
from ptdbench.records.load import Run

#: Steps that a run might have.
STEPS = (10, 15, 20, 30, 40, 60)

#: Seconds for which the runs of each layout are had.
BUDGET = 40.0


def step_seconds(run: Run) -> np.ndarray:
    """Seconds of each step, the first one included; a step takes as long as its slowest rank."""
    seconds = np.asarray(run.series("step_seconds"), dtype=np.float64)
    return seconds if seconds.ndim == 1 else seconds.max(axis=1)


def besides_steps(runs: Sequence[Run]) -> float:
    """Seconds that a run takes besides its steps: the median over all but the last, of which it is not known."""
    ordered = sorted(runs, key=lambda run: str(run["started"]))
    began = [datetime.fromisoformat(str(run["started"])).timestamp() for run in ordered]
    took = [after - before for before, after in pairwise(began)]
    return median(seconds - float(step_seconds(run).sum()) for seconds, run in zip(took, ordered[:-1], strict=True))


def rows(runs: Sequence[Run]) -> Iterator[str]:
    """A line for each length: how much such runs differ, what one takes, and the interval after :data:`BUDGET`."""
    fixed = besides_steps(runs)
    for steps in (steps for steps in STEPS if steps <= min(len(step_seconds(run)) for run in runs)):
        samples: dict[str, dict[Hashable, float]] = {}
        taken = []
        for run in runs:
            seconds = step_seconds(run)[:steps]
            timed = seconds[warmup_end(seconds.tolist(), run["config"]["train"]["warmup_steps"]) :]
            samples.setdefault(run["parallel"], {})[run["config"]["repeat"]["block"]] = 1 / float(timed.mean())
            taken.append(fixed + float(seconds.sum()))
        deviation = variation.noise([*samples.values()]).paired.deviation
        repeats = BUDGET / mean(taken)
        quantile = stats.t.ppf(1 - LEVEL / 2, max(repeats - 1, 1) * (len(samples) - 1))
        width = math.expm1(quantile * deviation * math.sqrt(2 / repeats))
        yield f"{steps:5} {deviation:10.1%} {mean(taken):9.1f} {repeats:8.1f} {width:10.1%}"


def main() -> int:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--sweep", type=Path, help="judge the runs of an earlier call")
    parser.add_argument("overrides", nargs="*", help="what the runs are; later ones win")
    options = parser.parse_args()
    words = ["model=gpt_tiny", "parallel=ddp,pdp,fsdp", "repeat=10", *options.overrides]
    sweep = options.sweep or swept("split", words)
    found = ptdbench.load(sweep)
    runs = [run for run in (found if isinstance(found, list) else [found]) if run["status"] == "ok"]
    print(f"{len(runs)} runs; besides its steps a run takes {besides_steps(runs):.1f} s")
    print(f"steps within block  s a run  in {BUDGET:.0f} s  interval ±")
    print(*rows(runs), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
