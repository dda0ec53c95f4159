"""Ranks that are not there: who answers for them, and with what."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ptdbench.launch.rendezvous import Answers, Some


def in_each(present, size, ask):
    """What ``ask(circle, rank)`` returns on each of the ranks that are there."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(present)) as threads:
        return list(threads.map(lambda rank: ask(Some(present, rank, size, store), rank), present))


def test_an_absent_rank_says_what_the_last_one_before_it_says():
    assert (
        in_each([1, 4], 6, lambda circle, rank: circle.gather(f"r{rank}")) == [["r1", "r1", "r1", "r1", "r4", "r4"]] * 2
    )


def test_figures_are_those_of_the_ranks_that_are_there():
    def ask(circle, rank):
        numbers = torch.tensor([float(rank), -1.0])
        circle.barrier()
        return [circle.reduce(numbers, how).tolist() for how in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)]

    assert in_each([0, 131, 255], 256, ask) == [[[386.0, -3.0], [255.0, -1.0]]] * 3


def test_every_rank_has_been_in_the_store_already():
    store = Answers(8)
    assert store.add("arrived", 1) == 8
    assert store.get("name of a communicator") == bytes(128)
    assert not store.check(["a rank has failed"])
    store.set("mine", "1")
    assert (store.get("mine"), store.check(["mine"])) == (b"1", True)
