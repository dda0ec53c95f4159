"""Whether ``ptdbench plan`` and ``train.micro_batch=max`` are as fast and as right as they should be.

    python benchmarks/plan_truth.py
    python benchmarks/plan_truth.py --only sizes found --sizes 6 80 --runs 5

``layouts``: 40 layouts of llama_8b on eight virtual H100; ``large``: llama_70b on 256; ``repeated``: the same once
more, known from the cache. Each layout needs an answer. Seconds are from the start of the command to the end of its
output, memory is the most that its processes have at once: each page that several of them share counts in parts (PSS),
and, beside it, in each of them (RSS).

``sizes``: ten sizes of a virtual GPU, and a batch that many micro-batches divide. The proposal of the line is confirmed
at once if the first one fits, and nothing larger does. ``found``: runs on two CPU ranks with as much memory left to
them as makes the micro-batch matter. What is found must end well, and a run of the next larger micro-batch, which this
file starts itself, must be out of memory or need more than there was when the search began.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil

from benchmarks.script import ROOT, judged, parser_of
from ptdbench.measure.memory import host_memory
from ptdbench.parallel.dims import divisors
from ptdbench.records import store

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
FOUND = (
    "model=gpt_tiny", "device=cpu", "cluster.ranks_per_node=2", "parallel=ddp", "train.warmup_steps=0",
    "profile.steps=0",
)  # fmt: skip

#: Tries from which a line is drawn, unless one of them is too large already.
POINTS = 3

#: GiB of the GPUs of ``sizes``.
GIB = (6, 8, 10, 12, 16, 24, 32, 40, 48, 80)

#: Of ``found``: ranks, samples of each in a step, and bytes that are left to them and to the process that starts them.
RANKS, SHARE, ROOM = 2, 256, 2_500_000_000

#: Seconds and bytes that are allowed, and the share of proposals that are confirmed at once.
LAYOUTS_SECONDS, LARGE_SECONDS, LARGE_BYTES, REPEATED_SECONDS = 600.0, 180.0, 2e9, 2.0
CONFIRMED = 0.9


@dataclass(frozen=True)
class Carried:
    """A ``ptdbench plan`` that has ended."""

    seconds: float  #: From its start to the end of its output.
    pss: int  #: Bytes that its processes had at most at once, those that they share in parts.
    rss: int  #: The same with each page in each of them.
    records: Sequence[Mapping[str, Any]]  #: What it has printed; nothing if it was refused or killed.

    @property
    def answers(self) -> int:
        """Layouts of which is known whether they fit, by ranks that were carried out."""
        return sum(record["status"] in ("ok", "oom") and bool(_tries(record)) for record in self.records)


def main() -> int:
    """Print a line for each requirement; 1 if one is missed."""
    options = _parse()
    parts: dict[str, Callable[[], bool]] = {
        "layouts": _layouts, "large": _large, "repeated": _repeated,
        "sizes": lambda: _sizes(options.sizes), "found": lambda: _found(options.runs),
    }  # fmt: skip
    met = [parts[name]() for name in options.only or parts]
    return int(not all(met))


def _layouts() -> bool:
    carried = plan(LAYOUTS, "--again")
    seconds = [one["seconds"] for record in carried.records for one in _tries(record)]
    print(f"layouts: {len(seconds)} tries of {sum(seconds):.0f} s")
    return _told("layouts", carried, 40, LAYOUTS_SECONDS)


def _large() -> bool:
    return _told("large", plan(LARGE, "--again"), 1, LARGE_SECONDS, LARGE_BYTES)


def _repeated() -> bool:
    plan(LARGE)
    return _told("repeated", plan(LARGE), 1, REPEATED_SECONDS)


def _sizes(sizes: Sequence[int]) -> bool:
    carried = plan([*SIZES, f"virtual.gpu.memory={','.join(str(gib << 30) for gib in sizes)}"], "--again")
    at_once = [is_at_once(record) for record in carried.records]
    for gib, record, is_confirmed in zip(sizes, carried.records, at_once, strict=False):
        print(f"sizes: {gib:3} GiB: {_shown(record)}{'' if is_confirmed else ': not at once'}", flush=True)
    required = math.ceil(CONFIRMED * len(sizes))
    found = f"sizes: {sum(at_once)} of {len(sizes)} at once"
    return judged(found, f"at least {required}", sum(at_once) >= required)


def is_at_once(record: Mapping[str, Any]) -> bool:
    """Whether the first micro-batch that a line has proposed is the largest that fits.

    Or whether it has proposed none, as the largest is one that it is drawn from, and the next one was tried at once.
    """
    if not (tries := _tries(record)):
        return False
    largest = record["plan"]["largest_micro_batch"]
    points = next((place for place, one in enumerate(tries[:POINTS], 1) if not one["fits"]), POINTS)
    sizes = [one["micro_batch"] for one in tries]
    first = sizes[points : points + 1]
    following = [size for size in divisors(SAMPLES) if size > largest][:1]
    return first == [largest] or bool(first and largest in sizes[:points] and first == following)


def _found(runs: int) -> bool:
    right = 0
    for number in range(1, runs + 1):
        record, larger = searched()
        right += (is_right := is_found(record, larger))
        tries = _tries(record)
        print(f"found {number:2}: {record['status']}, {len(tries)} tries: {_shown(record)}", end="")
        if larger:
            taken = f"{needed(larger) / 1e9:.3f} of {record['micro_batch']['room_bytes'] / 1e9:.3f} GB"
            print(f"; the next larger one: {larger['status']}, {taken}", end="")
        print("" if is_right else ": wrong", flush=True)
    return judged(f"found: {right} of {runs} runs", "all", right == runs)


def searched() -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """The records of a run that finds its micro-batch, and of one of the next larger, if there is such."""
    memory = host_memory()
    if memory.available <= ROOM:
        sys.exit(f"found: {memory.available / 1e9:.1f} GB of memory available, more than {ROOM / 1e9:.1f} GB needed")
    reserve = f"memory_reserve={(memory.available - ROOM) / memory.total:.6f}"
    record = train(reserve, "train.micro_batch=max", f"train.global_batch={RANKS * SHARE}", "train.steps=2")
    found = (record.get("micro_batch") or {}).get("found") or SHARE
    following = next((size for size in divisors(SHARE) if size > found), None)
    if following is None:
        return record, None
    batch = RANKS * 2 * following  # more than two passes have the same peak
    return record, train(reserve, f"train.micro_batch={following}", f"train.global_batch={batch}", "train.steps=3")


def train(*words: str) -> Mapping[str, Any]:
    """The record of a run of :data:`FOUND`."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *FOUND, *words, f"hydra.run.dir={folder}"]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        try:
            return store.load_record(Path(folder))
        except FileNotFoundError:
            sys.exit(f"found: a run has left no record:\n{done.stderr}")


