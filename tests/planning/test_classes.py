"""Which ranks are carried out, for how many each stands, and one record of ranks that were carried out in turn."""

import pytest

from ptdbench.planning.classes import classes, merged
from ptdbench.profiling.phases import KINDS
from ptdbench.records.schema import Memory, Messages, Metrics, Record, Virtual
from ptdbench.setup import run_spec
from tests.conftest import read

#: A model whose weights can be cut evenly into 2, 4 and 8.
EVEN = ("model=llama_tiny", "virtual=h100", "data=synthetic_tokens", "train.global_batch=64")


@pytest.mark.parametrize(("words", "expected"), [
    ("parallel=ddp cluster.ranks_per_node=8", {0: 8}),
    ("parallel=fsdp cluster.ranks_per_node=8", {0: 8}),
    ("parallel=tp parallel.tensor=2 cluster.ranks_per_node=8", {0: 8}),
    ("parallel=fsdp model.vocabulary=257 cluster.ranks_per_node=8", {0: 7, 7: 1}),
    ("parallel=hsdp parallel.shard=4 model.vocabulary=257 cluster.ranks_per_node=8", {0: 6, 3: 2}),
    ("parallel=pdp parallel.pipeline=2 cluster.ranks_per_node=8", {0: 4, 1: 4}),
    ("parallel=3d parallel.tensor=2 parallel.pipeline=2 cluster.ranks_per_node=8", {0: 4, 4: 4}),
    ("parallel=pdp parallel.pipeline=8 model.layers=8 cluster.ranks_per_node=8", {0: 1, 1: 5, 6: 1, 7: 1}),
    (  # activations are largest in the stages with fewest weights
        "model=resnet50 data=synthetic_images parallel=pdp parallel.pipeline=6 cluster.ranks_per_node=6",
        dict.fromkeys(range(6), 1),
    ),
    # Two have the state of weights of the same shapes.
    ("parallel=ddp parallel.optimizer=zero1 cluster.ranks_per_node=4", {0: 1, 1: 1, 2: 2}),
    ("parallel=ddp parallel.optimizer=zero1 parallel.context=2 cluster.ranks_per_node=4", {0: 1, 1: 1, 2: 2}),
])  # fmt: skip
def test_one_rank_of_each_class(words: str, expected: dict[int, int]) -> None:
    training = run_spec.specify(read(*EVEN, *words.split()), None).training
    represented = classes(training)
    assert represented == expected
    assert sum(represented.values()) == training.layout.dims.world_size


def record(ranks: list[int], messages: dict[str, Messages], weights: list[int], seconds: list[float] | None) -> Record:
    tens, kinds = [10 * rank for rank in ranks], {kind: [0 for _ in ranks] for kind in KINDS}
    return Record(
        "ok", "train", "", "",
        virtual=Virtual(
            ranks=ranks, allocated_bytes=tens, reserved_bytes=tens, communicators=tens, host_seconds=seconds,
            kernels={"product": ranks} if messages else {}, messages=messages,
        ),
        memory=Memory(ranks=kinds | {"weights": weights}, moments=["forward" for _ in ranks]),
        metrics=Metrics(peak_memory_bytes=max(ranks), peak_reserved_bytes=2 * max(ranks)),
    )  # fmt: skip


def test_lists_go_on_and_each_rank_counts_for_those_that_it_stands_for() -> None:
    send = {"send": Messages(3.0, 30.0)}
    records = [record([0, 1], send, [5, 6], [0.1, 0.1]), record([2], send | {"recv": Messages(1.0)}, [7], [0.2])]
    combined = merged(records, {0: 1, 1: 1, 2: 6})
    account, memory = combined.virtual, combined.memory
    assert (account.ranks, account.reserved_bytes) == ([0, 1, 2], [0, 10, 20])
    assert (account.host_seconds, account.kernels) == ([0.1, 0.1, 0.2], {"product": [0, 1, 2]})
    assert account.messages == {"send": Messages(3.0, 30.0), "recv": Messages(6 / 8)}
    assert (memory.ranks["weights"], memory.moments) == ([5, 6, 7], ["forward"] * 3)
    assert (combined.metrics.peak_memory_bytes, combined.metrics.peak_reserved_bytes) == (2, 4)


def test_what_no_rank_has_looked_at_stays_unknown() -> None:
    """A try of a plan takes no step to look at the host."""
    combined = merged([record([rank], {}, [5], None) for rank in (0, 1)], {0: 1, 1: 1}).virtual
    assert (combined.ranks, combined.host_seconds) == ([0, 1], None)
