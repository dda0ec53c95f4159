"""Options of FSDP that ptdbench refuses with a torch that has no way to set them."""

import pytest
from torch.distributed.fsdp import FSDPModule

from ptdbench.parallel.conflicts import SETTERS

HAS_SETTERS = all(hasattr(FSDPModule, setter) for setter in SETTERS.values())

needs_setters = pytest.mark.skipif(not HAS_SETTERS, reason="needs torch 2.14, whose FSDP has more options")
