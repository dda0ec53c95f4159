"""Find the fastest way to parallelize a PyTorch model; :func:`train` does it, and :func:`load` reads the results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptdbench.from_python import TrainError, train
    from ptdbench.records.load import load

__all__ = ["TrainError", "load", "train"]

_MODULES = {"TrainError": "from_python", "load": "records.load", "train": "from_python"}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and no more: no command needs NumPy to start."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
