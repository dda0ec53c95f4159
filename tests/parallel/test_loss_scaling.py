from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from ptdbench.local_part import local_part
from ptdbench.parallel.precision import AgreedGradScaler
from tests.parallel.ranks import each, on_ranks


class AllReduces(TorchDispatchMode):
    """Counts them, those that torch takes for DTensors included."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # until it is in operations of its parts
        self.count += "reduce" in str(operation)
        return operation(*args, **(kwargs or {}))


def overflow_on_one_rank(fused: bool, sharded: bool) -> dict[str, Any]:
    """Four steps: in the first and last, rank 1's gradient has overflowed.

    Rank 0 never scales a loss, as an early stage.
    """
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

    def placed(part: Tensor) -> Tensor:
        return DTensor.from_local(part, mesh, [Shard(0)]) if sharded else part

    weight = nn.Parameter(placed(torch.ones(3)))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=fused)
    scaler = AgreedGradScaler("cpu", enabled=True)
    seen: dict[str, Any] = {"scales": [scaler.get_scale()], "weights": [], "gradients": [], "messages": []}
    for overflows in (True, False, False, True):
        gradient = torch.full((3,), torch.inf if overflows and rank == 1 else scaler.get_scale())
        if rank == 1:
            scaler.scale(torch.ones(()))
        weight.grad = placed(gradient.clone())
        with AllReduces() as taken:
            scaler.step(optimizer)
            scaler.update()
        seen["scales"].append(scaler.get_scale())
        seen["weights"].append(local_part(weight.detach()).clone())
        seen["gradients"].append(gradient)
        seen["messages"].append(taken.count)
    return seen


@pytest.mark.ranks
def test_overflow_on_one_rank_skips_step_everywhere():
    first, other = on_ranks(2, each, overflow_on_one_rank, [(False, False), (True, False), (False, True), (True, True)])
    assert all(seen["gradients"][0].isfinite().all() for seen in first.values())
    assert all(seen["gradients"][0].isinf().all() for seen in other.values())
    for seen in (*first.values(), *other.values()):
        assert seen["scales"] == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**14]  # halved after the overflows
        assert torch.equal(seen["weights"][0], torch.ones(3))
        # The gradient is 1 once it is unscaled; Adam's first steps then have the length of the learning rate.
        torch.testing.assert_close(seen["weights"][1], torch.full((3,), 0.9))
        assert seen["messages"] == [1] * 4
