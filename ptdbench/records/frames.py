"""Where in a user's code an exception was raised, or native code ended the process."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_START = _PACKAGE / "run.py"
_EXAMPLES = _PACKAGE / "examples"
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
_LIBRARY = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def user_frame(exception: BaseException) -> str:
    """The last frame of the traceback that is a user's: ``mymodels.py:13 in forward``; empty if there is none.

    That is code outside of this package, Python's library and the installed packages; else, as with a model from a
    package, the last frame in an installed package other than torch.
    """
    frames = reversed(traceback.extract_tb(exception.__traceback__))
    return _first([(frame.filename, frame.lineno or 0, frame.name) for frame in frames], (_is_own, _is_of_package))


def last_frame(calls: Sequence[tuple[str, int, str]]) -> str:
    """The innermost of these calls that is a user's, as for an exception; else one of this package.

    Args:
        calls: File, line and function of each, innermost first, up to those that have started the run.
    """
    started = next((place for place, (file, *_) in enumerate(calls) if Path(file) == _START), len(calls))
    return _first(calls[: started + 1], (_is_own, _is_of_package, lambda path: _is_below(path, _PACKAGE)))


def _first(calls: Sequence[tuple[str, int, str]], wanted: Sequence[Callable[[Path], bool]]) -> str:
    for is_wanted in wanted:
        for file, line, function in calls:
            path = Path(file)
            if path.is_absolute() and is_wanted(path):
                return f"{_shown(path)}:{line} in {function}"
    return ""


def _is_own(path: Path) -> bool:
    return _is_below(path, _EXAMPLES) or not any(_is_below(path, one) for one in (_PACKAGE, *_INSTALLED, *_LIBRARY))


def _is_of_package(path: Path) -> bool:
    if _is_below(path, _PACKAGE):
        return False
    return any(_is_below(path, one) and path.relative_to(one).parts[0] != "torch" for one in _INSTALLED)


def _is_below(path: Path, folder: Path) -> bool:
    return folder in path.parents


def _shown(path: Path) -> str:
    """Relative to the working directory if it is below, else the name alone."""
    here = Path(os.getcwd())
    return str(path.relative_to(here)) if _is_below(path, here) else path.name
