"""The default cache folder for data sets, tokens and ceilings."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """The folder ``ptdbench`` in the user's cache folder."""
    # The XDG Base Directory Specification treats an empty variable as unset.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptdbench"
