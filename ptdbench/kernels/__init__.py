"""What computes in place of torch's own modules and functions, unless ``kernels=torch``."""

from typing import Literal

#: ``fused``: our kernels, and one arithmetic under every layout. ``torch``: modules as their authors wrote them, under
#: torch's own recipes.
Kernels = Literal["fused", "torch"]
