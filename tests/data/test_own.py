"""Data of a user: what a batch may be, and what is refused before a rank starts."""

import pytest
import torch
from torch.utils.data import TensorDataset

from ptdbench.data import own
from ptdbench.data.protocol import read
from ptdbench.problems import ConfigError


class Pairs:
    """Samples as a function returns them, by their number."""

    def __init__(self, returned):
        self.returned = returned

    def samples(self, start, stop):
        return self.returned(torch.arange(start, stop))


def adapted(returned):
    return own.adapt(Pairs(returned), "my.Pairs", seed=0)


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
    data = own.adapt(TensorDataset(torch.arange(5), torch.arange(5) + 10), "my.Set", seed=0)
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
        own.adapt(source, "my.Class", seed=0)
    (problem,) = raised.value.problems
    assert problem.option == "data._target_"
    assert problem.rule.startswith(rule)
