"""Answers on behalf of ranks that do not run, in place of torch's stores, host collectives and collectives of objects.

Like :mod:`ptdbench.virtual.watch` it imports nothing but torch, for programs that know nothing of ptdbench.
"""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

#: Variables of a program of which some ranks run: these ranks, and a file by which they exchange objects.
PRESENT, STORE = "PTDBENCH_VIRTUAL_PRESENT", "PTDBENCH_VIRTUAL_STORE"

#: Bytes of the largest value that a process group reads from a store: NCCL's unique id of a communicator.
_NAME_BYTES = 128


class Present:
    """The ranks that run: values that these exchange through a store, and those of the other ranks.

    Args:
        ranks: In ascending order.
        rank: This one.
        store: Shared by them.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: dist.Store) -> None:
        self.ranks, self._rank, self._store = ranks, rank, store
        self._exchanges = Counter[str]()

    def exchange(self, value: Any, among: Sequence[int]) -> dict[int, Any]:
        """Return the value of each rank that runs, of those in ``among``; all of them call this in the same order."""
        name = ",".join(map(str, among))
        self._exchanges[name] += 1
        key = f"said {name} {self._exchanges[name]}"
        self._store.set(f"{key} {self._rank}", pickle.dumps(value))  # type: ignore[arg-type] # also bytes
        return {rank: pickle.loads(self._store.get(f"{key} {rank}")) for rank in self.ranks if rank in among}

    def gather(self, value: Any, among: Sequence[int]) -> list[Any]:
        """Return the value of each rank in ``among``; the nearest lower one that runs answers for one that does not."""
        values = self.exchange(value, among)
        return [values[max((at for at in values if at <= rank), default=min(values))] for rank in among]

    def send(self, value: Any, offset: int, among: Sequence[int]) -> None:
        """Leave a value for the rank that is ``offset`` places further in ``among``."""
        self._store.set(self._of_transfer(self._rank, "sent", offset, among), pickle.dumps(value))  # type: ignore[arg-type]

    def receive(self, offset: int, among: Sequence[int]) -> Any:
        """Return what the rank that is ``offset`` places before has sent; raises RuntimeError if nobody can tell.

        The nearest rank that sends as far answers for one that does not run: stages of a pipeline pass on equal shapes.
        """
        at = {rank: place for place, rank in enumerate(among)}
        far = {rank: abs(at[rank] + offset - at[self._rank]) for rank in self.ranks if rank in at}
        senders = [rank for rank in far if rank != self._rank and 0 <= at[rank] + offset < len(among)]
        if not senders:
            absent = (
                f"rank {among[at[self._rank] - offset]} does not run, and no rank that runs sends what it would send"
            )
            raise RuntimeError(f"{absent}: run the first and last stage, --ranks {among[0]},{among[-1]}")
        sender = min(senders, key=far.__getitem__)
        return pickle.loads(self._store.get(self._of_transfer(sender, "received", offset, among)))

    def _of_transfer(self, sender: int, what: str, offset: int, among: Sequence[int]) -> str:
        """Return the key of a rank's next transfer over ``offset`` places."""
        self._exchanges[counted := f"{what} {offset} {among}"] += 1
        return f"{sender} sends {offset} {among} {self._exchanges[counted]}"


class Answers(dist.Store):
    """A store as if every rank had already arrived: no call waits, and a value that was never set is zeros.

    Every counter is at least ``size``, as if all ranks of the run had added to it.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """Return a value, or zeros."""
        return self._values.get(key, bytes(_NAME_BYTES))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, as if all ranks had."""
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return max(int(self._values[key]), self._size)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value, whatever it was."""
        self.set(key, desired)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys were set here."""
        return all(key in self._values for key in keys)  # NCCL's watchdog looks for a key that reports a failed rank

    def clone(self) -> Answers:
        """Return this store."""
        return self

    def delete_key(self, key: str) -> bool:
        """Delete a value."""
        return self._values.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing."""


def attach() -> None:
    """Have torch take the other ranks' part in this process, if some ranks of its program do not run."""
    if not os.environ.get(PRESENT):
        return
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 # registers it: it discards messages on the host

    groups: Any = dist.distributed_c10d
    present = [int(rank) for rank in os.environ[PRESENT].split(",")]
    ranks = Present(present, int(os.environ["RANK"]), dist.FileStore(os.environ[STORE], len(present)))
    groups.rendezvous = _meet
    groups._new_process_group_helper = partial(_with_fakes, groups._new_process_group_helper)
    modules: list[Any] = [dist, groups]
    for name in (
        *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
        *("send_object_list", "recv_object_list"),
    ):
        answered = partial(_answered, getattr(dist, name), ranks)
        for module in modules:
            setattr(module, name, answered)
    for module in modules:
        module.monitored_barrier = lambda *_, **__: None
    atexit.register(_leave)


def _leave() -> None:
    """End the process groups that the program has left: NCCL's threads ask their store, which ends with Python."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    size = int(os.environ["WORLD_SIZE"])
    store = Answers(size)
    _KEPT.append(store)
    yield store, int(os.environ["RANK"]), size


#: torch holds no reference to a store of Python, but an NCCL thread uses it until the process ends.
_KEPT: list[dist.Store] = []


def _with_fakes(make: Any, *arguments: Any, **options: Any) -> Any:
    """Make a group of processes that waits for nobody: without gloo, and without splitting another one."""
    size, rank, among, backend, *rest = arguments
    named = {"undefined": "cpu:fake,cuda:nccl"}.get(str(backend), str(backend).replace("gloo", "fake"))
    return make(size, rank, among, named, *rest, **{**options, "device_id": None})


def _answered(function: Any, ranks: Present, *arguments: Any, **options: Any) -> Any:
    """Do one of torch's collectives of objects: each rank's value, or those of the root, go into its list.

    Likewise a transfer of objects; the receiver returns the sender's rank.
    """
    bound = inspect.signature(function).bind(*arguments, **options)
    bound.apply_defaults()
    passed = bound.arguments
    group = passed["group"] or dist.distributed_c10d._get_default_group()
    among = list(dist.get_process_group_ranks(group))
    if (end := {"send_object_list": "dst", "recv_object_list": "src"}.get(function.__name__)) is not None:
        peer = passed[f"group_{end}"] if passed[end] is None else among.index(passed[end])
        if end == "dst":
            return ranks.send(passed["object_list"], peer - dist.get_rank(group), among)
        passed["object_list"][:] = ranks.receive(dist.get_rank(group) - peer, among)
        return among[peer]
    sent = next(passed[name] for name in ("obj", "scatter_object_input_list", "object_list") if name in passed)
    values = ranks.gather(sent, among)
    if "src" in passed:
        place = (passed["group_src"] or 0) if passed["src"] is None else among.index(passed["src"])
        values = values[place] or [None] * len(among)
    if "scatter_object_output_list" in passed:
        passed["scatter_object_output_list"][0] = values[dist.get_rank(group)]
    elif (taken := passed.get("object_list", passed.get("object_gather_list"))) is not None:
        taken[:] = values
