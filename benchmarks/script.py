"""What every benchmark does: read its options, start the product's commands, tell figures and judge them."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what benchmarks measure begins before these are imported
    from ptdbench.setup.config import Config

ROOT = Path(__file__).parents[1]


def parser_of(description: str | None, program: str | None = None) -> argparse.ArgumentParser:
    """A parser of options, whose help shows what a benchmark says of itself as it stands."""
    return argparse.ArgumentParser(program, None, description, formatter_class=argparse.RawDescriptionHelpFormatter)


def read(*words: str) -> Config:
    """The configuration of ``train.py WORDS``."""
    from ptdbench.setup.compose import compose_all

    return compose_all(words).configs[0]


def trained(directory: Path, *words: str, **options: Any) -> dict[str, Any]:
    """Carry out ``train.py WORDS`` of this checkout, and return its record; exits if the run fails.

    ``options`` are those of :func:`subprocess.run`.
    """
    from ptdbench.records import store

    command = [sys.executable, str(ROOT / "train.py"), *words, f"hydra.run.dir={directory}"]
    done = subprocess.run(command, cwd=ROOT, text=True, check=False, **options)
    if done.returncode:
        said = f"{done.stdout or ''}{done.stderr or ''}"
        raise SystemExit(f"{' '.join(command)} ended with exit status {done.returncode}\n{said}")
    return store.load_record(directory)


def swept(name: str, words: Sequence[str]) -> Path:
    """Carry out a sweep of this checkout, and return its directory."""
    sweep = Path("outputs", time.strftime(f"%Y-%m-%d_%H-%M-%S_{name}"))
    subprocess.run([sys.executable, "train.py", "-m", *words, f"hydra.sweep.dir={sweep}"], cwd=ROOT, check=True)
    return ROOT / sweep


def spread(seconds: Sequence[float]) -> str:
    """The median of several times, and the least and the most."""
    return f"{statistics.median(seconds):.3f} (median of {len(seconds)}, {min(seconds):.3f} to {max(seconds):.3f})"


def judged(found: str, required: str, holds: bool) -> bool:
    """Print a figure, what is required of it, and whether that holds; return the last."""
    print(f"{found}, {required} required: {'PASS' if holds else 'MISS'}", flush=True)
    return holds
