"""How long a report of many runs takes to write, and to open in Chromium.

    python benchmarks/report_speed.py                   # of 1,000 and of 10,000 runs, of five presets and of one
    python benchmarks/report_speed.py --runs 1000 --keep report.html

Makes a sweep as its runs leave it, with records of realistic size, phases, memory and series, no two of which have the
same configuration. A report is open when its table and its first figure are shown and it answers; the other figures
are drawn after that, one by one. Needs Debian's chromium.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.script import parser_of, read
from ptdbench.measure.hardware import environment
from ptdbench.profiling.phases import KINDS, PHASES
from ptdbench.records import record, series, store
from ptdbench.terminal import plural

#: Seconds until a report of so many runs is open.
LIMITS = {1_000: 3.0, 10_000: 5.0}

PRESETS = ("ddp", "fsdp", "hsdp", "pdp", "tp")

STEPS = 60


def main() -> int:
    """Print the figures; 1 if they miss the requirement."""
    options = _parse()
    if not (chromium := shutil.which("chromium")):
        sys.exit("there is no chromium here; try apt-get install chromium")
    is_met = True
    for runs, presets in itertools.product(options.runs or LIMITS, (PRESETS, PRESETS[:1])):
        with TemporaryDirectory() as folder:
            sweep = Path(folder, "sweep")
            make(sweep, runs, presets)
            started = time.perf_counter()
            subprocess.run([sys.executable, "-m", "ptdbench", "report", str(sweep)], check=True, capture_output=True)
            wrote = time.perf_counter() - started
            page = sweep / "report.html"
            opened = [_opened(page, chromium) for _ in range(options.turns)]
            if options.keep:
                shutil.copy(page, options.keep)
            page_bytes = page.stat().st_size
        first, whole = (statistics.median(times) for times in zip(*opened, strict=True))
        limit = LIMITS.get(runs)
        verdict = f", under {limit:.0f} s required: {'PASS' if first < limit else 'MISS'}" if limit else ""
        is_met &= limit is None or first < limit
        of = f"{runs:,} runs of {plural(len(presets), 'preset')}"
        size = f"{page_bytes / 1e6:.1f} MB"
        print(f"{of}: written in {wrote:.1f} s, {size}; median of {options.turns} openings:")
        print(f"  table and first figure {first:.2f} s{verdict}; all figures {whole:.2f} s", flush=True)
    return int(not is_met)


def make(sweep: Path, runs: int, presets: Sequence[str] = PRESETS) -> None:
    """Write a sweep of which every run has ended well, but for one in a hundred."""
    draw = random.Random(0)
    found = environment("cpu")
    asked = {preset: read("model=gpt_tiny", f"parallel={preset}") for preset in presets}
    sweep.mkdir()
    with (sweep / store.RESULTS).open("w") as results:
        for number, (preset, ranks, batch, rate) in enumerate(itertools.islice(_points(asked), runs)):
            directory = sweep / f"{number}_gpt_tiny_{preset}"
            directory.mkdir()
            changed = asked[preset].changed({"optimizer.lr": rate, "train.global_batch": batch})
            words = [f"parallel={preset}", f"train.global_batch={batch}", f"optimizer.lr={rate}"]
            begun = record.begin(changed.resolved, directory, found, words)
            done = begun | (result(draw, ranks, batch) if draw.random() > 0.01 else {})
            store.write_record(directory, done, durable=False)
            results.write(json.dumps(done) + "\n")
            rows = series.unknown(STEPS, 2)
            rows["loss"] = 2 + 3 * np.exp(-np.arange(STEPS) / 20)
            rows["step_seconds"] = 0.1 + 0.01 * np.random.default_rng(number).random((STEPS, 2))
            series.write(directory / series.NAME, [rows])


def _points(presets: dict[str, Any]) -> Iterator[tuple[str, int, int, float]]:
    """Preset, ranks, global batch and learning rate of each run."""
    rates = (1e-5 * number for number in itertools.count(1))
    for rate in rates:
        yield from ((*point, rate) for point in itertools.product(presets, (1, 2, 4, 8), (8, 16, 32)))


def result(draw: random.Random, ranks: int, batch: int) -> dict[str, Any]:
    """What a run adds to its record; figures have as many digits as real ones."""
    step = 0.1 * batch / ranks * draw.uniform(0.9, 1.5)
    shares = [draw.random() for _ in PHASES]
    phases = {phase: [step * share / sum(shares)] * ranks for phase, share in zip(PHASES, shares, strict=True)}
    sizes = {kind: [draw.randrange(2**20, 2**28)] * ranks for kind in KINDS}
    return {
        "status": "ok",
        "error": None,
        "world_size": ranks,
        "launcher": "local",
        "nodes": ["n1"],
        "steps": STEPS,
        "final_loss": 2 + draw.random() / 10,
        "metrics": {
            "step_seconds": {"median": step, "mean": step, "p5": 0.9 * step, "p95": 1.1 * step, "ci95": [step, step]},
            "tokens_per_second": 128 * batch / step,
            "samples_per_second": batch / step,
            "peak_memory_bytes": draw.randrange(2**28, 2**33),
        },
        "phases": {
            "steps": 5,
            "pass_seconds": 1.0,
            "profiled_step_seconds": step,
            "step_seconds": step,
            "ranks": phases,
            "communication": {},
            "waited_for": [0.0] * ranks,
            "waited_for_most": [],
        },
        "memory": {"ranks": sizes, "moments": ["backward"] * ranks, "pass_seconds": 0.1},
    }


def _opened(page: Path, chromium: str) -> tuple[float, float]:
    """Seconds until the first figure is there, and until all of them are; each time in a browser of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        started = time.perf_counter()
        tab.goto(page.absolute().as_uri(), wait_until="commit")
        tab.wait_for_selector("#throughput .main-svg", timeout=120_000)
        first = time.perf_counter() - started
        tab.wait_for_selector("body[data-drawn=all]", timeout=120_000)
        whole = time.perf_counter() - started
        browser.close()
    return first, whole


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, action="append", help="default: 1,000 and 10,000")
    parser.add_argument("--turns", type=int, default=5, help="how often each is opened (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="keep the last report as this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
