"""Your own data: a class with ``samples(start, stop)``, or a torch ``Dataset``, as data of ptdbench."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from ptdbench.data.protocol import Batch, Data
from ptdbench.data.sampling import shuffled
from ptdbench.nested import map_tensors, tensors
from ptdbench.problems import Problem, first_line, require

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
    wrapped = Wrapped(source, seed)
    try:
        wrapped.example()
    except Exception as error:  # third-party code may raise anything
        require(Problem("data._target_", target, first_line(error), _RETURNS))
    return wrapped


class Wrapped(Data):
    """Data from an object that only yields samples."""

    def __init__(self, source: Any, seed: int) -> None:
        self._source = source
        self._seed = seed
        self.workers = getattr(source, "workers", 0)

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

    @cached_property
    def _example(self) -> Batch:
        return map_tensors(lambda tensor: torch.empty_like(tensor[:1], device="meta"), self.samples(0, 2))


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
