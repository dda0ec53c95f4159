"""A model whose steps take their time while a file is there: ``model._target_=tests.launch.patient.Patient``.

What a test does to a run in the middle then falls into the middle, however fast the machine is and however late the
test comes. The file removed, the rest of the run takes no longer than that of any small model.
"""

import time
from pathlib import Path

from torch import Tensor, nn


def patient(file: Path, seconds: float = 0.01) -> tuple[str, ...]:
    """The words of a command line for it; the file is made.

    A hundred steps take a second, and what comes between two looks of a test is few.
    """
    file.touch()
    return (
        "model=custom", "model._target_=tests.launch.patient.Patient", f"+model.file={file}",
        f"+model.seconds={seconds}", "data=synthetic_vectors", "data.inputs=8", "data.outputs=4", "device=cpu",
    )  # fmt: skip


class Patient(nn.Module):
    """A linear layer.

    Args:
        file: While it is there, a forward pass waits.
        seconds: How long.
    """

    def __init__(self, file: str, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.file, self.seconds = Path(file), seconds

    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.is_meta and self.file.exists():  # where its FLOPs are counted nobody waits
            time.sleep(self.seconds)
        return self.linear(inputs)
