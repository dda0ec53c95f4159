"""A GPT whose steps are longer by a known share, for ``compare_truth.py``."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from ptdbench.models.gpt import GPT


class Slowed(GPT):
    """Sleeps before each forward pass for a share of the time since the last one began.

    Args:
        slower: The share; numbers that are too small to matter make configurations that differ in name alone.
        options: Those of :class:`ptdbench.models.gpt.GPT`.
    """

    def __init__(self, slower: float, **options: Any) -> None:
        super().__init__(**options)
        self._slower = slower
        self._began: float | None = None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """As GPT's, later."""
        now = time.perf_counter()
        if self._began is not None:
            time.sleep(self._slower * (now - self._began))
        self._began = time.perf_counter()
        return super().forward(tokens, targets)
