"""The same runs under two interpreters, or at two commits, in turn on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from ptdbench.problems import ConfigError, Problem
from ptdbench.records import store
from ptdbench.setup import blocks
from ptdbench.setup.config import Repeat
from ptdbench.terminal import say


@dataclass(frozen=True)
class Side:
    """What one half of the runs is started with.

    Attributes:
        name: Of its folder: ``before`` or ``after``.
        python: The interpreter.
        directory: Where it is started: a model of the user's own lies there.
    """

    name: str
    python: str
    directory: Path


def interpreters(pythons: Sequence[str]) -> list[Side]:
    """Two interpreters.

    Raises:
        ConfigError: One is none, or has no ptdbench.
    """
    found = []
    for name, python in zip(("before", "after"), pythons, strict=True):
        path = shutil.which(python)
        if path is None:
            raise ConfigError([Problem("--python", python, "there is no such interpreter", "try old/bin/python")])
        # not resolved: an environment's interpreter is often a link, and is known by its own path
        path = str(Path(path).absolute())
        imports = [path, "-c", "import torch, ptdbench.entry"]
        tried = subprocess.run(imports, capture_output=True, text=True, check=False)
        if tried.returncode:
            reason = (tried.stderr.strip().splitlines() or ["it says nothing"])[-1]
            rule, remedy = f"it cannot run ptdbench: {reason}", f"install ptdbench there: {python} -m pip install ..."
            raise ConfigError([Problem("--python", python, rule, remedy)])
        found.append(Side(name, path, Path.cwd()))
    return found


@contextmanager
def checkouts(revisions: Sequence[str]) -> Iterator[list[Side]]:
    """Two commits of the repository in the current directory, each checked out into a folder that is removed again.

    Raises:
        ConfigError: There is no repository, or one of them is no commit of it.
    """
    top = Path(_git(revisions[0], "rev-parse", "--show-toplevel"))
    for revision in revisions:
        _git(revision, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    folder = Path(mkdtemp(prefix="ptdbench-checkout-"))
    trees = [folder / name for name in ("before", "after")]
    try:
        for tree, revision in zip(trees, revisions, strict=True):
            _git(revision, "worktree", "add", "--quiet", "--detach", str(tree), revision)
        below = Path.cwd().relative_to(top)
        # a folder may be newer than a commit
        yield [Side(tree.name, sys.executable, tree / below if (tree / below).is_dir() else tree) for tree in trees]
    finally:
        for tree in trees:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _git(revision: str, *words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it is no commit of this repository"])[-1]
        raise ConfigError([Problem("--checkout", revision, reason, "give two commits of the repository you are in")])
    return done.stdout.strip()


def run(sides: Sequence[Side], overrides: Sequence[str], repeat: Repeat, directory: Path) -> None:
    """Run each block on both sides, in an order of its own.

    Args:
        sides: Both.
        overrides: What is typed for each; lists are a sweep within each block.
        repeat: How many blocks.
        directory: Where the results go, below ``before`` and ``after``.

    Raises:
        ConfigError: A side refused the command line; it has said why.
    """
    for number, block in ((number, block or 0) for number, block in blocks.order(len(sides), repeat)):
        side = sides[number]
        say(f"block {block}, {side.name}", sys.stderr)
        _start(side, overrides, directory / side.name / str(block), block, directory.name)


def _start(side: Side, overrides: Sequence[str], folder: Path, block: int, series: str) -> None:
    """One block of one side; its table is not shown, and runs that fail are rows of the comparison."""
    own = [f"repeat.block={block}", f"repeat.series='{series}'", f"hydra.sweep.dir='{folder}'"]
    command = [side.python, "-m", "ptdbench", "train", "-m", *overrides, *own]
    done = subprocess.run(command, cwd=side.directory, stdout=subprocess.DEVNULL, check=False)
    if done.returncode < 0 or done.returncode > 128:
        raise ConfigError([Problem("compare", side.name, "was ended by a signal")])
    if not (folder / store.RESULTS).exists():
        raise ConfigError([Problem("compare", side.name, f"{side.python} did not run it; it said why above")])
