"""A stage of a pipeline whose neighbors are not there: what would come from them follows from the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from ptdbench.models.protocol import Model


class LoneStage(PipelineStage):
    """A stage that asks nobody for shapes; its messages are left to a device that lets them go nowhere.

    Attributes:
        arriving: What the stage before it would send for a micro-batch, on the meta device; ``None`` for the first.
    """

    arriving: Tensor | None = None

    def _recv_meta(self, src_stage: int) -> Any:
        """The shapes that the neighbor would send, as torch 2.14 asks for them."""
        from torch.distributed.pipelining import _utils

        if src_stage > self.stage_index:  # the gradients of what this stage sends
            assert self._stage_meta.outputs is not None
            return _utils._StageBackwardMeta(_utils._derive_grad_metas(self._stage_meta.outputs))
        assert self.arriving is not None
        metas = _utils.extract_tensor_metas((self.arriving,))
        assert metas is not None
        return _utils._StageForwardMeta(metas)

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Tell nobody."""


def arriving(model: Model, names: Iterable[str], inputs: Tensor, dtype: torch.dtype, shares: int) -> Tensor:
    """What the parts of a model would send, on the meta device.

    Args:
        model: A chain of parts; these are on the meta device.
        names: The first ones, in order.
        inputs: Of a micro-batch.
        dtype: Of what they send.
        shares: Ranks that share its positions.
    """
    parts = model.parts() or {}
    found = torch.empty_like(inputs, device="meta")
    with torch.no_grad():
        for name in names:
            found = parts[name](found)
    batch, *rest = found.shape
    if shares > 1:
        rest[0] //= shares
    return torch.empty(batch, *rest, dtype=dtype, device="meta", requires_grad=True)
