"""Synthetic data, for measuring a model without the cost of reading a data set."""

from functools import cached_property

import numpy as np
import torch

from ptdbench.data.protocol import Batch, Data, Images, Sequences, below, draws, uniform
from ptdbench.problems import at_least, require


class SyntheticTokens(Sequences):
    """Uniformly random tokens, for next-token prediction.

    There is nothing to learn: the loss of an untrained model should be, and stay, near ``ln(vocabulary)``.
    """

    def __init__(self, *, sequence_length: int, vocabulary: int, seed: int) -> None:
        """Check the options of ``conf/data/synthetic_tokens.yaml``; raise ConfigError with every invalid one."""
        require(*at_least(1, sequence_length=sequence_length, vocabulary=vocabulary), *at_least(0, seed=seed))
        self.sequence_length = sequence_length
        self.vocabulary = vocabulary
        self.seed = seed

    def samples(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1``: inputs and next-token targets, int64 of shape ``(B, T)``."""
        length = self.sequence_length + 1  # one more for the last target
        tokens = below(self.vocabulary, draws(self.seed, start * length, stop * length).reshape(-1, length))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class SyntheticImages(Images):
    """Images of Gaussian noise, drawn repeatedly from a small pool in which each has its own label.

    A batch then costs only a copy; the pool takes ``12 * image_size**2`` bytes per image in every rank, and is created
    by the first call of :meth:`samples`. A model memorizes it, so its loss falls; accuracy is meaningless. With more
    classes than images only the first ``pool`` labels occur.
    """

    def __init__(self, *, image_size: int, classes: int, seed: int, pool: int = 64, channels_last: bool = True) -> None:
        """Check the options of ``conf/data/synthetic_images.yaml``; raise ConfigError with every invalid one."""
        require(*at_least(1, image_size=image_size, classes=classes, pool=pool), *at_least(0, seed=seed))
        self.image_size = image_size
        self.classes = classes
        self.seed = seed
        self.pool = pool
        self.channels_last = channels_last

    def samples(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1``: float32 images ``(B, 3, H, W)`` and int64 labels ``(B,)``.

        Pixels have mean 0 and variance 1, like normalized images.
        """
        index = below(self.pool, draws(self.seed, start, stop))
        return self._images[index], index % self.classes

    @cached_property
    def _images(self) -> torch.Tensor:
        generator = np.random.Generator(np.random.Philox(key=self.seed))
        shape = (self.pool, 3, self.image_size, self.image_size)
        images = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
        return images.to(memory_format=torch.channels_last) if self.channels_last else images


class SyntheticVectors(Data):
    r"""Regression whose targets are a fixed function of the inputs, so that a model that trains improves.

    With ``n`` inputs :math:`x_i`, uniform in [-1, 1), target ``j`` is :math:`x_j (1 + x_{j+1})`, indices modulo ``n``:
    a linear part that is learned quickly and a product that needs a hidden layer. A sum over inputs would round
    differently depending on how many samples are computed together.
    """

    tokens_per_sample = None

    def __init__(self, *, inputs: int, outputs: int, seed: int) -> None:
        """Check the options of ``conf/data/synthetic_vectors.yaml``; raise ConfigError with every invalid one."""
        require(*at_least(1, inputs=inputs, outputs=outputs), *at_least(0, seed=seed))
        self.inputs = inputs
        self.outputs = outputs
        self.seed = seed

    def samples(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1``: float32 of shapes ``(B, inputs)`` and ``(B, outputs)``."""
        x = uniform(draws(self.seed, start * self.inputs, stop * self.inputs)).reshape(-1, self.inputs)
        j = np.arange(self.outputs)
        y = x[:, j % self.inputs] * (1 + x[:, (j + 1) % self.inputs])
        return torch.from_numpy(x), torch.from_numpy(y)

    def example(self) -> Batch:
        """Return input and target of one sample on the meta device: float32, ``(1, inputs)``, ``(1, outputs)``."""
        inputs = torch.empty(1, self.inputs, dtype=torch.float32, device="meta")
        return inputs, inputs.new_empty(1, self.outputs)
