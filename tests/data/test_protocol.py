"""Samples by number, and data of a user: what a batch may be, and what is refused before a rank starts."""

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from ptdbench.data import protocol
from ptdbench.data.protocol import adapt, draws, read, shuffled
from ptdbench.problems import ConfigError


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

    monkeypatch.setattr(protocol, "DistributedSampler", Counting)
    for start in range(0, 40, 4):
        shuffled(10, 987654, start, start + 4)
    assert made == [0, 1, 2, 3]
    for start in (31, 28, 31, 28):
        shuffled(10, 987654, start, start + 4)
    assert made == [0, 1, 2, 3]


def test_indices_are_copies():
    shuffled(9, 1, 0, 9)[:] = 0
    assert shuffled(9, 1, 0, 9).tolist() == orders(9, 1, 1)


class Pairs:
    """Samples as a function returns them, by their number."""

    def __init__(self, returned):
        self.returned = returned

    def samples(self, start, stop):
        return self.returned(torch.arange(start, stop))


def adapted(returned):
    return adapt(Pairs(returned), "my.Pairs", seed=0)


@pytest.mark.parametrize(("returned", "inputs", "targets"), [
    (lambda k: (k.float(), k), lambda k: k.float(), lambda k: k),
    (lambda k: ([k, k + 1], k), lambda k: (k, k + 1), lambda k: k),
    (lambda k: {"x": k, "mask": k > 0, "targets": k}, lambda k: {"x": k, "mask": k > 0}, lambda k: k),
    (lambda k: {"x": k, "labels": k}, lambda k: {"x": k, "labels": k}, lambda k: torch.empty(len(k), 0)),
])  # fmt: skip
def test_batch_is_a_pair_or_a_dict(returned, inputs, targets):
    data, numbers = adapted(returned), torch.arange(3, 7)
    torch.testing.assert_close(read(data, 3, 7, data.example()), (inputs(numbers), targets(numbers)))


def test_dataset_has_each_item_once_per_epoch():
    data = adapt(TensorDataset(torch.arange(5), torch.arange(5) + 10), "my.Set", seed=0)
    inputs, targets = data.samples(0, 5)
    assert sorted(inputs.tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(targets, inputs + 10)
    assert [tensor.shape for tensor in data.example()] == [(1,), (1,)]


@pytest.mark.parametrize(("source", "rule"), [
    (object(), "has neither samples(start, stop) nor __len__ and __getitem__"),
    (Pairs(lambda k: (torch.zeros(3, len(k)), k)),
     "its first dimension does not count samples: 2 give a tensor of shape (3, 2)"),
    (Pairs(lambda k: (k, k, k)), "its samples have 3 parts, not inputs and targets"),
    (Pairs(lambda k: ("a", k)), "its samples have a str, not only tensors"),
    (Pairs(lambda k: (k.to("meta"), k)), "its samples have a tensor on meta, not the CPU"),
    ([(torch.zeros(2), 0), (torch.zeros(3), 0)], "its samples differ in shape: "),
])  # fmt: skip
def test_what_is_no_batch_is_refused(source, rule):
    with pytest.raises(ConfigError) as raised:
        adapt(source, "my.Class", seed=0)
    (problem,) = raised.value.problems
    assert problem.option == "data._target_"
    assert problem.rule.startswith(rule)
