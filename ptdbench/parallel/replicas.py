"""Comparison of the tensors of several ranks, bit for bit, by checksums and one small message."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptdbench.launch.collect import gather
from ptdbench.local_part import plain_tensors
from ptdbench.terminal import plural, rank_names

K = TypeVar("K", bound=Hashable)

#: Elements that are multiplied at once: a checksum takes 24 MiB, however large the tensors are.
_AT_ONCE = 1 << 20

#: 2^64 divided by the golden ratio, as a signed number: the bits of its multiples have no pattern.
_GOLDEN = -0x61C8864680B583EB


@torch.no_grad()
def checksums(tensors: Iterable[tuple[K, Tensor]]) -> list[tuple[K, int]]:
    """Return a 64-bit checksum of each tensor, or of this rank's shard; wait for the device once.

    Elements are weighted by position, so that swapped elements and changes that cancel out show too.
    """
    factors: dict[torch.device, Tensor] = {}
    keys, sums = [], []
    for key, tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for plain in plain_tensors(tensor.detach()):
            if plain.device not in factors:
                mixed = torch.arange(1, _AT_ONCE + 1, device=plain.device) * _GOLDEN
                factors[plain.device] = (mixed ^ (mixed >> 29)) * _GOLDEN | 1  # an odd factor loses no change
            real = torch.view_as_real(plain) if plain.is_complex() else plain
            bits = real.view(getattr(torch, f"int{8 * real.element_size()}")).flatten()
            for chunk in bits.split(_AT_ONCE):
                total = total * _GOLDEN + (chunk * factors[plain.device][: len(chunk)]).sum()
        keys.append(key)
        sums.append(total)
    device = next((total.device for total in sums if total.device.type != "cpu"), torch.device("cpu"))
    return list(zip(keys, torch.stack([total.to(device) for total in sums]).tolist() if sums else (), strict=True))


def differing(values: Iterable[tuple[K, int]]) -> dict[K, list[list[int]]]:
    """Return, for each key whose value is not the same on all ranks that hold it, the ranks of each value.

    Called in all ranks. Keys are in the order of the first rank that holds them.
    """
    ranks: dict[K, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_rank in enumerate(gather([*values])):
        for key, value in of_rank:
            ranks[key][value].append(rank)
    return {key: [*of_values.values()] for key, of_values in ranks.items() if len(of_values) > 1}


def require_equal(weights: Iterable[tuple[str, Tensor]], apart: Hashable = None) -> None:
    """Compare all copies of weights, or of shards of them; called in all ranks, between two steps.

    Args:
        weights: This rank's weights by full name; tied ones, which another stage may hold, by the same name.
        apart: Ranks for which this differs are not compared.

    Raises:
        RuntimeError: Copies differ; in all ranks, with the first such weight and the ranks.
    """
    parted = differing(checksums(((name, _shard(weight), apart), weight) for name, weight in weights))
    for (name, *_), groups in parted.items():
        most, *odd = sorted(groups, key=len, reverse=True)
        where = f"on {rank_names(sorted(chain(*odd)))} than on rank {most[0]}"
        others = len({other for other, *_ in parted}) - 1
        more = f" (and {plural(others, 'more weight')})" if others else ""
        raise RuntimeError(
            f"replicas differ: {name}{more} has other bits {where}; usually a module initializes weights from its own "
            "samples or random numbers: average over all ranks there, or try parallel=single"
        )


def _shard(weight: Tensor) -> object:
    """Return which part of a weight this rank has: its coordinates in the dimensions of the mesh that shard it."""
    if not isinstance(weight, DTensor):
        return None
    places = enumerate(zip(weight.device_mesh.get_coordinate() or (), weight.placements, strict=True))
    return tuple((dimension, place) for dimension, (place, placement) in places if not placement.is_replicate())
