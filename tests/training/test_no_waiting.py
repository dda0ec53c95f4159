"""A step queues its work and never waits for the device, so that the host can run ahead of it.

On a CPU nothing waits; instead, what would wait on a GPU fails here: reading a value (``item()``, ``float()``, ``if
tensor``), operators whose shapes depend on values, and copies to the host.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptdbench.data.feed import Feed
from ptdbench.optim.schedules import Constant
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.options import Setting
from ptdbench.setup.config import Train
from ptdbench.training.loop import StepLoop, Update
from tests.checkpoints.test_state import DATA, STRATEGIES, gpt
from tests.parallel.ranks import each, on_ranks
from tests.workloads.made_loop import TRAIN

CPU = torch.device("cpu")
BATCH = 4

#: Operators that make the host wait for a GPU.
WAITING = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::repeat_interleave.Tensor",
}  # fmt: skip

#: Methods that copy a tensor to the host.
COPYING = ("cpu", "numpy", "tolist", "__array__")


class Waits(Exception):
    """A step would wait for the device."""


class NoWaiting(TorchDispatchMode):
    def __enter__(self) -> "NoWaiting":
        self._patch = pytest.MonkeyPatch()
        for name in COPYING:
            self._patch.setattr(Tensor, name, partial(self._refuse, name))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.name() == "aten::index.Tensor" and any(
            one.dtype == torch.bool for one in args[1] if one is not None
        )
        if by_mask or func.name() in WAITING:
            self._refuse(func.name())
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _refuse(name: str, *_: Any, **__: Any) -> None:
        raise Waits(name)


@pytest.mark.parametrize("waits", [
    lambda tensor: tensor.sum().item(), lambda tensor: float(tensor[0]), lambda tensor: bool(tensor[0] > 0),
    lambda tensor: tensor[tensor > 0], lambda tensor: tensor.tolist(), lambda tensor: tensor.cpu(),
    lambda tensor: tensor.numpy(), torch.nonzero,
])  # fmt: skip
def test_what_waits_is_noticed(waits):
    with NoWaiting(), pytest.raises(Waits):
        waits(torch.ones(3))
    waits(torch.ones(3))


def steps(strategy: str, precision: Any, clips: bool) -> int:
    """The steps that a run took without waiting, in which it may clip too."""
    chosen = STRATEGIES[strategy]
    layout = chosen.layout(chosen.dims(torch.distributed.get_world_size()), BATCH, 1)
    mesh = Mesh(layout.dims, "cpu")
    with torch.device("meta"):
        built = gpt()
    engine = chosen(built, Setting(mesh, layout, CPU, seed=0, precision=precision))
    optimizer = engine.optimizer(lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True))
    asked = Train(**{**TRAIN, **({"clip_norm": 1.0} if clips else {})})
    update = Update(engine, optimizer, Constant(), asked, CPU, scale=precision == "fp16")
    feed = Feed(DATA, partial(layout.rows, replica=mesh.dp.get_local_rank()), CPU)
    loop = StepLoop(engine, update, feed, CPU, mesh)
    loop.step()  # the first one may wait, where it sets things up
    with NoWaiting():
        for _ in range(2):
            loop.step()
    assert all(loss.isfinite() for loss in loop.losses)
    return loop.taken


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp")])
def test_a_step_does_not_wait(ranks, strategy):
    cases = [(strategy, precision, clips) for precision in ("fp32", "bf16", "fp16") for clips in (False, True)]
    assert on_ranks(ranks, each, steps, cases) == [dict.fromkeys(cases, 3)] * ranks