def needed(record: Mapping[str, Any]) -> int:
    """Bytes that the ranks of a run had at most, by the largest of them; 0 if that is not known."""
    return RANKS * ((record.get("metrics") or {}).get("peak_memory_bytes") or 0)


def is_found(record: Mapping[str, Any], larger: Mapping[str, Any] | None) -> bool:
    """Whether a run ended well, and the next larger one was out of memory or took more than there was."""
    if larger is None or record["status"] != "ok":
        return False
    took_more = larger["status"] == "ok" and needed(larger) > record["micro_batch"]["room_bytes"]
    return larger["status"] == "oom" or took_more


def _tries(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The tries of a plan, or of a run that has looked for its micro-batch."""
    return (record.get("plan") or record.get("micro_batch") or {}).get("tries") or ()


def _shown(record: Mapping[str, Any]) -> str:
    """The micro-batches that were tried, in that order."""
    return ", ".join(f"{one['micro_batch']}{'' if one['fits'] else ' too large'}" for one in _tries(record)) or "none"


def plan(words: Sequence[str], *options: str) -> Carried:
    """Carry out ``ptdbench plan``, and look at its processes five times a second."""
    pss = rss = 0
    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as threads:
        directories = f"hydra.sweep.dir={folder}", f"hydra.run.dir={folder}"
        command = [sys.executable, "-m", "ptdbench", "plan", *words, *directories, "--json", *options]
        started = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            reading = threads.submit(_read, process.stdout)
            while not reading.done():
                memory = [_memory(one) for one in _family(process.pid)]
                pss, rss = max(pss, sum(one for one, _ in memory)), max(rss, sum(one for _, one in memory))
                wait([reading], 0.2)
        output, ended = reading.result()
    records = json.loads(output) if output and process.returncode in (0, 1) else []
    return Carried(ended - started, pss, rss, records)


def _read(pipe: IO[str]) -> tuple[str, float]:
    """All that comes, and when it ended: beside what looks at the processes, whose time is not the command's."""
    return pipe.read(), time.perf_counter()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _memory(process: psutil.Process) -> tuple[int, int]:
    """PSS and RSS of a process in bytes; nothing of one that has ended."""
    try:
        told = process.memory_full_info()
    except psutil.Error:
        return 0, 0
    return told.pss, told.rss


def _told(name: str, carried: Carried, layouts: int, seconds: float, most: float = math.inf) -> bool:
    memory = "" if most == math.inf else f" and {most / 1e9:.0f} GB of PSS"
    found = f"{name}: {carried.answers} of {layouts} answered in {carried.seconds:.1f} s"
    found += f", {carried.pss / 1e9:.2f} GB of PSS ({carried.rss / 1e9:.2f} GB of RSS)"
    is_met = carried.answers == layouts and carried.seconds <= seconds and carried.pss <= most
    return judged(found, f"all, in at most {seconds:.0f} s{memory}", is_met)


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=["layouts", "large", "repeated", "sizes", "found"], help="parts")
    parser.add_argument(
        "--sizes", nargs="+", type=int, metavar="GIB", default=GIB, help="of the GPU (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=20, help="of found (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
