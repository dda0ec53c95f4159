"""Whether ``ptdbench plan`` and ``train.micro_batch=max`` are as fast and as right as they should be.

    python benchmarks/plan_truth.py
    python benchmarks/plan_truth.py --only sizes found --runs 5

``layouts``: 40 layouts of llama_8b on eight virtual H100; ``large``: llama_70b on 256; ``repeated``: the same once
more, known from the cache. Seconds are those of the whole command, memory is the most that its processes have at once:
each page that several of them share counts in parts (PSS), and, beside it, in each of them (RSS).

``sizes``: ten sizes of a virtual GPU, and a batch that many micro-batches divide. The proposal of the line is confirmed
at once if its first one fits, and nothing larger does. ``found``: runs of two CPU ranks with as much memory left to
them as makes the micro-batch matter. What is found must end well, the next larger one must not fit by its own try, and
there must be few tries.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from ptdbench.measure.memory import host_memory
from ptdbench.records import store

ROOT = Path(__file__).parents[1]

LAYOUTS = (
    "model=llama_8b", "virtual=h100", "cluster.ranks_per_node=8", "precision=bf16", "train.global_batch=64,128",
    "parallel=fsdp,hsdp,tp,pdp,3d", "activations=keep,recompute", "model.sequence_length=2048,4096",
)  # fmt: skip
LARGE = (
    "model=llama_70b", "virtual=h100", "cluster.nodes=32", "cluster.ranks_per_node=8", "precision=bf16",
    "parallel=3d", "parallel.tensor=8", "parallel.pipeline=4", "activations=recompute", "train.micro_batch=max",
)  # fmt: skip
SIZES = (
    "model=gpt_small", "virtual=h100", "cluster.ranks_per_node=8", "precision=bf16", "parallel=fsdp",
    "train.global_batch=5760", "train.micro_batch=max", "memory_reserve=0",
    f"virtual.gpu.memory={','.join(str(gib << 30) for gib in (6, 8, 10, 12, 16, 24, 32, 40, 48, 80))}",
)  # fmt: skip
FOUND = (
    "model=gpt_tiny", "device=cpu", "cluster.ranks_per_node=2", "parallel=ddp", "train.global_batch=2048",
    "train.micro_batch=max", "train.steps=2", "train.warmup_steps=0", "profile.steps=0",
)  # fmt: skip

#: Tries from which a line is drawn, unless one of them is too large already.
POINTS = 3

#: What two ranks of :data:`FOUND` are left: half of it are their imports.
ROOM = 2 << 30

#: Seconds and bytes that are allowed, tries of a run, and proposals that are confirmed at once of ten.
LAYOUTS_SECONDS, LARGE_SECONDS, LARGE_BYTES, REPEATED_SECONDS = 600.0, 180.0, 2e9, 2.0
TRIES, CONFIRMED = 6, 9


@dataclass(frozen=True)
class Carried:
    """A command that has ended.

    Attributes:
        seconds: From its start to its end.
        pss: Bytes that its processes had at most at once, those that they share in parts.
        rss: The same with each page in each of them.
        output: What it has printed.
    """

    seconds: float
    pss: int
    rss: int
    output: str


def main() -> int:
    """Print a line for each requirement; 1 if one is missed."""
    options = _parse()
    parts: dict[str, Callable[[], bool]] = {
        "layouts": _layouts, "large": _large, "repeated": _repeated, "sizes": _sizes,
        "found": lambda: _found(options.runs),
    }  # fmt: skip
    met = [parts[name]() for name in options.only or parts]
    return int(not all(met))


def _layouts() -> bool:
    carried, records = plan(LAYOUTS, "--again")
    known = sum(record["status"] in ("ok", "oom") for record in records)
    tries = [one["seconds"] for record in records for one in (record.get("plan") or {}).get("tries", ())]
    print(f"layouts: {len(tries)} tries of {sum(tries):.0f} s; {known} of {len(records)} have an answer")
    return _told("layouts", carried, LAYOUTS_SECONDS) and known == len(records)


def _large() -> bool:
    carried, _ = plan(LARGE, "--again")
    return _told("large", carried, LARGE_SECONDS, LARGE_BYTES)


def _repeated() -> bool:
    plan(LARGE)
    carried, _ = plan(LARGE)
    return _told("repeated", carried, REPEATED_SECONDS)


def _sizes() -> bool:
    _, records = plan(SIZES, "--again")
    confirmed = 0
    for record in records:
        found = record["plan"]
        tries = found["tries"]
        points = next((place for place, one in enumerate(tries[:POINTS], 1) if not one["fits"]), POINTS)
        at_once = all(one["micro_batch"] == found["largest_micro_batch"] for one in tries[points : points + 1])
        confirmed += at_once
        remark = "" if at_once else ": not at once"
        print(f"sizes: {found['capacity_bytes'] >> 30:3} GiB: {_shown(tries)}{remark}", flush=True)
    required = CONFIRMED * len(records) / 10
    return _verdict(f"sizes: {confirmed} of {len(records)} at once", confirmed >= required, f"{required:.0f} required")


def _found(runs: int) -> bool:
    right = 0
    for number in range(runs):
        with TemporaryDirectory() as folder:
            memory = host_memory()
            reserve = (memory.available - ROOM) / memory.total
            command = [sys.executable, "train.py", *FOUND, f"memory_reserve={reserve:.4f}", f"hydra.run.dir={folder}"]
            subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
            record = store.load_record(Path(folder))
        found = record.get("micro_batch") or {"tries": [], "found": None}
        larger = [one for one in found["tries"] if found["found"] and one["micro_batch"] > found["found"]]
        is_right = record["status"] == "ok" and bool(larger) and len(found["tries"]) <= TRIES
        is_right = is_right and not any(one["fits"] for one in larger)
        right += is_right
        print(f"found {number + 1:2}: {record['status']}, {found['found']} of {_shown(found['tries'])}", flush=True)
    return _verdict(f"found: {right} of {runs} runs", right == runs, "all required")


def _shown(tries: Sequence[Mapping[str, Any]]) -> str:
    """The micro-batches that were tried, in that order."""
    return ", ".join(f"{one['micro_batch']}{'' if one['fits'] else ' too large'}" for one in tries)


def plan(words: Sequence[str], *options: str) -> tuple[Carried, list[Mapping[str, Any]]]:
    """Plan, and return the records, too."""
    with TemporaryDirectory() as folder:
        found = carried_out([*words, f"hydra.sweep.dir={folder}", f"hydra.run.dir={folder}", "--json", *options])
    return found, json.loads(found.output)


def carried_out(words: Sequence[str]) -> Carried:
    """Carry out ``ptdbench plan``, and look at its processes five times a second."""
    pss = rss = 0
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "ptdbench", "plan", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    output: list[str] = []
    assert process.stdout
    reading = threading.Thread(target=lambda: output.append(process.stdout.read()))  # type: ignore[union-attr]
    reading.start()
    while process.poll() is None:
        shares, wholes = zip(*map(_memory, _family(process.pid)), strict=True) if _family(process.pid) else ((0,), (0,))
        pss, rss = max(pss, sum(shares)), max(rss, sum(wholes))
        time.sleep(0.2)
    seconds = time.perf_counter() - started
    reading.join()
    return Carried(seconds, pss, rss, output[0])


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


def _told(name: str, carried: Carried, seconds: float, most: float | None = None) -> bool:
    required = f"at most {seconds:.0f} s" + (f" and {most / 1e9:.0f} GB of PSS" if most else "") + " required"
    found = f"{name}: {carried.seconds:.1f} s, {carried.pss / 1e9:.2f} GB of PSS ({carried.rss / 1e9:.2f} GB of RSS)"
    return _verdict(found, carried.seconds <= seconds and carried.pss <= (most or carried.pss), required)


def _verdict(found: str, is_met: bool, required: str) -> bool:
    print(f"{found}, {required}: {'PASS' if is_met else 'MISS'}", flush=True)
    return is_met


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["layouts", "large", "repeated", "sizes", "found"], help="parts")
    parser.add_argument("--runs", type=int, default=20, help="of found (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
