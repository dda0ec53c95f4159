"""Reads tables of shared libraries without loading them, by the tools of binutils, which link such libraries too."""

import os
import re
import subprocess
from pathlib import Path

from ptdbench.problems import ConfigError, Problem


def undefined(library: Path) -> set[str]:
    """Return the names that a library expects others to define.

    Raises:
        ConfigError: There are no binutils.
        subprocess.CalledProcessError: The file is not a library, or cannot be read.
    """
    return _names(_output("nm", "-DP", "--undefined-only", library))


def defined(library: Path) -> set[str]:
    """Return the names that a library defines for others; raises as :func:`undefined`."""
    return _names(_output("nm", "-DP", "--defined-only", library))


def texts(library: Path, pattern: str) -> set[str]:
    """Return a library's string constants that match: names that it looks up. Raises as :func:`undefined`."""
    constants = _output("readelf", "-p", ".rodata", library)
    return set(re.findall(rf"^  \[ *[0-9a-f]+\]  ({pattern})$", constants, re.MULTILINE))


def _names(symbols: str) -> set[str]:
    return set(re.findall(r"^[^ @]+", symbols, re.MULTILINE))  # without versions


def _output(*command: str | Path) -> str:
    try:
        return subprocess.run(command, capture_output=True, encoding="latin-1", check=True).stdout
    except FileNotFoundError:
        rule = f"has no {command[0]}, and a virtual GPU needs binutils"
        raise ConfigError([Problem("PATH", os.environ.get("PATH"), rule, "install them")]) from None
