"""TF32: whether products and convolutions of fp32 tensors may run on tensor cores, which round their inputs to 10 bits.

torch has a switch for each, with opposite defaults: by its own, products are fp32 and convolutions TF32. The older of
its two interfaces is used: it keeps both of them consistent, and reading one after writing the other raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def allow(on: bool) -> None:
    """Set both switches of this process."""
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on


def is_allowed() -> bool:
    """Return whether either is set, as torch reads them: an MFU then needs the higher peak."""
    return bool(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)


@contextmanager
def allowed(on: bool) -> Iterator[None]:
    """A context with both switches set."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allow(on)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
