"""How long ``python -m ptdbench status`` takes on a large sweep that has ended.

    python benchmarks/status_speed.py
    python benchmarks/status_speed.py --runs 5000

Makes the directory of a submitted sweep as its jobs leave it, with a record and a result of realistic size for each
run, and times the whole command from its start to its end, Python included. How long Python takes to do nothing stands
beside it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ptdbench.measure.hardware import environment
from ptdbench.records import ledger, record, store
from ptdbench.setup import config
from ptdbench.setup.compose import compose_all

#: Seconds that the command may take on 1,000 runs.
LIMIT = 2.0


def main() -> int:
    """Print the figures; 1 if they miss the requirement."""
    options = _parse()
    with TemporaryDirectory() as folder:
        sweep = Path(folder)
        make(sweep, options.runs)
        size = (sweep / store.RESULTS).stat().st_size
        status = [sys.executable, "-m", "ptdbench", "status", folder]
        rows = subprocess.run(status, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[2:]
        if len(rows) != options.runs or not all(" ok " in row for row in rows):
            raise SystemExit(f"the table should have {options.runs} rows that say ok:\n" + "\n".join(rows[:3]))
        turns = [(_seconds(status), _seconds([sys.executable, "-c", "pass"])) for _ in range(options.turns)]
    took, empty = zip(*turns, strict=True)
    print(f"seconds from command to exit, {options.runs:,} runs: {size / 1e6:.1f} MB of results")
    print(f"  python -m ptdbench status  {_spread(took)}")
    print(f"  python -c pass             {_spread(empty)}")
    median = statistics.median(took)
    print(f"status: {median:.2f} s, under {LIMIT:.0f} s required: {'PASS' if median < LIMIT else 'MISS'}")
    return int(median >= LIMIT)


def make(sweep: Path, runs: int) -> None:
    """Write a sweep of which every run was submitted and has ended well."""
    overrides = ["model=gpt_tiny", "parallel=ddp", "device=cpu", "cluster=slurm"]
    composed = config.resolve(compose_all(overrides, multirun=True).jobs[0])
    found = environment("cpu")
    jobs = []
    for number in range(runs):
        directory = sweep / f"{number}_gpt_tiny_ddp"
        directory.mkdir()
        done = record.begin(composed, directory, found) | _result()
        store.write_record(directory, done)
        store.append_result(sweep, done)
        jobs.append(
            ledger.Job(
                number=number,
                name="ptdbench-sweep",
                element=number,
                id=f"7_{number}",
                label="gpt_tiny_ddp",
                shape="2 nodes x 4 ranks",
                overrides=overrides,
                directory=directory.name,
                log=str(sweep / "logs" / f"7_{number}"),
            )
        )
    ledger.write(sweep, ledger.Ledger(overrides, jobs))


def _result() -> dict[str, Any]:
    """What a run adds to its record; figures have as many digits as real ones."""
    third = 1 / 3
    return {
        "status": "ok",
        "error": None,
        "world_size": 8,
        "launcher": "srun",
        "nodes": ["n1", "n2"],
        "steps": 60,
        "final_loss": third,
        "metrics": {
            "step_seconds": {"median": third, "mean": third, "p5": third, "p95": third, "ci95": [third, third]},
            "tokens_per_second": 1e5 * third,
            "samples_per_second": 1e3 * third,
            "startup_seconds": dict.fromkeys(("import", "config", "rendezvous", "build", "first_step"), third),
        },
    }


def _seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} (median of {len(seconds)}, {min(seconds):.3f} to {max(seconds):.3f})"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="of both commands (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
