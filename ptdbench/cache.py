"""Where is kept what nobody has said a place for: data sets, tokens, ceilings."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """The folder ``ptdbench`` in the user's cache folder."""
    # An empty variable counts as unset, says the XDG Base Directory Specification.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptdbench"
