"""Training data: the protocol, samples by number, and a wrapper for data that lack parts of the protocol."""

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler, default_collate

from ptdbench.launch.collect import gather
from ptdbench.nested import map_tensors, tensors
from ptdbench.problems import ConfigError, Problem, first_line, require

#: Number of samples that ranks compare before a run.
_COMPARED = 8

#: Inputs and targets: tensors whose first dimension counts samples. Inputs may also be a tuple of tensors, the
#: model's positional arguments, or a dict of tensors, its keyword arguments. Targets of shape ``(samples, 0)`` are
#: none: the model computes its loss from its inputs.
Batch = tuple[Any, Tensor]


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
    shown = [str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
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


def _fingerprint(tensor: Tensor) -> str | float:
    """Return a digest of integers, or the mean of floating-point numbers, which processors may round differently."""
    if tensor.is_floating_point():
        return tensor.double().mean().item()
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()


def _matches(first: str | float, other: str | float) -> bool:
    if isinstance(first, str) or isinstance(other, str):
        return first == other
    return math.isclose(first, other, rel_tol=1e-3, abs_tol=1e-3) or (math.isnan(first) and math.isnan(other))


_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def draws(seed: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Return outputs ``start`` to ``stop - 1`` of the SplitMix64 generator seeded with ``seed``, modulo 2^64.

    SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) is a hash of a
    counter, so any part of its stream can be computed alone. uint64 of shape ``(stop - start,)``, uniform over all 64
    bits.
    """
    z = np.arange(start + 1, stop + 1, dtype=np.uint64)
    z *= _STEP
    z += np.uint64(seed % 2**64)
    z ^= z >> np.uint64(30)
    z *= _MIX_1
    z ^= z >> np.uint64(27)
    z *= _MIX_2
    z ^= z >> np.uint64(31)
    return z


def below(count: int, bits: npt.NDArray[np.uint64]) -> Tensor:
    """Return draws as int64 from 0 to ``count - 1``."""
    return torch.from_numpy((bits % np.uint64(count)).astype(np.int64))


def uniform(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Return draws as float32 in [-1, 1), from 24 bits, its precision."""
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)


Indices = npt.NDArray[np.int64]


def shuffled(count: int, seed: int, start: int, stop: int) -> Indices:
    """Return the items of samples ``start`` to ``stop - 1`` of a stream that repeatedly goes through a data set.

    Sample ``k`` is number ``k % count`` of epoch ``k // count``, in the order that torch's ``DistributedSampler`` with
    ``shuffle=True`` and the same seed gives a single replica after ``set_epoch(k // count)``. As the layout splits each
    global batch over the ranks, nothing is padded or dropped: every epoch has each item exactly once, and a batch may
    span two epochs.

    Returns:
        int64 of shape ``(stop - start,)``, below ``count``, which is at least one.
    """
    stretches = [np.empty(0, np.int64)]
    for epoch in range(start // count, -(-stop // count)):
        first = epoch * count
        stretches.append(_order(count, seed, epoch)[max(start - first, 0) : stop - first])
    return np.concatenate(stretches)


@lru_cache(maxsize=2)  # for access that alternates between two epochs
def _order(count: int, seed: int, epoch: int) -> Indices:
    # The sampler only uses the length of the items, and seeds a generator with seed + epoch, which must be below 2^64.
    items: Any = range(count)
    sampler: DistributedSampler[int] = DistributedSampler(items, num_replicas=1, rank=0, seed=seed % 2**63)
    sampler.set_epoch(epoch)
    return np.fromiter(sampler, np.int64, count)


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


_RETURNS = "return tensors on the CPU: (inputs, targets), where inputs may be a tuple or a dict, or a dict alone"


def adapt(source: Any, target: str, seed: int) -> Data:
    """Return a data object itself if it is complete, else a wrapper.

    Args:
        source: Has ``samples(start, stop)``, or ``__len__`` and ``__getitem__`` as a torch ``Dataset``.
        target: The name of its class.
        seed: Seed of the order of a data set's items.

    Raises:
        ConfigError: It has neither, or its first samples are no batch.
    """
    names = {*dir(source)}  # without values: a property may read a data set that is not there yet
    if all(name in names for name in vars(Data) if not name.startswith("_")):
        return source  # type: ignore[no-any-return]
    if not ("samples" in names or {"__getitem__", "__len__"} <= names):
        rule = "has neither samples(start, stop) nor __len__ and __getitem__"
        require(Problem("data._target_", target, rule, "write it as ptdbench.data.protocol.Data, or as a Dataset"))
    try:
        return Wrapped(source, seed)
    except Exception as error:  # third-party code may raise anything
        raise ConfigError([Problem("data._target_", target, first_line(error), _RETURNS)]) from None


class Wrapped(Data):
    """Data from an object that only yields samples; its first ones are read at once."""

    def __init__(self, source: Any, seed: int) -> None:
        self._source = source
        self._seed = seed
        self.workers = getattr(source, "workers", 0)
        self._example = map_tensors(lambda tensor: torch.empty_like(tensor[:1], device="meta"), self.samples(0, 2))

    @property
    def tokens_per_sample(self) -> int | None:
        """What the object states, or ``None``."""
        return getattr(self._source, "tokens_per_sample", None)

    def samples(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1``; raise TypeError or ValueError if they are no batch."""
        if hasattr(self._source, "samples"):
            return _batch(self._source.samples(start, stop), stop - start)
        order = shuffled(len(self._source), self._seed, start, stop)
        items = [self._source[int(place)] for place in order]
        shapes = [[tuple(tensor.shape) for tensor in tensors(item)] for item in items]
        if different := next((shape for shape in shapes if shape != shapes[0]), None):
            raise ValueError(f"its samples differ in shape: {shapes[0]} and {different}")
        return _batch(default_collate(items), stop - start)

    def example(self) -> Batch:
        """Return a batch of one on the meta device, like the first samples."""
        return self._example


def _batch(returned: Any, count: int) -> Batch:
    """Return inputs and targets from what was returned for ``count`` samples."""
    if isinstance(returned, list):  # default_collate makes lists of tuples
        returned = tuple(returned)
    if isinstance(returned, tuple) and len(returned) != 2:
        raise TypeError(f"its samples have {len(returned)} parts, not inputs and targets")
    inputs, targets = returned if isinstance(returned, tuple) else (returned, None)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    if isinstance(inputs, dict) and targets is None and "targets" in inputs:
        targets = inputs["targets"]
        inputs = {name: value for name, value in inputs.items() if name != "targets"}
    for leaf in tree_leaves((inputs, targets)):
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(f"its samples have a {type(leaf).__name__}, not only tensors")
    for tensor in tensors((inputs, targets)):
        if tensor.device.type != "cpu":
            raise TypeError(f"its samples have a tensor on {tensor.device}, not the CPU")
        if tensor.dim() == 0 or len(tensor) != count:
            shape = tuple(tensor.shape)
            raise TypeError(f"its first dimension does not count samples: {count} give a tensor of shape {shape}")
    return inputs, torch.empty(count, 0) if targets is None else targets
