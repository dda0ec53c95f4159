"""The search path of modules: the current folder comes after the standard library, in this process and in its children.

A file ``random.py`` or ``types.py`` beside the command would otherwise be taken for Python's own, also by the
interpreter while it starts: it puts the current folder first for ``-c`` and ``-m``.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from ptdbench.problems import ConfigError, Problem, require

#: The variable with the folder that a job was submitted from, which may differ from its current one.
FOLDER = "PTDBENCH_FOLDER"

#: The folder of the standard library, which hides none of its modules.
_STANDARD = os.path.dirname(os.__file__)

#: Packages that are imported only after :func:`add_current`.
_LATER = ("torch", "numpy")

#: Begins a program for ``-c``: the current folder becomes the last in its path. Python 3.10 has neither ``-P`` nor
#: PYTHONSAFEPATH, which would also reach what a user's model starts.
LAST = "import sys; sys.path.sort(key=lambda folder: not folder)"


def module(name: str) -> list[str]:
    """Return an interpreter's arguments to run a module as by ``-m``, but with the current folder last in its path."""
    run = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    return ["-c", f"{LAST}; {run}", name]


def standard() -> list[str]:
    """Return the entries of the search path with the standard library."""
    return [entry for entry in sys.path if entry == _STANDARD or entry.endswith("lib-dynload")]


def inherited() -> dict[str, str]:
    """Return the variables with which another process finds this package and the user's modules as this one does."""
    script, path = Path(sys.argv[0]).resolve(), os.environ.get("PYTHONPATH")
    folders = [*([str(script.parent)] if script.name == "train.py" else []), *([path] if path else [])]
    return {FOLDER: str(Path.cwd()), **({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})}


@contextmanager
def safe() -> Iterator[None]:
    """Within the context, processes of :mod:`multiprocessing`, which start with ``-c``, start in a harmless folder."""
    descriptor = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))  # even if it was deleted, or cannot be listed
    try:
        os.chdir(_STANDARD)
        yield
    finally:
        os.fchdir(descriptor)
        os.close(descriptor)


def add_current() -> None:
    """Make the user's modules in the current directory importable, however this process was started.

    Raises:
        ConfigError: There is none, or a file of it would be imported in place of a package that is needed here.
    """
    try:
        current = Path.cwd()
    except FileNotFoundError:
        remedy = "change to another one, also if one of its name exists again"
        raise ConfigError([Problem("current directory", ".", "was deleted", remedy)]) from None
    needed = {*_LATER, *(name for name in sys.modules if "." not in name)} - sys.stdlib_module_names - {"__main__"}
    require(*(_hidden(current, name) for name in sorted(needed)))
    for folder in dict.fromkeys([os.environ.get(FOLDER, str(current)), str(current)]):
        if folder not in sys.path:
            sys.path.insert(max(map(sys.path.index, standard()), default=-1) + 1, folder)


def _hidden(folder: Path, name: str) -> Problem | None:
    """Return a problem if a module in the folder would be imported in place of another of its name."""
    with suppress(ValueError, OSError):  # a module without a specification, or without a file
        for file in filter(Path.exists, (folder / f"{name}.py", folder / name / "__init__.py")):
            if (meant := find_spec(name)) and meant.origin and not file.samefile(meant.origin):
                instead = "rename it" if name != __package__ else "use python train.py here"
                rule = f"ranks started here would import it instead of {meant.origin}"
                return Problem(name, file, rule, f"{instead}, or use another directory")
    return None
