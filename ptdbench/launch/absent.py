"""What answers for the ranks that are not there, in a run of which only some ranks are carried out.

A rank asks others for three things. Objects, small figures and barriers: :class:`Some` has each absent rank say what
the last one before it says that is there. Keys of a store, by which process groups are made: :class:`Answers` has
them. Messages of device memory: the virtual GPU lets them go nowhere, see :mod:`ptdbench.virtual.library`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Bytes of the largest value that a process group reads from a store: NCCL's name of a communicator.
_NAME_BYTES = 128


class Some:
    """The circle of the ranks that are there; see :class:`ptdbench.launch.together.Circle`.

    Args:
        present: These ranks, in ascending order.
        rank: This one.
        size: Ranks of the run.
        store: Theirs.
    """

    def __init__(self, present: Sequence[int], rank: int, size: int, store: dist.Store) -> None:
        self._present, self._rank, self._store = present, rank, store
        self._answers_for = [max((one for one in present if one <= rank), default=present[0]) for rank in range(size)]
        self._number = 0

    def gather(self, value: Any) -> list[Any]:
        """What each rank says, or who answers for it."""
        said = self._say(value)
        return [said[rank] for rank in self._answers_for]

    def reduce(self, numbers: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        """The sum or the maximum over the ranks that are there."""
        said = torch.stack(list(self._say(numbers).values()))
        return said.sum(0) if how == dist.ReduceOp.SUM else said.amax(0)

    def barrier(self) -> None:
        """Wait for the ranks that are there."""
        self._say(None)

    def _say(self, value: Any) -> dict[int, Any]:
        """What each rank that is there says; all of them ask in the same order."""
        self._number += 1
        self._store.set(f"said {self._number} {self._rank}", pickle.dumps(value))  # type: ignore[arg-type] # also bytes
        return {rank: pickle.loads(self._store.get(f"said {self._number} {rank}")) for rank in self._present}


class Answers(dist.Store):
    """A store in which every rank has been already: nobody waits, and a value that nobody has set is zeros.

    Args:
        size: Ranks of the run: as many have added to each counter.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """A value."""
        return self._values.get(key, bytes(_NAME_BYTES))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, to which all others have added."""
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return max(int(self._values[key]), self._size)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value."""
        self.set(key, desired)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Nothing to wait for."""

    def check(self, keys: list[str]) -> bool:
        """Whether there are values; NCCL's watchdog looks for one that says that a rank has failed."""
        return all(key in self._values for key in keys)

    def clone(self) -> Answers:
        """The store for another thread or group: the same."""
        return self

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many values there are."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing to wait for."""
