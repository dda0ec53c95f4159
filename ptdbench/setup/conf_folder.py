"""Where the configurations of ``conf`` are."""

from __future__ import annotations

from pathlib import Path


def conf_folder() -> Path:
    """Return the folder ``conf``: at the top of a checkout, or inside the package if installed from a wheel."""
    package = Path(__file__).parents[1]
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.with_name("conf")
