"""Inputs of a model as they are: a tensor, or a tuple or dict of tensors, nested or not."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

T = TypeVar("T")


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def first_tensor(tree: Any) -> Tensor:
    """Return the first tensor of a tree."""
    return tensors(tree)[0]


def map_tensors(change: Callable[[Tensor], Tensor], tree: T) -> T:
    """Return the tree with each tensor changed."""
    return tree_map_only(Tensor, change, tree)


def split(tree: T, size: int) -> list[T]:
    """Split a batch into batches of at most ``size`` samples."""
    leaves, structure = tree_flatten(tree)
    pieces = zip(*(leaf.split(size) for leaf in leaves), strict=True)
    return [tree_unflatten(piece, structure) for piece in pieces]


def with_samples(example: T, samples: int, device: torch.device | str, *, filled: bool = False) -> T:
    """Return a batch like an example of one sample: zeros, or, if ``filled``, varied numbers, 0 or 1 if integers."""

    def like(tensor: Tensor) -> Tensor:
        batch = torch.zeros((samples, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        if filled and batch.numel():
            varied = (torch.arange(batch.numel(), device=device) * 0.7).cos().reshape(batch.shape)
            batch.copy_(varied if tensor.is_floating_point() else varied > 0)
        return batch

    return map_tensors(like, example)
