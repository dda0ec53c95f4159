"""PowerSGD: averages DDP's gradients as products of two thin matrices (Vogels et al. 2019)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ptdbench.kernels.choice import Kernels

#: Added to the norm of a column before dividing by it, as the gradient of a matrix may be zero.
_EPSILON = 1e-8

#: torch's state by bucket: the error feedback, which differs between ranks, and the two factors of the last step.
_BY_BUCKET = {"error": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}


class _Done:
    """A completed future: callbacks run at once, on the current stream.

    torch's own futures run callbacks on 32 streams in turn, on each of which cuBLAS keeps a 32 MiB workspace for good.
    """

    def __init__(self, result: Any) -> None:
        self._result = result

    def value(self) -> Any:
        return self._result

    wait = value

    def get_future(self) -> _Done:
        return self

    def then(self, following: Callable[[_Done], Any]) -> _Done:
        return _Done(following(self))


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> _Done:
    dist.all_reduce(tensor, group=group)
    return _Done([tensor])


#: torch's hook, modified to send its three messages one after another in the calling thread and stream, and not to
#: synchronize with the machine's GPU after each bucket, used or not.
_hook = FunctionType(
    powerSGD_hook.__code__,
    {
        **powerSGD_hook.__globals__,
        "dist": SimpleNamespace(**{**vars(dist), "all_reduce": _all_reduce}),
        "torch": SimpleNamespace(**{**vars(torch), "cuda": SimpleNamespace(is_available=lambda: False)}),
    },
)


class PowerSGD:
    """Averages the gradients of a DDP module by torch's hook, and holds the hook's state.

    A step's approximation error is added to this rank's gradients of the next step (error feedback).

    Args:
        replica: The module.
        group: Its replicas.
        rank: Columns of the two matrices.
        start: Number of first steps with exact averages, at least 2: until then DDP rebuilds its buckets.
        kernels: ``torch``: the hook as it is.
    """

    def __init__(
        self, replica: DistributedDataParallel, group: dist.ProcessGroup, rank: int, start: int, kernels: Kernels
    ) -> None:
        self._hook = _hook if kernels == "fused" else powerSGD_hook
        self._state = PowerSGDState(group, rank, start, orthogonalization_epsilon=_EPSILON)
        self._number = {weight: number for number, weight in enumerate(replica.module.parameters())}
        self._order: dict[int, list[int]] = {}  # the weights of each bucket
        self._loaded: dict[str, Tensor] = {}
        # A lambda has no annotations; torch refuses those that are strings.
        replica.register_comm_hook(self, lambda self, bucket: self._average(bucket))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state between two steps by name; on the device, except for small tensors."""
        tensors = {"steps": torch.tensor([self._state.iter, self._state.matrix_approximation_rank])}
        tensors |= {f"order.{bucket}": torch.tensor(numbers) for bucket, numbers in self._order.items()}
        for name, attribute in _BY_BUCKET.items():
            tensors |= {f"{name}.{bucket}": tensor for bucket, tensor in getattr(self._state, attribute).items()}
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state from :meth:`tensors`; :meth:`rehearsing` must follow, which applies it if it fits."""
        self._loaded = dict(tensors)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Return a context whose passes leave the state unchanged; on exit a loaded state is applied if buckets match.

        Otherwise compression starts afresh, as a bucket's error is useless to a different bucket.
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
        if bucket.is_last():  # there may have been more before DDP rebuilt them
            self._order = {index: numbers for index, numbers in self._order.items() if index <= bucket.index()}
        # A bucket takes three messages, each started after the previous one completes: with gloo's threads, two ranks
        # could start the messages of two buckets in different orders. Under NCCL only the stream waits for them.
        averaged = self._hook(self._state, bucket)
        if not isinstance(averaged, _Done):  # averaged without compression
            return averaged
        buffer = bucket.buffer()
        future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else [])
        future.set_result(averaged.value())
        return future

    def _fits(self, loaded: Mapping[str, Tensor]) -> bool:
        """Whether a state is for these weights in these buckets, with the same rank of approximation."""
        order = {name: numbers.tolist() for name, numbers in loaded.items() if name.startswith("order.")}
        here = {f"order.{bucket}": numbers for bucket, numbers in self._order.items()}
        return order == here and int(loaded["steps"][1]) == self._state.matrix_approximation_rank

    def _set(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self._state, name, value)
