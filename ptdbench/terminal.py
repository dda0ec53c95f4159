"""Terminal output: a closed stream does not stop a run, and control characters are escaped."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EPIPE
from pathlib import Path
from typing import TextIO

#: Control characters, surrogates that no stream can encode, and what separates lines or turns the direction of text
#: (``Bidi_Control`` of Unicode), so that a name may read as another one.
_DIRECTING = [0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_CONTROL = [*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000), *_DIRECTING]
#: The text in place of each of them.
ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROL if chr(code) not in "\n\t"}

#: Exists in a checkout, not in an installed wheel.
_TRAIN_PY = Path(__file__).parents[1] / "train.py"


def from_here(path: str | Path) -> Path:
    """Return a path as it is shown: relative if it lies in the current directory, and absolute otherwise."""
    with suppress(ValueError, FileNotFoundError):  # it lies elsewhere, or the current directory was deleted
        return Path(os.path.abspath(path)).relative_to(Path.cwd())
    return Path(os.path.abspath(path))


#: The variable with the command line that submitted this job.
_VARIABLE = "PTDBENCH_TYPED"


def as_variable(words: Sequence[str]) -> dict[str, str]:
    """Return the environment variable that tells another process the program and the folders of this command line."""
    return {_VARIABLE: shlex.join(words)}


def _typed() -> list[str]:
    """Return the command line that started this process, or that submitted its job."""
    words = os.environ.get(_VARIABLE)
    return shlex.split(words) if words else sys.argv


def command(name: str = "train") -> str:
    """Return the command to type to run again as this process was started: ``python train.py`` or ``ptdbench train``.

    Includes the configuration folder that was given, without which the user's own choices might not be found.

    Args:
        name: ``train``, ``status``, ``explain``, ``sbatch``.
    """
    program = Path(_typed()[0])
    is_module = (program.name, program.parent.name) == ("__main__.py", "ptdbench")
    if program.name == "ptdbench" or not (is_module or _TRAIN_PY.exists()):
        typed = f"ptdbench {name}"
    elif is_module or name != "train":
        typed = f"python -m ptdbench {name}"
    else:
        typed = "python train.py"
    return shlex.join([*typed.split(), *sources()]) if name == "train" else typed


#: The commands of launchers with other names.
_COMMANDS = {"openmpi": "mpirun", "mpich": "mpirun", "env": "PTDBENCH_ENV=1"}


def under(launcher: str) -> str:
    """Return how to start the ranks again with a launcher: ``torchrun ... train.py``, ``srun ... ptdbench train``."""
    return f"{_COMMANDS.get(launcher, launcher)} ... {command().removeprefix('python ')}"


#: The options that say where configurations come from, and their short forms.
_SOURCES = {"--config-dir": "-cd", "--config-path": "-cp", "--config-name": "-cn"}


def sources() -> list[str]:
    """Return the options of ``_SOURCES`` that were given, such as ``--config-dir FOLDER``, as words."""
    words, options = _typed(), []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        for name, short in _SOURCES.items():
            if flag in (name, short):
                options += [name, value if equals else following]
    return options


def width() -> int:
    """Return the columns of the terminal, or of the variable ``COLUMNS``; 110 in a file or a pipe."""
    return shutil.get_terminal_size((110, 24)).columns


def plural(count: int, noun: str) -> str:
    """Return ``1 run`` or ``2 runs``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def rank_names(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 1``; of many ranks, the first eight."""
    named = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"


def has_controls(text: str) -> bool:
    """Return whether a text has control characters, line breaks and tabs included."""
    return not {*map(ord, text)}.isdisjoint(_CONTROL)


def plain(text: str) -> str:
    """Escape control characters other than newline and tab, and those of direction: a backslash and ``x1b``."""
    return text.translate(ESCAPED)


def echo(text: str, stream: TextIO | None = None) -> None:
    """Print a line of text and flush it.

    A closed pipe (``| head -1``) ends only the output: the stream is redirected to /dev/null. Any other write error is
    reported once on standard error.

    Args:
        text: What to print; see :func:`plain`.
        stream: The stream to print to; standard output if ``None``.
    """
    stream = sys.stdout if stream is None else stream
    if stream is None or getattr(stream, "closed", False):  # None: this process was started without one
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(plain(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except OSError as error:
        _silence(stream)
        if error.errno != EPIPE and stream is not sys.stderr:
            echo(f"the output cannot be written: {error.strerror}", sys.stderr)


def redraws(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal on which a line can be redrawn in place, in Unicode."""
    try:
        is_terminal = stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
    encoding = (getattr(stream, "encoding", None) or "").lower()
    return is_terminal and os.environ.get("TERM") not in (None, "", "dumb", "unknown") and encoding.startswith("utf")


@contextmanager
def transient(text: str, stream: TextIO | None) -> Iterator[None]:
    """Show a status line on a terminal within the context; another process may draw over it, even if then killed."""
    clear_line(stream, plain(text)[: shutil.get_terminal_size().columns - 4])
    try:
        yield
    finally:
        clear_line(stream)


def clear_line(stream: TextIO | None, text: str = "") -> None:
    """Clear the cursor's line if the stream is a terminal, and write a text there."""
    if stream and redraws(stream):
        with suppress(OSError):
            stream.write(f"\r\x1b[2K{text}")
            stream.flush()


def _silence(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that neither later writes nor Python's final flush fail."""
    with suppress(OSError, ValueError):  # the stream may have no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
