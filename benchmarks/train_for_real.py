"""Whether real training comes to a result: digits to an accuracy, text to its bits per byte, with their curves.

    python benchmarks/train_for_real.py
    python benchmarks/train_for_real.py --image curves.png

Runs ``experiment=digits_resnet18`` under ddp and fsdp and ``experiment=stdlib_gpt_tiny`` under pdp, each on two ranks
and as a person would type it, and holds them against what is required of them: 97 % of the held-out digits within five
minutes, the two strategies within half a point; and 30 % fewer bits per byte than a bigram model that has counted the
same files.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.script import judged, parser_of, read, trained
from ptdbench.data.text import Text
from ptdbench.setup import run_spec

#: The requirements: share of the digits, difference between strategies, bits per byte against a bigram's, seconds.
ACCURACY, APART, AGAINST_BIGRAM, SECONDS = 0.97, 0.005, 0.7, 300


@dataclass(frozen=True)
class Result:
    """One run."""

    name: str  #: What was trained, and how.
    seconds: float  #: From the command to its exit.
    record: dict[str, Any]  #: What it left.

    def last(self, figure: str) -> float:
        """A figure of its last evaluation."""
        return self.record["evaluations"][-1][figure]

    def curve(self, figure: str) -> tuple[list[int], list[float]]:
        """Steps, and the figure after them."""
        found = self.record["evaluations"]
        return [one["step"] for one in found], [one[figure] for one in found]


def main() -> int:
    """Print the figures; 1 if they miss a requirement."""
    parser = parser_of(__doc__)
    parser.add_argument("--image", type=Path, help="draw the curves there")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        ddp, fsdp = (_train("digits_resnet18", strategy, Path(folder)) for strategy in ("ddp", "fsdp"))
        text = _train("stdlib_gpt_tiny", "pdp", Path(folder))
    bigram = bigram_bits_per_byte()
    for result, figure in ((ddp, "top1"), (fsdp, "top1"), (text, "bits_per_byte")):
        curve = "  ".join(f"{step}: {value:.4g}" for step, value in zip(*result.curve(figure), strict=True))
        print(f"{result.name}, {figure} after steps  {curve}")
    print(f"a bigram model that has counted the same files  {bigram:.3f} bits per byte")
    runs, within = (ddp, fsdp, text), f"< {SECONDS}"
    accuracy, share = ddp.last("top1"), text.last("bits_per_byte") / bigram
    passed = [
        judged(f"digits under ddp, held-out accuracy: {accuracy:.4g}", f">= {ACCURACY}", accuracy >= ACCURACY),
        judged(f"fsdp minus ddp: {fsdp.last('top1') - accuracy:.4g}", f"within {APART}", _close(ddp, fsdp)),
        judged(f"text against the bigram model: {share:.4g}", f"<= {AGAINST_BIGRAM}", share <= AGAINST_BIGRAM),
        *(judged(f"{run.name}, seconds: {run.seconds:.4g}", within, run.seconds < SECONDS) for run in runs),
    ]
    if options.image:
        _draw(options.image, ddp, fsdp, text, bigram)
    return int(not all(passed))


def bigram_bits_per_byte(*overrides: str) -> float:
    """What counting pairs of bytes comes to on the files that ``experiment=stdlib_gpt_tiny`` holds out, or others.

    Every pair is counted once more than it occurs (Laplace), so that those that occur in the held-out files only have a
    probability too.
    """
    training = run_spec.specify(read("experiment=stdlib_gpt_tiny", *overrides), None).training
    assert training
    data = training.data
    assert isinstance(data, Text)
    assert data.held_out
    pairs = np.bincount(256 * data.tokens[:-1].astype(np.int64) + data.tokens[1:], minlength=1 << 16)
    counts = pairs.reshape(256, 256) + 1
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    before, after = data.held_out.samples(0, len(data.held_out))
    return float(bits[before.numpy(), after.numpy()].mean())


def _train(experiment: str, strategy: str, folder: Path) -> Result:
    directory = folder / f"{experiment}_{strategy}"
    started = time.perf_counter()
    record = trained(directory, f"experiment={experiment}", f"parallel={strategy}", "device=cpu")
    return Result(f"{experiment} {strategy}", time.perf_counter() - started, record)


def _close(one: Result, other: Result) -> bool:
    # Shares of a few hundred images: compared as numbers of images, which have no rounding.
    samples = one.last("samples")
    return abs(round(one.last("top1") * samples) - round(other.last("top1") * samples)) <= math.floor(APART * samples)


def _draw(path: Path, ddp: Result, fsdp: Result, text: Result, bigram: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for result, style in ((ddp, "o-"), (fsdp, "s--")):
        steps, shares = result.curve("top1")
        left.plot(steps, [100 * share for share in shares], style, label=result.record["parallel"])
    left.axhline(100 * ACCURACY, color="grey", linestyle=":", label=f"{100 * ACCURACY:.0f} %")
    left.set(title="digits_resnet18, two CPU ranks", xlabel="step", ylabel="held-out accuracy, %")
    right.plot(*text.curve("bits_per_byte"), "o-", label=text.record["parallel"])
    right.axhline(bigram, color="grey", label="bigram model")
    right.axhline(AGAINST_BIGRAM * bigram, color="grey", linestyle=":", label="30 % below it")
    right.set(title="stdlib_gpt_tiny, two CPU ranks", xlabel="step", ylabel="held-out bits per byte")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
