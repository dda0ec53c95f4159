"""One stage of a model: a run of its parts, under the names they have in the whole."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class Stage(nn.Module):
    """Consecutive parts of a model.

    Args:
        parts: The parts by their dotted names in the whole model, so that weights, checkpoints and gradients
            carry the same names whatever the number of stages.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            *path, leaf = name.split(".")
            holder: nn.Module = self
            for step in path:
                if step not in holder._modules:
                    holder.add_module(step, nn.Module())
                holder = holder.get_submodule(step)
            holder.add_module(leaf, part)
        self._chain = list(parts.values())

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Activations for the next stage; with targets, on the last stage, the mean loss as ``(1,)``.

        The schedule joins what micro-batches return along the first dimension, which a scalar does not have.
        """
        for part in self._chain[:-1]:
            inputs = part(inputs)
        last = self._chain[-1]
        # A stage hands its outputs on, and messages are contiguous: images may come with their channels last.
        return last(inputs).contiguous() if targets is None else last(inputs, targets).reshape(1)
