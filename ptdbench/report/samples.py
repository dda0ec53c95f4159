"""A look at what a model is shown: mistakes in a data pipeline are seen at a glance and hardly ever otherwise."""

from __future__ import annotations

import io

from torch import Tensor

#: Pixels that a small image's side is drawn with at least.
_LEAST_SIDE = 64


def draw(images: Tensor) -> bytes:
    """Images side by side, as bright as the brightest of them is; a PNG.

    Args:
        images: ``[count, 3, height, width]``, of any range.
    """
    from torch.nn.functional import interpolate
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import make_grid

    factor = max(1, -(-_LEAST_SIDE // images.size(2)))
    grid = make_grid(interpolate(images.contiguous(), scale_factor=factor), nrow=8, normalize=True)
    buffer = io.BytesIO()
    to_pil_image(grid).save(buffer, format="png")
    return buffer.getvalue()
