"""What computes under ``kernels=torch`` although it is ours, as torch has nothing that works there."""

from __future__ import annotations

from ptdbench.parallel.dims import Dims
from ptdbench.parallel.options import Options


def ranks_agree_on_overflow(dims: Dims) -> bool:
    """Return whether torch's own loss scaler skips a step on all ranks if a gradient has overflowed on one.

    Averaged gradients overflow everywhere, and torch asks the ranks that share weights of one mesh; but not those of
    other stages, nor of the two meshes that experts and other weights are divided over.
    """
    return dims.pipeline == 1 and dims.expert == 1


def stand_ins(options: Options, dims: Dims, *, scales: bool) -> list[str]:
    """Return what of ours is used for a layout; ``scales``: whether losses are scaled, as fp16 needs."""
    rows = [
        (dims.context > 1, f"attention across ranks ({options.context_method})"),
        (dims.expert > 1, "the exchange of tokens between experts"),
        (options.replicates(dims) and options.optimizer == "zero1", "zero1"),
        (scales and not ranks_agree_on_overflow(dims), "loss scaling"),
    ]
    return [name for is_used, name in rows if is_used]
