"""Images that a run leaves for people: PNG files beside its record, and the same in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path


def write_figures(directory: Path, figures: Mapping[str, bytes]) -> None:
    """Write each image as ``<name>.png``, and as ``<name>`` into an event file.

    Args:
        directory: The run's directory.
        figures: PNG images by name.
    """
    if not figures:
        return
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory)) as writer:
        for name, image in figures.items():
            (directory / f"{name}.png").write_bytes(image)
            writer.add_image(name, np.asarray(Image.open(BytesIO(image)).convert("RGB")), dataformats="HWC")
