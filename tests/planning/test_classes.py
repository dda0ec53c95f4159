"""Which ranks are carried out, and for how many each stands."""

import pytest

from ptdbench.planning.classes import classes
from ptdbench.setup import config, run_spec
from ptdbench.setup.compose import compose_all

#: A model whose weights can be cut evenly into 2, 4 and 8.
EVEN = ["model=llama_tiny", "virtual=h100", "data=synthetic_tokens", "train.global_batch=64"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("parallel=ddp cluster.ranks_per_node=8", {0: 8}),
        ("parallel=fsdp cluster.ranks_per_node=8", {0: 8}),
        ("parallel=tp parallel.tensor=2 cluster.ranks_per_node=8", {0: 8}),
        ("parallel=fsdp model.vocabulary=257 cluster.ranks_per_node=8", {0: 7, 7: 1}),
        ("parallel=hsdp parallel.shard=4 model.vocabulary=257 cluster.ranks_per_node=8", {0: 6, 3: 2}),
        ("parallel=pdp parallel.pipeline=2 cluster.ranks_per_node=8", {0: 4, 1: 4}),
        ("parallel=3d parallel.tensor=2 parallel.pipeline=2 cluster.ranks_per_node=8", {0: 4, 4: 4}),
        ("parallel=pdp parallel.pipeline=8 model.layers=8 cluster.ranks_per_node=8", {0: 1, 1: 5, 6: 1, 7: 1}),
        ("parallel=ddp parallel.optimizer=zero1 cluster.ranks_per_node=4", {0: 1, 1: 1, 2: 1, 3: 1}),
    ],
)
def test_one_rank_of_each_class(words: str, expected: dict[int, int]) -> None:
    read = config.read(compose_all([*EVEN, *words.split()]).jobs[0])
    training = run_spec.specify(read, None).training
    assert training
    found = classes(training)
    assert found == expected
    assert sum(found.values()) == training.layout.dims.world_size
