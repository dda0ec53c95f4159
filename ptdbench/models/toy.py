"""A small multilayer perceptron on vectors, for experiments."""

import math

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ptdbench.models.protocol import Role, default_loss
from ptdbench.problems import at_least, require


class Toy(nn.Module):
    """Linear layers with ReLU between them (see :class:`ptdbench.models.protocol.Model`).

    Regression on floating-point targets, classification on integer ones.

    Args:
        inputs: Features of a sample.
        width: Features between the layers.
        outputs: Features of the result: numbers to predict, or classes.
        layers: Number of linear layers, at least 2.

    Raises:
        ConfigError: With every invalid option.
    """

    def __init__(self, *, inputs: int = 32, width: int = 64, outputs: int = 8, layers: int = 4) -> None:
        super().__init__()
        require(*at_least(1, inputs=inputs, width=width, outputs=outputs), *at_least(2, layers=layers))
        hidden = [Hidden(inputs if i == 0 else width, width) for i in range(layers - 1)]
        self.chain = nn.ModuleList([*hidden, Last(width, outputs)])

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return ``[batch, outputs]``, or with ``targets`` the mean squared error or cross entropy, an fp32 scalar.

        Args:
            inputs: Floating point, ``[batch, inputs]``.
            targets: Floating point ``[batch, outputs]``, or classes ``[batch]`` in int64.
        """
        x = inputs
        for layer in self.chain[:-1]:
            x = layer(x)
        return self.chain[-1](x, targets)

    loss = staticmethod(default_loss)

    def layers(self) -> list[nn.Module]:
        """Return the linear layers, in order."""
        return list(self.chain)

    def parts(self) -> dict[str, nn.Module]:
        """Return ``chain.0``, ``chain.1``, ...: one for each layer."""
        return {f"chain.{i}": layer for i, layer in enumerate(self.chain)}

    def roles(self) -> dict[str, Role]:
        """Split layers in pairs; the last one of an odd number stays whole."""
        roles = {}
        for i in range(0, len(self.chain) - 1, 2):
            roles[f"chain.{i}.linear"] = Role("colwise")
            roles[f"chain.{i + 1}.linear"] = Role("rowwise")
        return roles

    def train_flops(self) -> dict[str, float]:
        """Count 2 FLOPs per weight forward and 4 backward, but 2 for the first layer, whose inputs need no gradient."""
        counts = [weight.numel() for weight in self.parameters() if weight.dim() > 1]
        return {f"chain.{i}": (4.0 if i == 0 else 6.0) * count for i, count in enumerate(counts)}

    def masked_flops(self) -> float:
        """See :func:`ptdbench.models.protocol.masked_flops`: there is no attention."""
        return 0.0

    def tied(self) -> list[tuple[str, str]]:
        """No weight is shared."""
        return []

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Draw uniformly from ±1/√inputs of the layer, the default of :class:`torch.nn.Linear`."""
        linear = self.get_submodule(name.rpartition(".")[0])
        assert isinstance(linear, nn.Linear)
        bound = 1 / math.sqrt(linear.in_features)
        nn.init.uniform_(tensor, -bound, bound, generator=generator)


class Hidden(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, inputs]`` to ``[batch, outputs]``."""
        return F.relu(self.linear(x))


class Last(nn.Module):
    """A linear layer; computes the loss if there are targets."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """``[batch, inputs]`` to ``[batch, outputs]``, or to the mean loss in fp32."""
        outputs = self.linear(x)
        return outputs if targets is None else default_loss(outputs, targets)
