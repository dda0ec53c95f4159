"""A step of a GPT on a virtual GPU with kernels=torch, and by torch's documented recipe: prints both, as JSON."""

import gc
import json
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ptdbench.models.gpt import GPT
from ptdbench.models.materialize import materialize
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.options import Setting
from ptdbench.parallel.strategy import Strategy
from ptdbench.profiling.events import kernel_kind

SHAPE = {"layers": 3, "heads": 4, "width": 256, "sequence_length": 256, "vocabulary": 8192}
BATCH, DEVICE = 8, torch.device("cuda", 0)


def ours(**degrees: Any) -> tuple[nn.Module, Callable[[Tensor, Tensor], object]]:
    """The model as the product lays it out, and its passes."""
    with torch.device("meta"):
        model = GPT(**SHAPE)
    strategy = Strategy(**degrees)
    layout = strategy.layout(strategy.dims(1), BATCH, BATCH)
    mesh = Mesh(layout.dims, "cuda")
    setting = Setting(mesh=mesh, layout=layout, device=DEVICE, precision="bf16", kernels="torch")
    engine = strategy(model, setting)
    return engine.module, lambda inputs, targets: engine.gradients(inputs, targets, lambda loss: loss)


def filled() -> GPT:
    with torch.device("meta"):
        model = GPT(**SHAPE)
    materialize(model, model, device=DEVICE, seed=0)
    return model


def ddp() -> tuple[nn.Module, Callable[[Tensor, Tensor], object]]:
    replica = DistributedDataParallel(filled(), bucket_cap_mb=25, gradient_as_bucket_view=True, static_graph=True)

    def passes(inputs: Tensor, targets: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = replica(inputs, targets)
        loss.backward()

    return replica, passes


def fsdp() -> tuple[nn.Module, Callable[[Tensor, Tensor], object]]:
    model, policy = filled(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, lambda inputs, targets: model(inputs, targets).backward()


def settle() -> None:
    """Wait until NCCL's watchdog, which looks every 100 ms, has let go of the tensors of finished collectives."""
    gc.collect()
    time.sleep(0.5)


def counted(make: Callable[[], tuple[nn.Module, Callable[[Tensor, Tensor], object]]]) -> dict[str, Any]:
    """The kernels of a step by kind, and its peak of memory in bytes."""
    settle()
    before = torch.cuda.memory_allocated()
    module, passes = make()
    optimizer = torch.optim.AdamW(module.parameters())
    inputs, targets = (torch.zeros(BATCH, SHAPE["sequence_length"], dtype=torch.int64, device=DEVICE) for _ in range(2))

    def step() -> None:
        passes(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    peaks = []
    for _ in range(3):  # the first one may find a freed block that it need not split
        settle()
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
    names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"kernels": Counter(map(kernel_kind, names)), "peak": min(peaks)}


if __name__ == "__main__":
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    recipes = {"ddp": (ddp, {"replicate": "auto"}), "fsdp": (fsdp, {"shard": "auto"})}
    counted(ddp)  # cuBLAS's workspaces stay from the first step on
    steps = {name: [counted(partial(ours, **degrees)), counted(recipe)] for name, (recipe, degrees) in recipes.items()}
    dist.destroy_process_group()
    print(json.dumps(steps))
