"""Options of FSDP that ptdbench refuses with a torch that has no way to set them."""

import pytest

from ptdbench.parallel.conflicts import SETTERS, is_settable

HAS_SETTERS = all(map(is_settable, SETTERS))

needs_setters = pytest.mark.skipif(not HAS_SETTERS, reason="needs torch 2.14, whose FSDP has more options")
