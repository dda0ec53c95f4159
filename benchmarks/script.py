"""What every benchmark does: read its options, start commands of ptdbench, print figures, judge and store them."""

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


def options(description: str | None, program: str | None = None, **flags: tuple[Any, ...]) -> argparse.Namespace:
    """Parse the command line of a benchmark, whose ``--help`` shows its docstring as it stands.

    Args:
        description: The docstring.
        program: How the benchmark is called.
        flags: For each option its default, its help and, where there are such, its choices. An option whose default is
            ``False`` is a switch, one whose default is a tuple takes several values. A type in place of the default
            stands for ``None`` by default.
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
    """Carry out ``train.py WORDS`` of this checkout, and return its record.

    Args:
        directory: Of the run.
        words: Overrides.
        launcher: The words before ``train.py``.
        fails: Whether the run may fail; otherwise this process exits when it does. A run that leaves no record, as it
            was refused or took too long, has the status ``refused`` or ``hung``, and what was said as its error.
        settings: Those of :func:`subprocess.run`.
    """
    command, path = [*launcher, TRAIN[1], *words, f"hydra.run.dir={directory}"], directory / "record.json"
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, check=False, capture_output=True, **settings)
        status, said = "refused", f"{done.stdout}{done.stderr}".strip()
    except subprocess.TimeoutExpired as late:
        status, said = "hung", str(late)
    if (status == "hung" or done.returncode) and not fails:
        raise SystemExit(f"{' '.join(command)} failed\n{said}")
    if not path.exists():
        error = {"rank": -1, "type": status, "message": said, "traceback": ""}
        identity = {"workload": "-", "fingerprint": "", "directory": str(directory)}
        return {"status": status, "error": error, **identity}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def seconds_of(command: Sequence[str], **settings: Any) -> float:
    """Carry out a command that must succeed, and return the seconds from its start to its exit."""
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, **settings)
    return time.perf_counter() - started


def spread(seconds: Sequence[float]) -> str:
    """Format the median of several times, the least and the most."""
    return f"{statistics.median(seconds):.3f} (median of {len(seconds)}, {min(seconds):.3f} to {max(seconds):.3f})"


def judged(figure: str, required: str, holds: bool) -> bool:
    """Print a figure, what is required of it, and whether that holds; return the last."""
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
