"""The default cache folder for data sets, tokens and ceilings."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path


def user_cache() -> Path:
    """The folder ``ptdbench`` in the user's cache folder: ``$XDG_CACHE_HOME`` or ``~/.cache`` on Linux."""
    return user_cache_path("ptdbench")
