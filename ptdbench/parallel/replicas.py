"""Compares what ranks hold copies of, bit for bit, by checksums and one small message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptdbench.launch.collect import gather
from ptdbench.local_part import plain_tensors

#: Elements that are multiplied at once: a checksum takes 24 MiB beside the tensors, however large these are.
_AT_ONCE = 1 << 20

#: The type of integers that shows the bits of an element, by its size in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: 2^64 divided by the golden ratio, as a signed number: its multiples have bits without a pattern.
_GOLDEN = -0x61C8864680B583EB


@torch.no_grad()
def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return a 64-bit checksum of each tensor's bits, or of those of this rank's shard; waits for the device once.

    Each element counts by its place: other values, swapped ones and changes that cancel out in a sum all show.
    """
    factors: dict[torch.device, Tensor] = {}
    sums = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64)
        for plain in plain_tensors(tensor.detach()):
            if (device := plain.device) not in factors:
                mixed = torch.arange(1, _AT_ONCE + 1, device=device) * _GOLDEN
                factors[device] = (mixed ^ (mixed >> 29)) * _GOLDEN | 1  # odd, so that no change of one element is lost
            real = torch.view_as_real(plain) if plain.is_complex() else plain
            total = total.to(device)
            for some in real.view(_BITS[real.element_size()]).flatten().split(_AT_ONCE):
                total = total * _GOLDEN + (some * factors[device][: len(some)]).sum()
        sums.append(total)
    device = next((one.device for one in sums if one.device.type != "cpu"), "cpu")
    return torch.stack([one.to(device) for one in sums]).tolist() if sums else []


def differing(held: Iterable[tuple[Hashable, int]]) -> dict[Hashable, list[list[int]]]:
    """Return the keys whose value is not the same on all ranks that hold them; called in all ranks.

    Returns:
        For each of these keys, in the order of the first rank that holds it, the ranks of each value.
    """
    ranks: dict[Hashable, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_rank in enumerate(gather([*held])):
        for key, value in of_rank:
            ranks[key][value].append(rank)
    return {key: [*of_values.values()] for key, of_values in ranks.items() if len(of_values) > 1}


def require_equal(weights: Iterable[tuple[str, Tensor]], apart: Hashable = None) -> None:
    """Compare all copies of weights and shards; called in all ranks, between two steps.

    Args:
        weights: Those of this rank by full name; tied ones, which other ranks or stages may hold, by the same name.
        apart: Ranks for which this differs are not compared.

    Raises:
        RuntimeError: Copies of a weight differ; in all ranks, naming the first such weight and the ranks.
    """
    names, tensors = zip(*weights, strict=True)
    keys = [(name, _shard(tensor), apart) for name, tensor in zip(names, tensors, strict=True)]
    if not (found := differing(zip(keys, checksums(tensors), strict=True))):
        return
    (name, *_), *others = found
    groups = sorted(next(iter(found.values())), key=len, reverse=True)
    ranks = ", ".join(str(rank) for group in groups[1:] for rank in group[:_SHOWN])
    more = f", and so do {len(others)} more" if others else ""
    raise RuntimeError(
        f"replicas differ: the bits of {name} on rank {ranks} are not those on rank {groups[0][0]}{more}; a module causes "
        "this that sets weights from its own samples or random numbers, as in an initialization from data: let it take "
        "the mean over all ranks, or try parallel=single"
    )


#: Number of ranks shown in an error, of those with the same values.
_SHOWN = 4


def _shard(tensor: Tensor) -> object:
    """Return which part of a weight this rank has: its coordinates in the dimensions of the mesh that divide it."""
    if not isinstance(tensor, DTensor):
        return None
    here = tensor.device_mesh.get_coordinate() or ()
    return tuple(
        (dimension, place)
        for dimension, (place, how) in enumerate(zip(here, tensor.placements, strict=True))
        if not how.is_replicate()
    )
