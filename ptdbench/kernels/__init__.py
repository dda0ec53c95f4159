"""Replacements of torch's computations, and which kernels a run uses.

Imports no torch: the command line is checked without it.
"""

from typing import Literal

#: ``fused``: our kernels, and one arithmetic under every layout. ``torch``: modules as their authors wrote them, under
#: torch's own recipes.
Kernels = Literal["fused", "torch"]
