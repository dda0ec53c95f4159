"""Predicted steps beside measured ones: the ledger of ``docs/ledger.md``, from the logs in ``benchmarks/clock/``.

    make time-truth                          # costs the logs that are stored, and writes the ledger anew
    make time-truth ARGS=--record            # records them anew on virtual GPUs, with the torch that is installed

A log is of one step of a run of ``make gpu-check``, recorded without a GPU. ``make test`` fails where a prediction
differs by more than 1 % from the ledger: write it anew, and give the reason in ``CHANGELOG.md``. The errors themselves
are shown, and not required.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.script import ROOT, keep, options, read, trained
from benchmarks.tables import SPEEDS, drawn, inserted
from ptdbench.prediction.costs import Costs
from ptdbench.prediction.log import Log
from ptdbench.prediction.log import read as read_logs
from ptdbench.prediction.steps import Prediction, predict
from ptdbench.setup import choices
from ptdbench.virtual.watch import LOGS

PAGE, FOLDER = ROOT / "docs/ledger.md", ROOT / "benchmarks/clock"

#: The run that sets the level of the others, in the columns after one anchor.
ANCHOR = "gpt_xl 16 layers"

#: Options of the measured runs that a virtual one has not.
_OF_GPU = ("device=", "profile.trace=", "train.steps=")

COLUMNS = (
    "run", "torch measured, logged", "measured ms", "predicted ms", "error", "bound by", "guessed GB",
    "after one anchor", "one constant MFU",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A measured run of ``make gpu-check``."""

    name: str
    words: Sequence[str]  #: Its options.
    gpu: str  #: The choice of ``virtual`` that is its GPU.
    torch: str  #: The version that it ran with.
    seconds: float  #: The median of its steps.
    mfu: float

    @property
    def path(self) -> Path:
        """The log of a step of it."""
        return FOLDER / f"{self.name.replace(' ', '_')}.npz"

    @cached_property
    def log(self) -> Log:
        """The log of a step of it."""
        return Log.load(self.path)

    @cached_property
    def prediction(self) -> Prediction:
        """Its predicted step."""
        machine = choices.virtual(read(f"virtual={self.gpu}"))
        assert machine
        return predict([self.log], Costs.of(machine.gpu))

    @property
    def error(self) -> float:
        """How much longer the predicted step is than the measured one, as a share."""
        return self.prediction.seconds / self.seconds - 1

    def record(self) -> None:
        """Write the log of a step of it on a virtual GPU of this machine."""
        words = [word for word in self.words if not word.startswith(_OF_GPU)]
        with tempfile.TemporaryDirectory() as folder:
            environ = {**os.environ, LOGS: f"{folder}/logs"}
            trained(Path(folder, "run"), *words, f"virtual={self.gpu}", "train.steps=2", "logger=none", env=environ)
            (log,) = read_logs(Path(folder, "logs"))
        marks = np.flatnonzero(log.records["kind"] == b"M")
        FOLDER.mkdir(exist_ok=True)
        Log(log.records[marks[-2] :], log.names, log.facts).save(self.path)
        print(f"{self.name}: {self.path.stat().st_size / 1e3:.0f} kB", flush=True)


def rows() -> Iterator[Row]:
    """Yield the measured runs of one H200."""
    parts = json.loads((ROOT / "benchmarks/gpu/NVIDIA-H200.json").read_text())["parts"]
    for part in map(parts.get, SPEEDS):
        for figures in (check["figures"] for check in part["checks"] if "overrides" in check["figures"]):
            options = dict(word.split("=", 1) for word in figures["overrides"])
            name = f"{options['model']} {options['train.global_batch']} {options['compile']}"
            seconds, torch = figures["step_seconds"], part["environment"]["torch"]
            yield Row(name, figures["overrides"], "h200", torch, seconds, figures["mfu"])


def ledger(of: Sequence[Row]) -> str:
    """Return the table of the ledger, and what follows from it."""
    anchor = next(row for row in of if row.name == ANCHOR)
    level = anchor.seconds / anchor.prediction.seconds
    anchored = {row.name: (1 + row.error) * level - 1 for row in of}
    constant = {row.name: row.mfu / anchor.mfu - 1 for row in of}  # as long as its FLOPs take at the anchor's MFU
    table = drawn(
        COLUMNS,
        [
            (
                row.name, f"{row.torch}, {row.log.facts['torch']}", f"{1e3 * row.seconds:.1f}",
                f"{1e3 * row.prediction.seconds:.1f}", f"{row.error:+.1%}", row.prediction.bound_by,
                f"{row.prediction.guessed_bytes / 1e9:.1f}", "-" if row is anchor else f"{anchored[row.name]:+.1%}",
                "-" if row is anchor else f"{constant[row.name]:+.1%}",
            )
            for row in of
        ],
    )  # fmt: skip
    others = [row.name for row in of if row is not anchor]
    lines = [f"- without an anchor: {_errors([row.error for row in of])}"]
    lines.append(f"- after one anchor, {ANCHOR}: {_errors([anchored[name] for name in others])} of the others")
    lines.append(f"- one constant MFU, the anchor's: {_errors([constant[name] for name in others])} of the others")
    return "\n".join([table, "", *lines, f"- {_order(of)}"])


def _errors(errors: Sequence[float]) -> str:
    return f"{mean(map(abs, errors)):.1%} in the mean, {max(map(abs, errors)):.1%} at worst"


def _order(of: Sequence[Row]) -> str:
    """Say how many pairs of runs of one model have the order of their MFU right, and what the first choice costs."""
    predicted = {row.name: row.mfu / (1 + row.error) for row in of}
    of_models = [[row for row in of if row.name.split()[0] == model] for model in {row.name.split()[0] for row in of}]
    pairs = [pair for rows in of_models for pair in combinations(rows, 2)]
    right = sum((a.mfu > b.mfu) == (predicted[a.name] > predicted[b.name]) for a, b in pairs)
    chosen = [(max(rows, key=lambda row: predicted[row.name]), max(row.mfu for row in rows)) for rows in of_models]
    regret = max(best / choice.mfu - 1 for choice, best in chosen)
    return f"order of runs of one model by MFU: {right} of {len(pairs)} pairs right; first choice {regret:.1%} too slow"


def written() -> dict[str, float]:
    """Return the predicted seconds of the ledger as it stands, by the name of the run."""
    _, begin, rest = PAGE.read_text().partition("<!-- ledger -->")
    assert begin
    cells = [line.split(" | ") for line in rest.splitlines() if line.startswith("| gpt")]
    return {row[0].removeprefix("| "): float(row[COLUMNS.index("predicted ms")]) / 1e3 for row in cells}


def main() -> int:
    """Write the ledger."""
    given = options(__doc__, record=(False, "record the logs anew"))
    of = [*rows()]
    if given.record:
        for row in of:
            row.record()
    told = ledger(of)
    PAGE.write_text(inserted(PAGE.read_text(), "ledger", told))
    print(told)
    keep("time", _errors([row.error for row in of]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
