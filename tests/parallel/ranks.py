"""A few lines of a test on real ranks."""

import gc
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ptdbench.launch import local, rendezvous
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.mesh import Mesh


def on_ranks(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``body(*arguments)`` returns in each of ``size`` ranks that share a gloo group, by rank.

    Ranks of its own: torch keeps plans for DTensors by the shape of a mesh, with names of groups that are no more.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            local.start(_in_rank, size, Path(folder), body, arguments)
        except local.RankDied as death:
            reports = [path.read_text() for path in sorted(Path(folder).rglob("*.txt"))]
            raise AssertionError("\n".join([str(death), *reports])) from None
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


@cache
def mesh_of(dims: Dims) -> Mesh:
    """In a rank: one mesh for all that have these degrees; gloo keeps the threads of each."""
    return Mesh(dims, "cpu")


@contextmanager
def pretended(size: int, rank: int = 0) -> Iterator[None]:
    """This process as one of ``size`` ranks, the others of which are not there; as the only one it has a real group."""
    backend, store = ("fake", FakeStore()) if size > 1 else ("gloo", dist.HashStore())
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        mesh_of.cache_clear()
        dist.destroy_process_group()


def each(body: Callable[..., Any], cases: Iterable[Any]) -> dict[Any, Any]:
    """In a rank: what ``body`` returns for each case, a tuple of its arguments or its only one; an error says in which.

    ``on_ranks(2, each, body, cases)`` starts the ranks once for all cases.
    """
    results = {}
    for case in cases:
        try:
            results[case] = body(*case) if isinstance(case, tuple) else body(case)
        except Exception as error:
            raise AssertionError(f"in the case {case}") from error
    return results


def _in_rank(environ: Mapping[str, str], folder: Path, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    gc.unfreeze = lambda: None  # as tests/shared_ranks.py, where several runs follow each other
    rendezvous.give_gloo_one_thread()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        torch.save(body(*arguments), folder / f"{rank}.pt")
    except Exception:
        (folder / f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    dist.destroy_process_group()
