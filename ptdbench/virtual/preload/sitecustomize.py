"""Has each process of a program on virtual GPUs watched: Python imports this at its start, by way of ``PYTHONPATH``.

It imports nothing of ptdbench: the program's Python need not have it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


def _execute(spec: ModuleSpec | None) -> ModuleType | None:
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _AfterTorch(MetaPathFinder):
    """Finds torch where it is, and has it watched once it is imported."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "torch" else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            for name in ("absent", "computed", "watch"):
                path = _HERE.parent / f"{name}.py"
                ours: Any = _execute(importlib.util.spec_from_file_location(f"ptdbench_{name}", path))
                ours.attach()

        loader.exec_module = execute_and_watch
        return spec


sys.meta_path.insert(0, _AfterTorch())

# The user's, or the distribution's: Python imports only the first one.
_execute(PathFinder.find_spec(__name__, [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]))
