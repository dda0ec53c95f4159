"""ptdbench: which way of parallelizing a PyTorch model is fastest on the machine at hand."""

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
