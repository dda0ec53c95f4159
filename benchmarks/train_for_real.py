"""Whether real training reaches a goal: an accuracy on digits, bits per byte on text.

    make train-for-real

Runs experiments as a person would type them, on two ranks. Good is 97 % of the held-out digits within five minutes, ddp
and fsdp within half a point; and 30 % fewer bits per byte than a bigram model that has counted the same files.
"""

import math
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.script import judged, keep, options, read, trained
from ptdbench.data.text import Text
from ptdbench.setup import run_spec

#: The requirements: share of the digits, difference between layouts, bits per byte against a bigram's, seconds.
ACCURACY, APART, AGAINST_BIGRAM, SECONDS = 0.97, 0.005, 0.7, 300


def main() -> int:
    """Print the figures; 1 if they miss a requirement."""
    options(__doc__)
    with TemporaryDirectory() as folder:
        ddp, fsdp = (_train("digits_resnet18", layout, "top1", Path(folder)) for layout in ("ddp", "fsdp"))
        text = _train("stdlib_gpt_tiny", "pdp", "bits_per_byte", Path(folder))
    bigram = bigram_bits_per_byte()
    print(f"a bigram model that has counted the same files  {bigram:.3f} bits per byte")
    accuracies = [run["evaluations"][-1]["top1"] for run in (ddp, fsdp)]
    share = text["evaluations"][-1]["bits_per_byte"]
    # Shares of a few hundred images: compared as numbers of images, which have no rounding.
    samples = ddp["evaluations"][-1]["samples"]
    right = [round(accuracy * samples) for accuracy in accuracies]
    is_close = abs(right[0] - right[1]) <= math.floor(APART * samples)
    passed = [
        judged(f"digits under ddp, accuracy: {accuracies[0]:.4g}", f">= {ACCURACY}", accuracies[0] >= ACCURACY),
        judged(f"fsdp minus ddp: {accuracies[1] - accuracies[0]:.4g}", f"within {APART}", is_close),
        judged(f"text / bigram model: {share / bigram:.4g}", f"<= {AGAINST_BIGRAM}", share <= AGAINST_BIGRAM * bigram),
        *(judged(f"{run['name']}: {run['seconds']:.4g} s", f"< {SECONDS}", run["seconds"] < SECONDS)
          for run in (ddp, fsdp, text)),
    ]  # fmt: skip
    times = " and ".join(f"{run['seconds']:.0f} s" for run in (ddp, fsdp))
    keep("digits", f"{accuracies[0]:.1%} and {accuracies[1]:.1%}, {times}")
    keep("text", f"{share / bigram:.3f} ({share:.3f} / {bigram:.3f}), {text['seconds']:.0f} s")
    return int(not all(passed))


def _train(experiment: str, layout: str, figure: str, folder: Path) -> dict[str, Any]:
    """Run an experiment and print its curve; return its record, with its name and its seconds."""
    name, started = f"{experiment} {layout}", time.perf_counter()
    record = trained(folder / name, f"experiment={experiment}", f"parallel={layout}", "device=cpu")
    seconds = time.perf_counter() - started
    curve = "  ".join(f"{entry['step']}: {entry[figure]:.4g}" for entry in record["evaluations"])
    print(f"{name}, {figure} after steps  {curve}", flush=True)
    return {**record, "name": name, "seconds": seconds}


def bigram_bits_per_byte(*overrides: str) -> float:
    """Return what a model of pairs of bytes reaches on the held-out files of ``experiment=stdlib_gpt_tiny``.

    Laplace smoothing: pairs that only the held-out files have get a probability, too.
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
