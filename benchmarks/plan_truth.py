"""Whether ``ptdbench plan`` is as fast and as right as it should be.

    make plan-truth ARGS="--only sizes --sizes 6 80"

``layouts``: 40 layouts of llama_8b on eight virtual H100, with times; ``large``: llama_70b on 256; ``repeated``: the
same once more, known from the cache. Each layout needs an answer, in so many seconds and bytes: each page that several
processes share counts in parts (PSS). ``times``: how many times the CPU seconds a plan with times takes
as one without, for the same GPU by a name without costs; and how long a million pieces of work take to replay.
``sizes``: ten sizes of a virtual GPU, and a batch that many micro-batches divide; good is if the first micro-batch that
the line proposes fits, and nothing larger does, for nine of them.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.script import ROOT, judged, keep, options, read
from ptdbench.parallel.dims import divisors
from ptdbench.prediction.actions import costed
from ptdbench.prediction.costs import Costs
from ptdbench.prediction.log import Log
from ptdbench.prediction.replay import Kind, replay
from ptdbench.setup import choices

LAYOUTS = (
    "model=llama_8b", "virtual=h100", "cluster.ranks_per_node=8", "precision=bf16", "train.global_batch=64,128",
    "parallel=fsdp,hsdp,tp,pdp,3d", "activations=keep,recompute", "model.sequence_length=2048,4096",
)  # fmt: skip
LARGE = (
    "model=llama_70b", "virtual=h100", "cluster.nodes=32", "cluster.ranks_per_node=8", "precision=bf16",
    "parallel=3d", "parallel.tensor=8", "parallel.pipeline=4", "activations=recompute", "train.micro_batch=max",
)  # fmt: skip
RANKS_OF_SIZES, SAMPLES = 8, 720  #: Of ``sizes``, and samples of a step and rank, which many micro-batches divide.
SIZES = (
    "model=gpt_small", "virtual=h100", f"cluster.ranks_per_node={RANKS_OF_SIZES}", "precision=bf16", "parallel=fsdp",
    f"train.global_batch={RANKS_OF_SIZES * SAMPLES}", "train.micro_batch=max", "memory_reserve=0",
)  # fmt: skip
TIMED = (
    "model=llama_8b", "virtual=h100", "cluster.ranks_per_node=8", "precision=bf16", "parallel=fsdp",
    "activations=selective", "train.micro_batch=max",
)  # fmt: skip

#: What has no costs, pairs of plans with and without times, and pieces of work of the replay.
UNKNOWN, PAIRS, PIECES = "virtual.gpu.name=unknown", 3, 1_000_000

#: Tries from which a line is drawn, unless one of them is too large already.
POINTS = 3

#: GiB of the GPUs of ``sizes``.
GIB = (6, 8, 10, 12, 16, 24, 32, 40, 48, 80)

#: The share of proposals that are confirmed at once.
CONFIRMED = 0.9

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """A ``ptdbench plan`` that has ended."""

    seconds: float  #: From its start to the end of its output.
    processors: float  #: Seconds of processors, of all of its processes.
    pss: int  #: Bytes that its processes had at most at once, those that they share in parts.
    records: Sequence[Record]  #: What it has printed; nothing if it was refused or killed.

    def judged(self, name: str, layouts: int, seconds: float, most: float = math.inf) -> bool:
        """Print how many layouts were answered, and in what time and memory; whether that is as required."""
        answers = sum(record["status"] in ("ok", "oom") and bool(_tries(record)) for record in self.records)
        taken = f"{self.seconds:.1f} s, {self.processors:.0f} CPU s"
        figure = f"{answers} of {layouts} answered in {taken}, {self.pss / 1e9:.2f} GB of PSS"
        keep(f"plan {name}", figure)
        memory = "" if most == math.inf else f" and {most / 1e9:.0f} GB"
        is_met = answers == layouts and self.seconds <= seconds and self.pss <= most
        return judged(f"{name}: {figure}", f"all, in at most {seconds:.0f} s{memory}", is_met)


def main() -> int:
    """Print a line for each requirement; 1 if one is missed."""
    parts: dict[str, Callable[[], bool]] = {
        "layouts": lambda: plan(LAYOUTS, "--again").judged("layouts", 40, 600),
        "large": lambda: plan(LARGE, "--again").judged("large", 1, 180, 2e9),
        "repeated": _repeated,
        "times": _times,
        "sizes": lambda: _sizes(args.sizes),
    }
    args = options(__doc__, only=(tuple(parts), "parts", parts), sizes=(GIB, "GiB of the GPUs"))
    return int(not all([parts[name]() for name in args.only]))  # noqa: C419 - each is to be carried out


def _repeated() -> bool:
    plan(LARGE)
    return plan(LARGE).judged("repeated", 1, 2)


def _times() -> bool:
    taken = [(plan(TIMED, "--again"), plan([*TIMED, UNKNOWN], "--again")) for _ in range(PAIRS)]
    assert all("step_seconds" in timed.records[0]["predicted"] for timed, _ in taken)
    assert all(unknown.records[0]["predicted"]["reason"] for _, unknown in taken)
    more = median(timed.processors / unknown.processors for timed, unknown in taken)
    machine = choices.virtual(read("virtual=h100"))
    assert machine
    log = Log.load(ROOT / "benchmarks/clock/llama_8b_bf16_false.npz")
    step = costed(log, [*log.steps()][-1], Costs.of(machine.gpu)).actions
    pieces = [
        piece._replace(subject=((number, *piece.subject),)) if piece.kind == Kind.MESSAGE else piece
        for number, piece in enumerate(islice(cycle(step), PIECES))
    ]
    started = time.process_time()
    replay([pieces], 0.2)
    seconds = time.process_time() - started
    keep("plan times", f"{more:.2f}; {seconds:.1f} s")
    is_met = judged(f"times: a plan with a time takes {more:.2f} times as long as without", "at most 1.5", more <= 1.5)
    return judged(f"times: a million pieces replayed in {seconds:.1f} s", "at most 10 s", seconds <= 10) and is_met


def _sizes(sizes: Sequence[int]) -> bool:
    records = plan([*SIZES, f"virtual.gpu.memory={','.join(str(gib << 30) for gib in sizes)}"], "--again").records
    at_once = [is_at_once(record) for record in records]
    for gib, record, is_confirmed in zip(sizes, records, at_once, strict=False):
        print(f"sizes: {gib:3} GiB: {_shown(record)}{'' if is_confirmed else ': not at once'}", flush=True)
    required, figure = math.ceil(CONFIRMED * len(sizes)), f"{sum(at_once)} of {len(sizes)}"
    keep("plan sizes", figure)
    return judged(f"sizes: {figure} at once", f"at least {required}", sum(at_once) >= required)


def is_at_once(record: Record) -> bool:
    """Whether the first micro-batch that a line has proposed is the largest that fits.

    Or whether it has proposed none, as the largest is one that it is drawn from, and the next one was tried at once.
    """
    if not (tries := _tries(record)):
        return False
    largest = record["plan"]["largest_micro_batch"]
    points = next((place for place, attempt in enumerate(tries[:POINTS], 1) if not attempt["fits"]), POINTS)
    sizes = [attempt["micro_batch"] for attempt in tries]
    first = sizes[points : points + 1]
    following = [size for size in divisors(SAMPLES) if size > largest][:1]
    return first == [largest] or bool(first and largest in sizes[:points] and first == following)


def _tries(record: Record) -> Sequence[Record]:
    return (record.get("plan") or {}).get("tries") or ()


def _shown(record: Record) -> str:
    """The micro-batches that were tried, in that order."""
    tries = [f"{attempt['micro_batch']}{'' if attempt['fits'] else ' too large'}" for attempt in _tries(record)]
    return ", ".join(tries) or "none"


def plan(words: Sequence[str], *flags: str) -> Plan:
    """Carry out ``ptdbench plan``, and look at its processes five times a second."""
    pss, processors = 0, 0.0
    with TemporaryDirectory() as folder, Path(folder, "output").open("w+") as output:
        directories = f"hydra.sweep.dir={folder}/sweep", f"hydra.run.dir={folder}/run"
        command = [sys.executable, "-m", "ptdbench", "plan", *words, *directories, "--json", *flags]
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, text=True)
        while process.poll() is None:
            used, spent = _used(process.pid)
            pss, processors = max(pss, used), max(processors, spent)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        seconds = time.perf_counter() - started
        output.seek(0)
        return Plan(seconds, processors, pss, json.loads(output.read() or "[]") if process.returncode in (0, 1) else [])


def _used(pid: int) -> tuple[int, float]:
    """Bytes of a process and its living descendants, and their CPU seconds, with those that have ended."""
    size, seconds = 0, 0.0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                seconds += sum(process.cpu_times()[:4])
                size += process.memory_full_info().pss
    return size, seconds
