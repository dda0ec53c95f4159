"""Options, commands of ptdbench, figures and verdicts of all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # gpu-check and launch times begin before these are imported
    from ptdbench.setup.config import Config

ROOT = Path(__file__).parents[1]
TRAIN = (sys.executable, str(ROOT / "train.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

#: The variable that torchrun would set by itself, with a warning.
TORCHRUN_THREADS = {"OMP_NUM_THREADS": "1"}


def options(description: str | None, program: str | None = None, **flags: tuple[Any, ...]) -> argparse.Namespace:
    """Parse the command line of a benchmark, whose ``--help`` shows its docstring as it stands.

    Args:
        description: The docstring.
        program: How the benchmark is called.
        flags: For each option its default, its help and, if it has any, its choices. A default of ``False`` makes a
            switch, a tuple an option of several values, and a type an option that is ``None`` by default.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(program, description=description, formatter_class=form)
    for name, (default, text, *choices) in flags.items():
        flag, shown = f"--{name.replace('_', '-')}", "" if isinstance(default, type) else " (default: %(default)s)"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        several = isinstance(default, tuple)
        kind = default if isinstance(default, type) else type((default or ("",))[0] if several else default)
        parser.add_argument(
            flag, type=kind, nargs="*" if several else None, choices=choices[0] if choices else None,
            default=None if isinstance(default, type) else default, help=text + shown,
        )  # fmt: skip
    return parser.parse_args()


def read(*words: str) -> Config:
    """Compose the configuration of ``train.py WORDS``."""
    from ptdbench.setup.compose import compose_all

    return compose_all(words).configs[0]


def trained(
    directory: Path, *words: str, launcher: Sequence[str] = TRAIN[:1], fails: bool = False, **settings: Any
) -> dict[str, Any]:
    """Run ``train.py WORDS`` of this checkout, and return its record.

    Args:
        directory: Of the run.
        words: Overrides.
        launcher: The words before ``train.py``.
        fails: Whether the run may fail; otherwise its failure ends this process. A run that leaves no record has the
            status ``refused``, or ``hung`` after a timeout, and its output as the error.
        settings: Those of :func:`subprocess.run`.
    """
    command, path = [*launcher, TRAIN[1], *words, f"hydra.run.dir={directory}"], directory / "record.json"
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, check=False, capture_output=True, **settings)
        status, output = "refused", f"{done.stdout}{done.stderr}".strip()
    except subprocess.TimeoutExpired as late:
        status, output = "hung", str(late)
    if (status == "hung" or done.returncode) and not fails:
        raise SystemExit(f"{' '.join(command)} failed\n{output}")
    if not path.exists():
        error = {"rank": -1, "type": status, "message": output, "traceback": ""}
        identity = {"workload": "-", "fingerprint": "", "directory": str(directory)}
        return {"status": status, "error": error, **identity}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def seconds_of(command: Sequence[str], **settings: Any) -> float:
    """Run a command that must succeed, and return the seconds from its start to its exit."""
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, **settings)
    return time.perf_counter() - started


def spread(seconds: Sequence[float]) -> str:
    """Format the median, minimum and maximum of several times."""
    return f"{statistics.median(seconds):.3f} (median of {len(seconds)}, {min(seconds):.3f} to {max(seconds):.3f})"


def judged(figure: str, required: str, holds: bool) -> bool:
    """Print a figure, its requirement, and whether that holds; return the last."""
    print(f"{figure}, {required} required: {'PASS' if holds else 'MISS'}", flush=True)
    return holds


def keep(name: str, result: str | Sequence[Sequence[str]]) -> None:
    """Store a result in ``results.json`` and rewrite the README's tables, if the benchmark was started with ``KEEP=1``.

    Args:
        name: Of a figure or a table of ``results.json``.
        result: The text of the figure's cell, or the rows of the table.
    """
    if os.environ.get("KEEP"):
        from benchmarks import tables

        tables.store(name, result)
