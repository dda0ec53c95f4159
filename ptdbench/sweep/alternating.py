"""The same runs under two interpreters, or at two commits, alternating on this machine."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

from ptdbench import search_path
from ptdbench.launch import local
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import store
from ptdbench.report import versus
from ptdbench.setup import commandline
from ptdbench.setup.config import Repeat
from ptdbench.setup.runs import order
from ptdbench.sweep.blocks import Compared, StoppingRule
from ptdbench.terminal import echo


@dataclass(frozen=True)
class Side:
    """One side of a comparison: how its half of the runs is started."""

    name: str  #: Name of its folder: ``before`` or ``after``.
    python: str  #: The interpreter.
    directory: Path  #: The working directory, which may contain a user's model.
    environ: Mapping[str, str] | None = None  #: Its environment; ``None`` for this process's.


class StoppedSide(local.Stopped):
    """A signal asked this process to stop, and the side that was running has reported it."""


#: The top-level packages of the dotted names in a value, which may be a list of them.
_PACKAGES = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\.")

#: Program that prints, for each package, where it would be imported from, or an empty line.
_LOCATE = f"""{search_path.LAST}
import importlib.util
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    print(next(iter(spec.submodule_search_locations or [spec.origin])) if spec else "")
"""


def interpreters(pythons: Sequence[str]) -> list[Side]:
    """Return the sides of two interpreters.

    Raises:
        ConfigError: One is not an interpreter, or lacks ptdbench.
    """
    sides = []
    for name, python in zip(("before", "after"), pythons, strict=True):
        if (path := shutil.which(python)) is None:
            raise ConfigError([Problem("--python", python, "there is no such interpreter", "try old/bin/python")])
        # Not resolved: an environment's interpreter is often a link, whose path identifies the environment.
        path = str(Path(path).absolute())
        imports = [path, "-c", f"{search_path.LAST}; import torch, ptdbench.entry"]
        tried = subprocess.run(imports, capture_output=True, text=True, check=False)
        if tried.returncode:
            reason = (tried.stderr.strip().splitlines() or ["it says nothing"])[-1]
            rule, remedy = f"it cannot run ptdbench: {reason}", f"install ptdbench there: {python} -m pip install ..."
            raise ConfigError([Problem("--python", python, rule, remedy)])
        sides.append(Side(name, path, Path.cwd()))
    return sides


@contextmanager
def checkouts(revisions: Sequence[str], overrides: Sequence[str]) -> Iterator[list[Side]]:
    """Check out two commits of the repository in the current directory into a temporary folder.

    Users' classes named in the overrides must be imported from the checkouts.

    Raises:
        ConfigError: There is no repository, a revision is not a commit, or a class would be imported from elsewhere.
        Stopped: A signal arrived; the folder is removed.
    """
    top = Path(_git(revisions[0], "rev-parse", "--show-toplevel"))
    for revision in revisions:
        _git(revision, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    folder = None
    try:
        with local.deferred():
            folder = Path(mkdtemp(prefix="ptdbench-checkout-")).resolve()
        sides = []
        for name, revision in zip(("before", "after"), revisions, strict=True):
            with local.deferred():  # a killed git leaves its work half done
                _git(revision, "worktree", "add", "--quiet", "--detach", str(folder / name), revision)
            sides.append(_checked_out(folder / name, top))
        for side in sides:
            _require_from_checkout(side, folder, top, overrides)
        yield sides
    finally:
        with local.deferred():
            if folder is not None:
                _remove(folder, folder.iterdir(), top)


def _remove(folder: Path, trees: Iterable[Path], top: Path) -> None:
    """Remove a folder with its checkouts, even incomplete ones."""
    for tree in trees:
        remove = ["git", "-C", str(top), "worktree", "remove", "--force", "--force", str(tree)]
        subprocess.run(remove, capture_output=True, check=False, start_new_session=True)
    shutil.rmtree(folder, ignore_errors=True)


def _git(revision: str, *words: str) -> str:
    try:  # in a separate session, which Ctrl-C does not reach
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, start_new_session=True)
    except FileNotFoundError:
        raise ConfigError([Problem("--checkout", revision, "there is no git on PATH", "install git")]) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it is no commit of this repository"])[-1]
        raise ConfigError([Problem("--checkout", revision, reason, "give two commits of the repository you are in")])
    return done.stdout.strip()


def _checked_out(tree: Path, top: Path) -> Side:
    """Return a side that imports from its checkout what this process would import from the working tree."""
    directory = tree / Path.cwd().relative_to(top)
    directory = directory if directory.is_dir() else tree  # the folder may be newer than the commit
    path = [directory, tree, tree / "src"]
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        folder = Path(entry).resolve()  # an empty entry is the current folder
        path.append(tree / folder.relative_to(top) if folder.is_relative_to(top) else folder)
    folders = dict.fromkeys([*search_path.standard(), *(str(folder) for folder in path if folder.exists())])
    return Side(tree.name, sys.executable, directory, {**os.environ, "PYTHONPATH": os.pathsep.join(folders)})


def _require_from_checkout(side: Side, folder: Path, top: Path, overrides: Sequence[str]) -> None:
    """Refuse a class that both sides would import from the working tree, as with an editable install."""
    typed = (word.partition("=") for word in overrides if commandline.option(word).endswith("_target_"))
    targets = {package: (option, value) for option, _, value in typed for package in _PACKAGES.findall(value)}
    if not targets:
        return
    locate = [side.python, "-c", _LOCATE, *targets]
    done = subprocess.run(locate, cwd=side.directory, env=side.environ, capture_output=True, text=True, check=False)
    for (option, value), line in zip(targets.values(), done.stdout.splitlines(), strict=False):
        origin = Path(line).resolve()
        installed = {"site-packages", "dist-packages"} & set(origin.parts)  # an environment may be inside a repository
        if line and origin.is_relative_to(top) and not origin.is_relative_to(folder) and not installed:
            rule = f"{side.name} would import it from {origin}, which is no checkout"
            remedy = "start it in the folder that holds the package, or uninstall the package"
            raise ConfigError([Problem(option, value, rule, remedy)])


def run(sides: Sequence[Side], overrides: Sequence[str], repeat: Repeat, directory: Path) -> None:
    """Run each block on both sides, in random order; stop after a block in which every run failed.

    With ``repeat=auto``, until both sides are known to differ or to be tied. Lists in the overrides are a sweep within
    each block. Results are written below ``before`` and ``after`` in the directory.

    Raises:
        ConfigError: A side refused the command line; it has printed why.
        Stopped: A signal arrived; the side that was running has ended like any sweep.
    """
    stopping = StoppingRule(repeat, _both_sides) if repeat.runs == "auto" else None
    for place, (number, in_block) in enumerate(order(len(sides), repeat)):
        side, block, begins = sides[number], in_block or 0, place % len(sides) == 0
        if stopping and begins and stopping(directory, block):
            break
        if begins and block and _has_only_failed(sides, directory, block - 1):
            echo(f"block {block - 1}: every run failed on both sides; stopped", sys.stderr)
            break
        echo(f"block {block}, {side.name}", sys.stderr)
        _start(side, overrides, directory / side.name / str(block), replace(repeat, block=block, series=directory.name))


def _has_only_failed(sides: Sequence[Side], directory: Path, block: int) -> bool:
    """Return whether all runs of the block failed; an interrupted run does not count as failed."""
    runs = [run for side in sides for run in store.read_results(directory / side.name / str(block))]
    return bool(runs) and all(run.status not in ("ok", "preempted") for run in runs)


def _both_sides(directory: Path, count: int) -> list[Compared]:
    """Pair the results of both sides in the first ``count`` blocks, each configuration with itself."""
    runs = [
        [run for block in range(count) for run in store.read_results(directory / side / str(block))]
        for side in ("before", "after")
    ]
    try:
        comparison = versus.match(*([run for run in of_side if run.model] for of_side in runs))
    except versus.Incomparable:  # explained when the results are shown
        return []
    return [
        Compared(pair.before, pair.after, f"before and after of {pair.label}")
        for pair in comparison.pairs
        if pair.before.sample and pair.after.sample
    ]


def _start(side: Side, overrides: Sequence[str], folder: Path, repeat: Repeat) -> None:
    """Run one block of one side; its table is not shown, and failed runs are rows of the comparison."""
    of_block = [f"repeat.block={repeat.block}", f"repeat.series={commandline.quoted(str(repeat.series))}"]
    if repeat.runs == "auto":  # so that the records tell that results were examined several times
        of_block += ["repeat.runs=auto", f"repeat.max={repeat.max}"]
    words = [*overrides, *of_block, f"hydra.sweep.dir={commandline.quoted(str(folder))}"]
    command = [side.python, *search_path.module("ptdbench"), "train", "-m", *words]
    status, stopped = local.attended(command, cwd=side.directory, env=side.environ, stdout=subprocess.DEVNULL)
    if stopped:
        raise (StoppedSide if status == 128 + stopped else local.Stopped)(stopped)
    if status < 0 or status > 128:
        raise ConfigError([Problem("compare", side.name, "was ended by a signal")])
    if not (folder / store.RESULTS).exists():
        raise ConfigError([Problem("compare", side.name, f"{side.python} did not run it; it said why above")])
