import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from ptdbench.data import sampling
from ptdbench.data.sampling import draws, shuffled


def test_matches_the_published_outputs_of_splitmix64():
    # rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64, seed 1234567
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert draws(1234567, 0, 5).tolist() == published


@pytest.mark.filterwarnings("error")
def test_large_numbers_wrap_without_a_warning():
    assert draws(2**64 - 1, 2**62, 2**62 + 3).shape == (3,)


def orders(count, seed, number):
    sampler = DistributedSampler(list(range(count)), num_replicas=1, rank=0, shuffle=True, seed=seed)
    items = []
    for epoch in range(number):
        sampler.set_epoch(epoch)
        items += list(sampler)
    return items


@pytest.mark.parametrize(("count", "seed"), [(7, 0), (10, 3), (1, 0)])
def test_order_equals_distributed_sampler(count, seed):
    indices = shuffled(count, seed, 0, 5 * count)
    assert indices.dtype == np.int64
    assert indices.tolist() == orders(count, seed, 5)


def test_large_seeds_differ():
    # torch's generator is seeded with 64 bits, and makes use of 32 of them
    orders_of = {tuple(shuffled(50, seed, 100, 150)) for seed in (0, 1, 2**63 - 1, 2**64 - 7, 2**64 + 17)}
    assert len(orders_of) == 5


def test_epoch_order_is_computed_once(monkeypatch):
    made = []

    class Counting(DistributedSampler):
        def set_epoch(self, epoch):
            made.append(epoch)
            super().set_epoch(epoch)

    monkeypatch.setattr(sampling, "DistributedSampler", Counting)
    for start in range(0, 40, 4):
        shuffled(10, 987654, start, start + 4)
    assert made == [0, 1, 2, 3]
    for start in (31, 28, 31, 28):
        shuffled(10, 987654, start, start + 4)
    assert made == [0, 1, 2, 3]


def test_indices_are_copies():
    shuffled(9, 1, 0, 9)[:] = 0
    assert shuffled(9, 1, 0, 9).tolist() == orders(9, 1, 1)
