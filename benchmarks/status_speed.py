"""How long ``python -m ptdbench status`` takes on a large sweep that has ended.

    python benchmarks/status_speed.py
    python benchmarks/status_speed.py --runs 5000

Makes the directory of a submitted sweep as its jobs leave it, with a record and a result of realistic size for each
run, and times the whole command from its start to its end, Python included. How long Python takes to do nothing stands
beside it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report_speed import result
from benchmarks.script import judged, parser_of, read, spread
from ptdbench.measure.hardware import environment
from ptdbench.records import ledger, record, store

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
    print(f"  python -m ptdbench status  {spread(took)}")
    print(f"  python -c pass             {spread(empty)}")
    median = statistics.median(took)
    return int(not judged(f"status: {median:.2f} s", f"under {LIMIT:.0f} s", median < LIMIT))


def make(sweep: Path, runs: int) -> None:
    """Write a sweep of which every run was submitted and has ended well."""
    overrides = ["model=gpt_tiny", "parallel=ddp", "device=cpu", "cluster=slurm"]
    resolved = read(*overrides).resolved
    found, draw = environment("cpu"), random.Random(0)
    jobs = []
    for number in range(runs):
        directory = sweep / f"{number}_gpt_tiny_ddp"
        directory.mkdir()
        done = record.begin(resolved, directory, found) | result(draw, ranks=8, batch=16)
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


def _seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="of both commands (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
