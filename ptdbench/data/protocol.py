"""The protocol of training data."""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ptdbench.launch.collect import gather
from ptdbench.nested import tensors
from ptdbench.problems import ConfigError, Problem

#: Number of samples that ranks compare before a run.
_COMPARED = 8

#: Inputs and targets: tensors whose first dimension counts samples. Inputs may also be a tuple of tensors, the
#: model's positional arguments, or a dict of tensors, its keyword arguments. Targets of shape ``(samples, 0)`` are
#: none: the model computes its loss from its inputs.
Batch = tuple[Any, torch.Tensor]


class HeldOut(Protocol):
    """Held-out samples for evaluation, finite and in a fixed order."""

    #: Average bytes of text per target; ``None`` if samples are not text.
    bytes_per_token: float | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def samples(self, start: int, stop: int) -> Batch:
        """Return inputs and targets of samples ``start`` to ``stop - 1``, the same at each call, on the CPU."""
        ...


class Data(Protocol):
    """An endless stream of numbered samples that does not depend on which rank reads which part.

    Sample ``k`` is a pure function of the seed and ``k``. Each rank reads the samples that the layout assigns to it, so
    that every layout trains on the same global batch without communication.

    Construction is cheap: it checks the options, raising a :class:`~ptdbench.problems.ConfigError` with all problems
    and bare option names, and neither reads a corpus nor starts a process.
    """

    #: Worker processes per rank; with 0 the rank itself makes the samples.
    workers: int = 0

    @property
    def tokens_per_sample(self) -> int | None:
        """The sequence length, or ``None`` if a sample is not a sequence of tokens."""
        ...

    @property
    def held_out(self) -> HeldOut | None:
        """The held-out part, available after :meth:`prepare`; ``None`` if there is none."""
        return None

    @property
    def identity(self) -> str | None:
        """A digest that changes with the data, available after :meth:`prepare`; ``None`` if data cannot change."""
        return None

    def prepare(self) -> None:
        """Do expensive work that is needed once per node, such as building a cache.

        May be called by several processes at once and again later; all but the first find the work done.

        Raises:
            ptdbench.problems.ConfigError: The data that the options refer to are unusable.
        """
        return

    def samples(self, start: int, stop: int) -> Batch:
        """Return inputs and targets of samples ``start`` to ``stop - 1``, on the CPU, with shapes as in ``example``."""
        ...

    def example(self) -> Batch:
        """Return the inputs and targets of a batch of one on the meta device: shapes and dtypes without the data."""
        ...


def read(source: Data | HeldOut, start: int, stop: int, example: Batch) -> Batch:
    """Read samples ``start`` to ``stop - 1``, and verify their number and shapes against the example.

    Raises:
        TypeError: The samples do not match: FLOPs and comparisons would be of other samples.
    """
    samples: Any = source.samples(start, stop)
    shapes = [str((stop - start, *tensor.shape[1:])) for tensor in tensors(example)]
    parts = tree_leaves(samples)
    shown = [str(tuple(part.shape)) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts]
    if shown != shapes or len(samples) != len(example):
        rule = f"must return tensors of shape {' and '.join(shapes)}, like example()"
        raise TypeError(f"{type(source).__name__}.samples({start}, {stop}) {rule}, but returns {' and '.join(shown)}")
    inputs, targets = samples
    return inputs, targets


def require_same_on_all_ranks(data: Data) -> None:
    """Raise ConfigError if data differ between ranks, such as copies on nodes; called in all ranks, raised in all.

    Otherwise losses would belong to no batch, and an evaluation would divide by the samples of one rank.
    """
    held_out = data.held_out
    mine = [_fingerprint(tensor) for tensor in tensors(read(data, 0, _COMPARED, data.example()))]
    first, *others = gather((len(held_out) if held_out else 0, mine))
    for rank, other in enumerate(others, start=1):
        if other[0] != first[0]:
            rule = f"rank 0 holds out {first[0]} samples, but rank {rank} {other[0]}"
        elif not all(map(_matches, first[1], other[1])):
            rule = f"samples 0 to {_COMPARED - 1} differ between ranks 0 and {rank}"
        else:
            continue
        remedy = "give all nodes the same files, and let sample k depend only on the seed and k"
        raise ConfigError([Problem("data", type(data).__name__, rule, remedy)])


def _fingerprint(tensor: torch.Tensor) -> str | float:
    """Return a digest of integers, or the mean of floating-point numbers, which processors may round differently."""
    if tensor.is_floating_point():
        return tensor.double().mean().item()
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()


def _matches(first: str | float, other: str | float) -> bool:
    if isinstance(first, str) or isinstance(other, str):
        return first == other
    return math.isclose(first, other, rel_tol=1e-3, abs_tol=1e-3) or (math.isnan(first) and math.isnan(other))


def missing_folder(root: str | None, contents: str, remedy: str, inside: str = "") -> Problem | None:
    """Return the problem of an option ``root`` that is not given, or not a folder with the folder ``inside``."""
    if root is None:
        return Problem("root", root, f"must name the folder of {contents}", remedy)
    rule = f"has no folder {inside}" if inside else "there is no such folder"
    return None if (Path(root).expanduser() / inside).is_dir() else Problem("root", root, rule, remedy)


class Sequences(Data):
    """Data whose samples are sequences of tokens, with the next tokens as targets."""

    sequence_length: int

    @property
    def tokens_per_sample(self) -> int:
        """The sequence length."""
        return self.sequence_length

    def example(self) -> Batch:
        """Return inputs and targets of one sample on the meta device, int64 of shape ``(1, T)``."""
        inputs = torch.empty(1, self.sequence_length, dtype=torch.int64, device="meta")
        return inputs, torch.empty_like(inputs)


class Images(Data):
    """Data whose samples are square color images, float32 of shape ``(B, 3, H, W)``, with an int64 label each."""

    tokens_per_sample = None

    image_size: int  #: Height and width in pixels.
    channels_last: bool  #: Whether samples are in ``torch.channels_last``, else contiguous.

    def example(self) -> Batch:
        """Return one image, float32 of shape ``(1, 3, H, W)``, and its int64 label ``(1,)`` on the meta device."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        image = torch.empty(1, 3, self.image_size, self.image_size, device="meta", memory_format=layout)
        return image, torch.empty(1, dtype=torch.int64, device="meta")


class HeldOutPart(HeldOut):
    """Held-out samples that a function reads by number."""

    def __init__(self, count: int, read: Callable[[int, int], Batch], bytes_per_token: float | None = None) -> None:
        """Set the number of samples, and the function ``read(start, stop)`` that returns them."""
        self.bytes_per_token = bytes_per_token
        self._count = count
        self._read = read

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def samples(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1``; raise IndexError if there are fewer."""
        if not 0 <= start <= stop <= self._count:
            raise IndexError(f"samples {start} to {stop} of {self._count}")
        return self._read(start, stop)
