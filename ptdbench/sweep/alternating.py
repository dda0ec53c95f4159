"""The same runs under two interpreters, or at two commits, in turn on this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

import psutil

from ptdbench.launch import lifetime, local
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import store
from ptdbench.report import versus
from ptdbench.setup import commandline
from ptdbench.setup.config import Repeat
from ptdbench.sweep import blocks
from ptdbench.sweep.blocks import Compared, StoppingRule
from ptdbench.terminal import echo


@dataclass(frozen=True)
class Side:
    """One side of a comparison: what its half of the runs is started with."""

    name: str  #: Of its folder: ``before`` or ``after``.
    python: str  #: The interpreter.
    directory: Path  #: Where it is started: a model of the user's own lies there.
    environ: Mapping[str, str] | None = None  #: Its environment; ``None`` for that of this process.


class StoppedSide(local.Stopped):
    """A signal asked this process to end, and the side that was running has said so."""


#: The top packages of the dotted names in a value, which may be a list of them.
_PACKAGES = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\.")

#: Prints where a package would be imported from, or an empty line.
_LOCATE = """
import importlib.util, sys
for name in sys.argv[1:]:
    found = importlib.util.find_spec(name)
    print(next(iter(found.submodule_search_locations or [found.origin])) if found else "")
"""


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
def checkouts(revisions: Sequence[str], overrides: Sequence[str]) -> Iterator[list[Side]]:
    """Check out two commits of the repository in the current directory into a folder that is removed again.

    A class of the user's own that the overrides name has to come from the checkouts.

    Raises:
        ConfigError: There is no repository, one of them is no commit of it, or a class would not come from it.
        Stopped: A signal arrived; the folder is removed.
    """
    top = Path(_git(revisions[0], "rev-parse", "--show-toplevel"))
    for revision in revisions:
        _git(revision, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    _remove_abandoned(top)
    folder = None
    try:
        with local.deferred():
            folder = Path(mkdtemp(prefix=f"ptdbench-checkout-{socket.gethostname()}-{os.getpid()}-")).resolve()
        sides = []
        for name, revision in zip(("before", "after"), revisions, strict=True):
            with local.deferred():  # git leaves what it was killed at half done
                _git(revision, "worktree", "add", "--quiet", "--detach", str(folder / name), revision)
            sides.append(_checked_out(folder / name, top))
        for side in sides:
            _require_from_checkout(side, folder, top, overrides)
        yield sides
    finally:
        with local.deferred():
            if folder is not None:
                _remove(folder, folder.iterdir(), top)


#: The folder of two checkouts, named after the process that has made it.
_OF_PROCESS = re.compile(r"ptdbench-checkout-(?P<host>.+)-(?P<pid>\d+)-\w+")


def _remove_abandoned(top: Path) -> None:
    """Remove the checkouts of processes of this machine that were killed before they could."""
    with local.deferred():
        listed = _git("HEAD", "-C", str(top), "worktree", "list", "--porcelain").splitlines()
        for tree in (Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")):
            made = _OF_PROCESS.fullmatch(tree.parent.name)
            if made and made["host"] == socket.gethostname() and not psutil.pid_exists(int(made["pid"])):
                _remove(tree.parent, [tree], top)


def _remove(folder: Path, trees: Iterable[Path], top: Path) -> None:
    """Remove a folder with its checkouts, those that git has not finished too."""
    for tree in trees:
        remove = ["git", "-C", str(top), "worktree", "remove", "--force", "--force", str(tree)]
        subprocess.run(remove, capture_output=True, check=False, start_new_session=True)
    shutil.rmtree(folder, ignore_errors=True)


def _git(revision: str, *words: str) -> str:
    remedy = "give two commits of the repository you are in"
    try:  # in a session of its own, where Ctrl-C does not reach it
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, start_new_session=True)
    except FileNotFoundError:
        raise ConfigError([Problem("--checkout", revision, "there is no git on PATH", "install git")]) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it is no commit of this repository"])[-1]
        raise ConfigError([Problem("--checkout", revision, reason, remedy)])
    return done.stdout.strip()


def _checked_out(tree: Path, top: Path) -> Side:
    """A side that imports from its checkout what this process would import from the working tree."""
    here = tree / Path.cwd().relative_to(top)
    here = here if here.is_dir() else tree  # a folder may be newer than a commit
    path = [here, tree, tree / "src"]
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        folder = Path(entry).resolve()  # an empty one is the current folder
        path.append(tree / folder.relative_to(top) if folder.is_relative_to(top) else folder)
    found = dict.fromkeys(str(folder) for folder in path if folder.exists())
    return Side(tree.name, sys.executable, here, {**os.environ, "PYTHONPATH": os.pathsep.join(found)})


def _require_from_checkout(side: Side, folder: Path, top: Path, overrides: Sequence[str]) -> None:
    """Refuse a class that both sides would import from the working tree, as of a package installed as editable."""
    typed = (word.partition("=") for word in overrides if commandline.option(word).endswith("_target_"))
    targets = {package: (option, value) for option, _, value in typed for package in _PACKAGES.findall(value)}
    if not targets:
        return
    locate = [side.python, "-c", _LOCATE, *targets]
    done = subprocess.run(locate, cwd=side.directory, env=side.environ, capture_output=True, text=True, check=False)
    for (option, value), line in zip(targets.values(), done.stdout.splitlines(), strict=False):
        origin = Path(line).resolve()
        installed = {"site-packages", "dist-packages"} & set(origin.parts)  # an environment may lie in a repository
        if line and origin.is_relative_to(top) and not origin.is_relative_to(folder) and not installed:
            rule = f"{side.name} would import it from {origin}, which is no checkout"
            remedy = "start it in the folder that holds the package, or uninstall the package"
            raise ConfigError([Problem(option, value, rule, remedy)])


def run(sides: Sequence[Side], overrides: Sequence[str], repeat: Repeat, directory: Path) -> None:
    """Run each block on both sides, in an order of its own, unless nothing runs on either: further blocks would not.

    With ``repeat=auto`` until both sides are known to differ or to be tied. Lists in the overrides are a sweep within
    each block. Results go below ``before`` and ``after`` in the directory.

    Raises:
        ConfigError: A side refused the command line; it has said why.
        Stopped: A signal arrived; the side that was running has ended as a sweep does by itself.
    """
    stopping = StoppingRule(repeat, _both_sides) if repeat.runs == "auto" else None
    order = [(number, block or 0) for number, block in blocks.order(len(sides), repeat)]
    for place, (number, block) in enumerate(order):
        begins = place % len(sides) == 0
        if stopping and begins and stopping(directory, block):
            break
        if begins and block and _has_only_failed(sides, directory, block - 1):
            echo(f"block {block - 1}: every run failed on both sides; stopped", sys.stderr)
            break
        side = sides[number]
        echo(f"block {block}, {side.name}", sys.stderr)
        _start(side, overrides, directory / side.name / str(block), replace(repeat, block=block, series=directory.name))


def _has_only_failed(sides: Sequence[Side], directory: Path, block: int) -> bool:
    """Tell whether no run of the block was ok; one that was interrupted might have been."""
    runs = [run for side in sides for run in store.read_results(directory / side.name / str(block))]
    return bool(runs) and all(run["status"] not in ("ok", "preempted") for run in runs)


def _both_sides(directory: Path, count: int) -> list[Compared]:
    """Pair what both sides have carried out in so many blocks, each configuration against itself."""
    runs = [
        [run for block in range(count) for run in store.read_results(directory / side / str(block))]
        for side in ("before", "after")
    ]
    try:
        found = versus.match(*([run for run in of_side if run.get("model")] for of_side in runs))
    except versus.Incomparable:  # whoever shows the results says why
        return []
    return [
        Compared(one.before, one.after, f"before and after of {one.label}")
        for one in found.pairs
        if one.before.sample and one.after.sample
    ]


def _start(side: Side, overrides: Sequence[str], folder: Path, repeat: Repeat) -> None:
    """One block of one side; its table is not shown, and runs that fail are rows of the comparison."""
    place = commandline.quoted(str(folder))
    own = [f"repeat.block={repeat.block}", f"repeat.series={commandline.quoted(str(repeat.series))}"]
    if repeat.runs == "auto":  # the records say that it was looked at several times
        own += ["repeat.runs=auto", f"repeat.max={repeat.max}"]
    words = [*overrides, *own, f"hydra.sweep.dir={place}"]
    status = _wait_for([side.python, "-m", "ptdbench", "train", "-m", *words], side)
    if status < 0 or status > 128:
        raise ConfigError([Problem("compare", side.name, "was ended by a signal")])
    if not (folder / store.RESULTS).exists():
        raise ConfigError([Problem("compare", side.name, f"{side.python} did not run it; it said why above")])


def _wait_for(command: Sequence[str], side: Side) -> int:
    """Start a sweep, pass on to it the stop signals that arrive meanwhile, and return its exit status.

    It has a session of its own, so that a Ctrl-C reaches it once, through this process.

    Raises:
        Stopped: There was such a signal; the sweep has ended. :class:`StoppedSide` where it ended by that signal.
    """
    noted: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: object) -> None:
        noted.append(number)
        if child is not None:
            child.send_signal(number)

    with local.handling(pass_on):
        child = subprocess.Popen(
            command, cwd=side.directory, env=side.environ, stdout=subprocess.DEVNULL, start_new_session=True
        )
        for number in noted:  # those that came before there was whom to pass them on to
            child.send_signal(number)
        status = lifetime.wait_for(child)
    if noted:
        raise (StoppedSide if status == 128 + noted[0] else local.Stopped)(noted[0])
    return status
