"""Averages of replicas, piece by piece; what training with them comes to: test_levers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ptdbench.parallel import local_sgd
from ptdbench.parallel.engine import Accumulating, Part
from ptdbench.parallel.local_sgd import LocalSGD
from tests.parallel.ranks import on_ranks

pytestmark = pytest.mark.ranks


def in_rank() -> dict[str, Any]:
    """What two ranks have that begin with 0 and with 1, or with multiples of it."""
    return {"averaged": averaged(), "messages": messages(), "when": when(), "loaded": loaded()}


def norm() -> tuple[nn.BatchNorm1d, LocalSGD]:
    """A batch norm whose numbers are those of the rank, and whose bias is not trained."""
    module, rank = nn.BatchNorm1d(2), float(dist.get_rank())
    module.bias.requires_grad_(False)
    for tensor in module.state_dict().values():
        tensor.fill_(rank)
    return module, LocalSGD(module, dist.group.WORLD, 3)


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in module.state_dict().items()}


def averaged() -> dict[str, Any]:
    module, local = norm()
    optimizer = torch.optim.AdamW([module.weight], lr=0.0)
    local.attach(optimizer)
    module.weight.grad = torch.full([2], 10.0 * dist.get_rank())
    optimizer.step()
    moment = optimizer.state[module.weight]["exp_avg"]
    with local.averaged(with_state=False):
        without_state = moment.tolist()
    with local.averaged(with_state=True) as own:
        inside = {**values(module), "moment": moment.tolist()}
    return {"inside": inside, "after": {**values(module), "moment": moment.tolist()}, "own": sorted(own),
            "moment without state": without_state, "step": float(optimizer.state[module.weight]["step"])}  # fmt: skip


def messages() -> dict[str, Any]:
    """Tensors of two dtypes, one of them larger than a message, one empty, one whose memory has gaps."""
    rank = dist.get_rank()
    tensors = [
        torch.full([3], 2.0 * rank), torch.full([40], 4.0 * rank), torch.empty(0),
        torch.full([2, 2], 6 * rank, dtype=torch.float64), torch.full([4, 2], 8.0 * rank).t(),
    ]  # fmt: skip
    sent: list[int] = []
    original = dist.all_reduce
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_sgd, "_MESSAGE", 64)
        patched.setattr(dist, "all_reduce", lambda one, group: (sent.append(one.nbytes), original(one, group=group)))
        local_sgd.average(tensors, dist.group.WORLD)
    return {"sent": sent, "means": [tensor.unique().tolist() for tensor in tensors], "shape": tensors[-1].shape}


def when() -> list[int]:
    """After which steps the weights are those of both."""
    module, local = norm()
    found = []
    for number in range(7):
        with torch.no_grad():
            module.weight.fill_(dist.get_rank())
        local.after_step(number)
        if module.weight[0] == 0.5:
            found.append(number)
    return found


def loaded() -> dict[str, Any]:
    module, local = norm()
    own = {"weight": torch.full([2], 7.0), "running_mean": torch.full([2], 8.0), "running_var": torch.full([2], 9.0)}
    others = {
        "shape": own | {"weight": torch.full([3], 7.0)}, "dtype": own | {"weight": torch.full([2], 7.0).double()},
        "more": own | {"bias": torch.full([2], 7.0)}, "less": {"weight": own["weight"]}, "nothing": {},
    }  # fmt: skip
    fitting = [name for name, other in {"same": own, **others}.items() if local.fits(other)]
    # Two stages of a rank, of which one is another in the second rank.
    engine = Accumulating(Part(module, module, local=local), 1)
    engine.parts = [*engine.parts, Part(module, module, local=local)]
    named = {f"local.{part}.{name}": tensor for part in (0, 1) for name, tensor in own.items()}
    engine.load_own_state({} if dist.get_rank() == 1 else named)
    other = values(module)
    engine.load_own_state(named)
    return {"fitting": fitting, "other": other, "same": values(module)}


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return on_ranks(2, in_rank)


def test_weights_statistics_and_moments_are_means_and_then_own_again(of_ranks):
    for rank, found in enumerate(of_rank["averaged"] for of_rank in of_ranks):
        own = [float(rank)] * 2
        assert found["inside"] == {
            "weight": [0.5, 0.5], "running_mean": [0.5, 0.5], "running_var": [0.5, 0.5], "moment": [0.5, 0.5],
            "bias": own, "num_batches_tracked": [rank],
        }  # fmt: skip
        assert found["after"] == {
            "weight": own, "running_mean": own, "running_var": own, "moment": own, "bias": own,
            "num_batches_tracked": [rank],
        }  # fmt: skip
        assert found["own"] == ["running_mean", "running_var", "weight", "weight.exp_avg", "weight.exp_avg_sq"]
        assert found["moment without state"] == own
        assert found["step"] == 1


def test_messages_are_of_one_dtype_and_not_larger_than_need_be(of_ranks):
    for found in (of_rank["messages"] for of_rank in of_ranks):
        assert found["sent"] == [12, 160, 32, 32]
        assert found["means"] == [[1.0], [2.0], [], [3.0], [4.0]]
        assert found["shape"] == (2, 4)


def test_every_third_step(of_ranks):
    assert [of_rank["when"] for of_rank in of_ranks] == [[2, 5], [2, 5]]


def test_what_another_layout_had_is_left_alone_by_all(of_ranks):
    for rank, found in enumerate(of_rank["loaded"] for of_rank in of_ranks):
        assert found["fitting"] == ["same"]
        assert found["other"]["weight"] == [float(rank)] * 2
        assert found["same"]["weight"] == [7.0, 7.0]
        assert found["same"]["running_mean"] == [8.0, 8.0]
        assert found["same"]["running_var"] == [9.0, 9.0]
