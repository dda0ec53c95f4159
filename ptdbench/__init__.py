"""Find the fastest way to parallelize a PyTorch model; :func:`load` reads the results."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptdbench.records.load import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Import :func:`ptdbench.records.load.load` when it is asked for: no command needs NumPy to start."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ptdbench.records.load import load

    return load
