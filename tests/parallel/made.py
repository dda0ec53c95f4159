"""Small models, and how tests lay them out over real ranks."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor

from ptdbench.data.synthetic import SyntheticTokens
from ptdbench.models.gpt import GPT
from ptdbench.parallel.dims import BatchPlan
from ptdbench.parallel.engine import Engine
from ptdbench.parallel.options import Setting
from ptdbench.parallel.strategy import Strategy
from ptdbench.profiling import trace
from ptdbench.profiling.events import CommCall
from ptdbench.training.profile import profiled
from tests.models.made import on_meta, with_weights
from tests.parallel.ranks import mesh_of
from tests.refusals import refusal_of as refused  # noqa: F401

CPU = torch.device("cpu")
SHAPE = {"layers": 4, "heads": 4, "width": 16, "sequence_length": 8, "vocabulary": 40}


def gpt(**options: Any) -> GPT:
    """On the meta device, of :data:`SHAPE` but for these options."""
    return on_meta(GPT, **SHAPE | options)


def data(vocabulary: int = 40) -> SyntheticTokens:
    return SyntheticTokens(sequence_length=8, vocabulary=vocabulary, seed=0)


def unscaled(loss: Tensor) -> Tensor:
    return loss


def small(**options: Any) -> GPT:
    """With weights, for :func:`tests.parallel.few_steps.tokens`."""
    return with_weights(gpt(**{"layers": 3, "heads": 2, "width": 8, "sequence_length": 6, "vocabulary": 20} | options))


def layout_of(strategy: Strategy, world_size: int, global_batch: int, micro_batch: Any = "auto") -> BatchPlan:
    return strategy.layout(strategy.dims(world_size), global_batch, micro_batch)


def laid_out(
    strategy: Strategy, model: Any, batch: int, micro_batch: Any = "auto", **setting: Any
) -> tuple[Engine, BatchPlan, int]:
    """In a rank: the engine of a model over all ranks, how a batch is divided, and whose share of it is this rank's."""
    layout = layout_of(strategy, dist.get_world_size(), batch, micro_batch)
    strategy.check(model, layout)
    mesh = mesh_of(layout.dims)
    engine = strategy(model, Setting(mesh=mesh, layout=layout, device=CPU, **setting))
    return engine, layout, mesh.dp.get_local_rank()


def calls_of(step: Callable[[], object]) -> Sequence[CommCall]:
    """In a rank: what it communicates in a step, as a trace shows it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profiled(CPU) as taken, record_function(trace.STEP):
            step()
        taken.export_chrome_trace(str(path))
        steps_trace = trace.read(path)
    return [call for call in steps_trace.calls if call.start >= steps_trace.steps[0][0]]


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor, which may be in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
