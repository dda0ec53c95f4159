"""torchvision's residual networks, with the same parameter names, as chains that a pipeline can split."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
import torchvision
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.resnet import BasicBlock, Bottleneck

from ptdbench.models.protocol import Role, default_loss
from ptdbench.problems import Problem, at_least, require, try_these

# He et al. 2015 (https://arxiv.org/abs/1512.03385), table 1: the kind of block, and how many in each of four
# groups.
SHAPES: dict[int, tuple[type[BasicBlock | Bottleneck], list[int]]] = {
    18: (BasicBlock, [2, 2, 2, 2]),
    34: (BasicBlock, [3, 4, 6, 3]),
    50: (Bottleneck, [3, 4, 6, 3]),
    101: (Bottleneck, [3, 4, 23, 3]),
    152: (Bottleneck, [3, 8, 36, 3]),
}


class ResNet(torchvision.models.ResNet):
    """A torchvision ResNet that implements :class:`ptdbench.models.protocol.Model`.

    Args:
        depth: 18, 34, 50, 101 or 152.
        classes: Number of classes.
        image_size: Height and width of an image in pixels, for :meth:`train_flops`. At least 32, or 8 with a
            small stem.
        stem: The layers before the blocks. ``imagenet``: a 7x7 convolution with stride 2 and max pooling, which reduce
            width and height to a quarter. ``small``: a 3x3 convolution and no pooling, for images as small as
            CIFAR-10's (He et al. 2015, section 4.2).
        label_smoothing: Fraction of the target that the loss spreads evenly over all classes (Szegedy et al. 2015,
            https://arxiv.org/abs/1512.00567, section 7); in training only.

    Raises:
        ConfigError: With every invalid option.
    """

    def __init__(
        self,
        *,
        depth: int,
        classes: int = 1000,
        image_size: int = 224,
        stem: Literal["imagenet", "small"] = "imagenet",
        label_smoothing: float = 0.0,
    ) -> None:
        unknown = Problem("depth", depth, "is not the depth of a ResNet", try_these(SHAPES))
        require(
            None if depth in SHAPES else unknown,
            *at_least(2, classes=classes),
            *at_least(32 if stem == "imagenet" else 8, image_size=image_size),
            None if 0 <= label_smoothing < 1 else Problem("label_smoothing", label_smoothing, "must be in [0, 1)"),
        )
        super().__init__(*SHAPES[depth], num_classes=classes)
        self.image_size = image_size
        if stem == "small":
            self.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
            self.maxpool = nn.Identity()
        # A pipeline stage may begin with this ReLU, on a leaf tensor, which must not be modified in place.
        self.relu = nn.ReLU(inplace=False)
        self.fc: Classifier = Classifier(512 * SHAPES[depth][0].expansion, classes, label_smoothing)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Classify images.

        Args:
            images: ``[batch, 3, image_size, image_size]``, floating point.
            targets: ``[batch]``, int64 classes.

        Returns:
            Logits ``[batch, classes]``, or with ``targets`` the mean cross entropy, an fp32 scalar.
        """
        *chain, last = self.parts().values()
        x = images
        for part in chain:
            x = part(x)
        return last(x, targets)

    loss = staticmethod(default_loss)  # without label smoothing

    def layers(self) -> list[nn.Module]:
        """Return the residual blocks, in order."""
        return list(self._blocks().values())

    def parts(self) -> dict[str, nn.Module]:
        """Return ``conv1``, ``bn1``, ``relu``, ``maxpool``, ``layer1.0``, ..., ``avgpool``, ``fc``."""
        stem = {name: self.get_submodule(name) for name in ("conv1", "bn1", "relu", "maxpool")}
        return {**stem, **self._blocks(), "avgpool": self.avgpool, "fc": self.fc}

    def roles(self) -> dict[str, Role]:
        """Return no roles: convolutions and batch norms are not split."""
        return {}

    def train_flops(self) -> dict[str, float]:
        """Return the FLOPs of forward and backward pass for one image, by part: of convolutions and ``fc``.

        torch counts the forward pass; the backward pass takes as many for the weight, and again for the inputs, except
        for the image.
        """
        images = torch.empty(2, 3, self.image_size, self.image_size, device="meta")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            functional_call(self, {name: tensor.to("meta") for name, tensor in self.state_dict().items()}, images)
        counts = counter.get_flop_counts()
        flops = {name: 1.5 * sum(counts.get(f"{type(self).__name__}.{name}", {}).values()) for name in self.parts()}
        return {**flops, "conv1": flops["conv1"] / 1.5}

    def masked_flops(self) -> float:
        """See :func:`ptdbench.models.protocol.masked_flops`: there is no attention."""
        return 0.0

    def tied(self) -> list[tuple[str, str]]:
        """No weight is shared."""
        return []

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Initialize as in torchvision.

        Convolutions are normal with variance 2 / (outputs · k²) (He et al. 2015, "fan out"), batch norms
        start as the identity, and ``fc`` is uniform in ±1/√inputs, the default of :class:`torch.nn.Linear`.
        """
        if name.startswith("fc."):
            bound = 1 / math.sqrt(self.fc.in_features)
            nn.init.uniform_(tensor, -bound, bound, generator=generator)
        elif tensor.dim() == 4:
            nn.init.kaiming_normal_(tensor, mode="fan_out", nonlinearity="relu", generator=generator)
        elif name.endswith(("weight", "running_var")):
            nn.init.ones_(tensor)
        else:  # bias, running_mean, num_batches_tracked
            nn.init.zeros_(tensor)

    def _blocks(self) -> dict[str, nn.Module]:
        groups = {f"layer{i}": self.get_submodule(f"layer{i}") for i in (1, 2, 3, 4)}
        return {f"{name}.{i}": block for name, group in groups.items() for i, block in group.named_children()}


class Classifier(nn.Linear):
    """The linear layer ``fc``; computes the loss if there are targets."""

    def __init__(self, features: int, classes: int, label_smoothing: float = 0.0) -> None:
        super().__init__(features, classes)
        self.label_smoothing = label_smoothing

    def forward(self, features: Tensor, targets: Tensor | None = None) -> Tensor:
        """``[batch, features, 1, 1]`` to logits ``[batch, classes]``, or to the mean loss in fp32."""
        logits = super().forward(features.flatten(1))
        if targets is None:
            return logits
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
