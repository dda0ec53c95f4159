"""PowerSGD: DDP's gradients are averaged as products of two thin matrices (Vogels et al. 2019)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

#: Added to the norm of a column before dividing by it: the gradient of a matrix may be zero.
_EPSILON = 1e-8

#: torch's state by bucket: what was not sent yet, which differs between ranks, and the two factors of the last step.
_BY_BUCKET = {"error": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}


class _Done:
    """A future that is there: what follows runs at once, on the stream of what came before.

    torch's own futures run it on 32 streams in turns, on each of which cuBLAS keeps a workspace of 32 MiB for good.
    """

    def __init__(self, found: Any) -> None:
        self._found = found

    def value(self) -> Any:
        return self._found

    wait = value

    def get_future(self) -> _Done:
        return self

    def then(self, following: Callable[[_Done], Any]) -> _Done:
        return _Done(following(self))


class _InTurn:
    """``torch.distributed`` for torch's hook, with all-reduces that are done when the hook goes on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> _Done:
        dist.all_reduce(tensor, group=group)
        return _Done([tensor])


#: torch's hook, whose three messages follow each other in the thread and the stream that call it.
_hook = FunctionType(powerSGD_hook.__code__, {**powerSGD_hook.__globals__, "dist": _InTurn()})


class PowerSGD:
    """Averages the gradients of a DDP module by torch's hook, and keeps the hook's state.

    What the approximation of a step leaves out is added to this rank's gradients of the next step (error feedback).

    Args:
        replica: The module.
        group: Its replicas.
        rank: Columns of the two matrices.
        start: Steps in which gradients are averaged as they are, at least 2: until then DDP rebuilds its buckets.
    """

    def __init__(self, replica: DistributedDataParallel, group: dist.ProcessGroup, rank: int, start: int) -> None:
        self._state = PowerSGDState(group, rank, start, orthogonalization_epsilon=_EPSILON)
        self._number = {weight: number for number, weight in enumerate(replica.module.parameters())}
        self._order: dict[int, list[int]] = {}  # the weights of each bucket
        self._loaded: dict[str, Tensor] = {}
        # torch refuses annotations that are strings.
        replica.register_comm_hook(self, lambda self, bucket: self._average(bucket))

    def tensors(self) -> dict[str, Tensor]:
        """The state between two steps, by name; on the device, except for small ones."""
        found = {"steps": torch.tensor([self._state.iter, self._state.matrix_approximation_rank])}
        found |= {f"order.{bucket}": torch.tensor(numbers) for bucket, numbers in self._order.items()}
        for name, attribute in _BY_BUCKET.items():
            found |= {f"{name}.{bucket}": tensor for bucket, tensor in getattr(self._state, attribute).items()}
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with a state from :meth:`tensors`; :meth:`rehearsing` must follow, where it is tried."""
        self._loaded = dict(tensors)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """A context of passes that leave no trace; afterwards a loaded state is taken over if it is of these buckets.

        Otherwise compression begins anew: what a bucket is short of is of no use to another.
        """
        kept = {name: getattr(self._state, name) for name in ("iter", "start_powerSGD_iter", *_BY_BUCKET.values())}
        self._set({"iter": 0, "start_powerSGD_iter": sys.maxsize, **{name: {} for name in _BY_BUCKET.values()}})
        yield
        self._set(kept)
        loaded, self._loaded = self._loaded, {}
        if loaded and self._fits(loaded):
            device = next(iter(self._number)).device
            self._state.iter = int(loaded["steps"][0])
            for name, attribute in _BY_BUCKET.items():
                of_buckets = {key.partition(".")[2]: tensor for key, tensor in loaded.items() if key.startswith(name)}
                setattr(self._state, attribute, {int(key): tensor.to(device) for key, tensor in of_buckets.items()})

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self._order[bucket.index()] = [self._number[weight] for weight in bucket.parameters()]
        if bucket.is_last():  # there were more before DDP rebuilt them
            self._order = {index: numbers for index, numbers in self._order.items() if index <= bucket.index()}
        # A bucket takes three messages, each begun when the one before has arrived: in gloo's threads two ranks would
        # begin those of two buckets in different orders. Under NCCL the hook waits for the GPU anyway.
        found = _hook(self._state, bucket)
        if not isinstance(found, _Done):  # averaged as it is
            return found
        buffer = bucket.buffer()
        future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else [])
        future.set_result(found.value())
        return future

    def _fits(self, loaded: Mapping[str, Tensor]) -> bool:
        """Whether a state is of these weights in these buckets, and of this rank of approximation."""
        order = {name: numbers.tolist() for name, numbers in loaded.items() if name.startswith("order.")}
        here = {f"order.{bucket}": numbers for bucket, numbers in self._order.items()}
        return order == here and int(loaded["steps"][1]) == self._state.matrix_approximation_rank

    def _set(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self._state, name, value)
