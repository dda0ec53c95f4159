"""Predicted steps beside measured ones: the ledger of ``docs/ledger.md``, from the logs in ``benchmarks/clock/``.

    make time-truth                          # costs the logs that are stored, and writes the ledger anew
    make time-truth ARGS="--record all"      # records them anew on virtual GPUs, with the torch that is installed

A log is of one step of a run of ``make gpu-check``, or of torchtitan's on one node, recorded without a GPU. ``make
test`` fails where a prediction differs by more than 1 % from the ledger: write it anew, and give the reason in
``CHANGELOG.md``. The errors themselves are shown, and not required.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import expm1, log, log1p, sqrt
from pathlib import Path
from statistics import mean, stdev

import torch

from benchmarks import virtual_truth
from benchmarks.script import ROOT, keep, options, read, trained
from benchmarks.tables import SPEEDS, drawn, of_gpu_check, show
from ptdbench.comparison import ranking
from ptdbench.grouping import grouped
from ptdbench.peaks import DENSE_PEAKS
from ptdbench.planning import anchors
from ptdbench.prediction.costs import Costs
from ptdbench.prediction.log import Log
from ptdbench.prediction.log import read as read_logs
from ptdbench.prediction.steps import Prediction, predict
from ptdbench.records.schema import Predicted
from ptdbench.setup import choices
from ptdbench.virtual.watch import LOGS

PAGE, FOLDER = ROOT / "docs/ledger.md", ROOT / "benchmarks/clock"

#: By source, the run that sets the level of its others in the columns after one anchor.
ANCHORS = {"gpu-check": "gpt_xl 16 layers", "torchtitan": "llama_8b bf16 blocks"}

#: Runs that a device's level in the costs was fitted to: without an anchor, no other run of their source is predicted.
FITTED = ("llama_8b bf16 blocks",)

#: FLOP/s of an H100 in bf16.
PEAK = DENSE_PEAKS["NVIDIA H100 80GB HBM3"]["bf16"]

#: torchtitan's published runs on one node: what they have in common, and the model that they had.
_RECIPE = virtual_truth.on_virtual(virtual_truth.RECIPE)
_MODEL = "model._target_=benchmarks.programs.llama_2024.Llama"
_NODE = (f"cluster.ranks_per_node={virtual_truth.NODE}", "virtual.ranks=[0]")

COLUMNS = (
    "run", "torch measured, logged", "GiB reserved, logged", "measured ms", "predicted ms", "error", "bound by",
    "guessed GB", "after one anchor", "one constant MFU",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A measured run."""

    source: str  #: Of :data:`ANCHORS`.
    name: str
    words: Sequence[str]  #: Its options.
    gpu: str  #: The choice of ``virtual`` that is its GPU.
    torch: str  #: The version that it ran with.
    seconds: float  #: The median of its steps.
    mfu: float
    memory: float  #: Peak of reserved bytes.

    @property
    def group(self) -> tuple[str, ...]:
        """What comparable runs have in common: the source, the model, and the length of a sample."""
        return self.source, *(word for word in self.words if word.startswith(("model=", "model.sequence")))

    @property
    def path(self) -> Path:
        """The log of one of its steps."""
        return FOLDER / f"{self.name.replace(' ', '_')}.npz"

    @cached_property
    def log(self) -> Log:
        """The log of one of its steps."""
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
        """Write the log of one of its steps on a virtual GPU of this machine."""
        with tempfile.TemporaryDirectory() as folder:
            environ = {**os.environ, LOGS: f"{folder}/logs", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
            typed = (*virtual_truth.on_virtual(self.words), f"virtual={self.gpu}", "train.steps=2", "logger=none")
            metrics = trained(Path(folder, "run"), *typed, env=environ)["metrics"]
            (log,) = read_logs(Path(folder, "logs"))
        facts = {**log.facts, "reserved_bytes": metrics["peak_reserved_bytes"]}
        FOLDER.mkdir(exist_ok=True)
        replace(log.last(), facts=facts).save(self.path)
        print(f"{self.name}: {self.path.stat().st_size / 1e3:.0f} kB", flush=True)


def rows() -> Iterator[Row]:
    """Yield the measured runs of one H200, and of torchtitan on 8 H100."""
    for _, version, figures in of_gpu_check(*SPEEDS):
        options = dict(word.split("=", 1) for word in figures["overrides"])
        name = f"{options['model']} {options['train.global_batch']} {options['compile']}"
        seconds, memory = figures["step_seconds"], figures["peak_reserved_bytes"]
        yield Row("gpu-check", name, figures["overrides"], "h200", version, seconds, figures["mfu"], memory)
    for row in virtual_truth.rows():
        if row.tokens is None:
            continue
        words = row.words.split()
        options = dict(word.split("=", 1) for word in words)
        config = read(*words, "data=synthetic_tokens")
        with torch.device("meta"):
            model = choices.build(config, "model")
        length, batch = config.resolved["model"]["sequence_length"], int(options["train.global_batch"])
        seconds = batch * length / virtual_truth.NODE / row.tokens
        mfu = sum(model.train_flops().values()) * batch / virtual_truth.NODE / seconds / PEAK
        name = f"llama_8b {options['precision']} {options.get('compile', 'false')}{' 32k' * (length > 2**14)}"
        typed = [*words, *_RECIPE, *_NODE, _MODEL]
        yield Row("torchtitan", name, typed, "h100_500w", "2.6 of 2024-12-23", seconds, mfu, row.gib * 2**30)


def ledger(of: Sequence[Row]) -> str:
    """Return the tables of the ledger, and their errors."""
    return "\n\n".join(
        [*(_of_source([row for row in of if row.source == source]) for source in ANCHORS), _intervals(of)]
    )


def _of_source(of: Sequence[Row]) -> str:
    """Return the table of one source, and its errors."""
    anchor = next(row for row in of if row.name == ANCHORS[row.source])
    level = anchor.seconds / anchor.prediction.seconds
    anchored = {row.name: (1 + row.error) * level - 1 for row in of}
    constant = {row.name: row.mfu / anchor.mfu - 1 for row in of}  # as long as its FLOPs take at the anchor's MFU
    table = drawn(
        COLUMNS,
        [
            (
                row.name, f"{row.torch}, {row.log.facts['torch']}", _memory(row), f"{1e3 * row.seconds:.1f}",
                f"{1e3 * row.prediction.seconds:.1f}", f"{row.error:+.1%}{' (fitted)' * (row.name in FITTED)}",
                row.prediction.bound_by, f"{row.prediction.guessed_bytes / 1e9:.1f}",
                "-" if row is anchor else f"{anchored[row.name]:+.1%}",
                "-" if row is anchor else f"{constant[row.name]:+.1%}",
            )
            for row in of
        ],
    )  # fmt: skip
    others = [row.name for row in of if row is not anchor]
    lines = [] if anchor.name in FITTED else [f"- without an anchor: {_errors([row.error for row in of])}"]
    lines.append(f"- after one anchor, {anchor.name}: {_errors([anchored[name] for name in others])} of the others")
    lines.append(f"- one constant MFU, the anchor's: {_errors([constant[name] for name in others])} of the others")
    return "\n".join([table, "", *lines, f"- {_order(of)}"])


def _memory(row: Row) -> str:
    logged = row.log.facts.get("reserved_bytes")
    return f"{row.memory / 2**30:.1f}, {logged / 2**30:.1f}" if logged else f"{row.memory / 2**30:.1f}, -"


def _errors(errors: Sequence[float]) -> str:
    return f"{mean(map(abs, errors)):.1%} in the mean, {max(map(abs, errors)):.1%} at worst"


def _order(of: Sequence[Row]) -> str:
    """Count the pairs of comparable runs whose MFU is predicted in the right order; say what the first choice costs."""
    predicted = {row.name: row.mfu / (1 + row.error) for row in of}
    groups = [*grouped((row.group, row) for row in of).values()]
    pairs = [pair for rows in groups for pair in combinations(rows, 2)]
    right = sum((a.mfu > b.mfu) == (predicted[a.name] > predicted[b.name]) for a, b in pairs)
    chosen = [(max(rows, key=lambda row: predicted[row.name]), max(row.mfu for row in rows)) for rows in groups]
    regret = max(best / choice.mfu - 1 for choice, best in chosen)
    return f"order of runs of one model by MFU: {right} of {len(pairs)} pairs right; first choice {regret:.1%} too slow"


def _intervals(of: Sequence[Row]) -> str:
    """Count the runs within their intervals, with each run of a source as the anchor of each other one."""
    width = anchors.QUANTILE * sqrt(2)
    logs = {source: [log1p(row.error) for row in of if row.source == source] for source in ANCHORS}
    unfitted = [row for row in of if ANCHORS[row.source] not in FITTED]
    lines = [_held("without an anchor", [(abs(log1p(row.error)), log(1.25)) for row in unfitted])]
    by_all, by_others = list[tuple[float, float]](), list[tuple[float, float]]()
    for source, errors in logs.items():
        others = [stdev(of_other) for other, of_other in logs.items() if other != source]
        pairs = [abs(a - b) for a, b in combinations(errors, 2)]
        by_all += [(pair, width * anchors.SPREAD) for pair in pairs]
        by_others += [(pair, width * mean(others)) for pair in pairs]
    lines.append(_held("after one anchor, any run of a source as that of any other", by_all))
    lines.append(_held("the same, as wide as the errors of the other source say", by_others))
    ratios = []
    for a, b in (pair for rows in grouped((row.group, row) for row in of).values() for pair in combinations(rows, 2)):
        first, second = (
            Predicted(step.seconds, parts={**step.parts}, errors={**step.errors})
            for step in (a.prediction, b.prediction)
        )
        margin = anchors.QUANTILE * ranking.prediction_error(first, second)
        ratios.append((abs(log1p(a.error) - log1p(b.error)), margin))
    return "\n".join(["Intervals of 95 %:", "", *lines, _held("ratios of two runs of one model", ratios)])


def _held(what: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Count the differences within their margins, both of logarithms."""
    held, width = sum(off <= margin for off, margin in pairs), mean(margin for _, margin in pairs)
    return f"- {what}: {held} of {len(pairs)} within, ±{expm1(width):.1%} in the mean"


def written() -> dict[str, float]:
    """Return the predicted seconds of the ledger as it stands, by the name of the run."""
    _, begin, rest = PAGE.read_text().partition("<!-- ledger -->")
    assert begin
    cells = [line.split(" | ") for line in rest.splitlines() if line.startswith(("| gpt", "| llama"))]
    return {row[0].removeprefix("| "): float(row[COLUMNS.index("predicted ms")]) / 1e3 for row in cells}


def main() -> int:
    """Write the ledger."""
    args = options(__doc__, record=((), "record the logs of these runs anew, or all"))
    of = [*rows()]
    for row in of:
        if row.name in args.record or "all" in args.record:
            row.record()
    text = ledger(of)
    show(PAGE, "ledger", text)
    print(text)
    keep("time", _errors([row.error for row in of if row.source == "gpu-check"]))
    return 0
