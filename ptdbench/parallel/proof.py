"""Proof of a tensor-parallel plan: on its ranks a model computes what it computes on one.

It runs in fp32 on the host, with a thread of this process for each rank, before any rank exists.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import multi_threaded_pg as threads

from ptdbench import cache
from ptdbench.models.materialize import materialize
from ptdbench.models.protocol import Model, module_of, only_loss
from ptdbench.nested import tensors, with_samples
from ptdbench.parallel import tensor
from ptdbench.parallel.mesh import forget_plans
from ptdbench.parallel.roles import roles_of
from ptdbench.problems import first_line

#: The first torch whose process groups of threads do not crash.
PROVES_SINCE = "2.14"

#: The largest difference, relative to the largest number of a tensor.
TOLERANCE = 1e-5

#: Gradients are compared with this share of the largest one, if they are smaller: some are zero but for rounding.
_SMALL = 1e-2


def prove(model: Model, example: tuple[Any, Tensor], ranks: int) -> str | None:
    """Return how outputs or gradients on ``ranks`` differ from those on one; ``None``: they are equal.

    A proof is kept in the user's cache, by the source of the model's classes.

    Args:
        model: The model, with one block of each kind; its weights are replaced by random ones.
        example: Inputs and targets of one sample on the meta device.
        ranks: Their number, which divides what they share.
    """
    key = {"model": _identity(model), "ranks": ranks, "torch": torch.__version__}
    if cache.look_up("tensor_plans", key):
        return None
    _fill(model)
    batch = with_samples(example, 2, "cpu", filled=True)
    difference = _on_ranks(model, batch, ranks, _computed(copy.deepcopy(model), batch))
    if difference is None:
        with suppress(OSError):
            cache.keep("tensor_plans", key, {"equal": True})
    return difference


def _identity(model: Model) -> str:
    """Return a hash of all that a proof depends on: the plan, the model and its source, and ours."""
    module = module_of(model)
    kinds = {
        kind for part in module.modules() for kind in type(part).__mro__ if not kind.__module__.startswith("torch.")
    }
    sources = {inspect.getsource(tensor)}
    for kind in kinds:
        with suppress(OSError, TypeError):  # a class of a notebook, or of C
            sources.add(inspect.getsource(inspect.getmodule(kind) or kind))
    configs = [getattr(part, "config", "") for part in module.children()]  # Hugging Face
    described = [module, *configs, roles_of(model), model.tied(), *sorted(sources)]
    return sha256("\n".join(map(str, described)).encode()).hexdigest()


@torch.no_grad()
def _fill(model: Model) -> None:
    """Fill a model with random weights: zeros and small numbers would hide what is computed with them."""
    module, generator = module_of(model), torch.Generator().manual_seed(0)
    materialize(model, module, device="cpu", seed=0)
    module.eval()  # no dropout, and batch norms keep their statistics
    for weight in module.parameters():
        if weight.is_floating_point() and weight.numel():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise, alpha=0.5 / (weight.shape[-1] if weight.dim() else 1) ** 0.5)


def _computed(model: Model, batch: tuple[Any, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a model's modules in a pass, in order, and then the gradients, by name."""
    results: dict[str, Tensor] = {}

    def note(name: str, value: Tensor) -> None:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        results.setdefault(name, whole.detach().clone())

    def note_output(name: str, _module: nn.Module, _arguments: Any, output: Any) -> None:
        if leaves := [leaf for leaf in tensors(output) if leaf.is_floating_point()]:
            note(f"the output of {name}" if name else "the output", leaves[0])

    module = module_of(model)
    with ExitStack() as hooks:
        for name, part in module.named_modules():
            hooks.callback(part.register_forward_hook(partial(note_output, name)).remove)
        with suppress(TypeError):  # of a model that has no outputs, only a loss
            if not only_loss(model):
                module(batch[0])
        loss = module(*batch)
    note("the loss", loss)
    loss.backward()
    weights = dict(module.named_parameters())
    tensor.add_up_partial([*weights.values()])
    for name, weight in weights.items():
        if weight.grad is not None:
            note(f"the gradient of {name}", weight.grad)
    return results


def _on_ranks(model: Model, batch: tuple[Any, Tensor], ranks: int, expected: Mapping[str, Tensor]) -> str | None:
    """Return the first difference on the first rank that has any, with process groups of threads."""
    store, reasons = dist.HashStore(), dict[int, str | None]()

    def run(rank: int, part: Model) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
            tensor.parallelize(part, module_of(part), mesh, sequence=False)
            reasons[rank] = _difference(expected, _computed(part, batch))
        except BaseException as error:  # the failure of another thread is a SystemExit here
            if isinstance(error, Exception):
                reasons[rank] = f"a rank fails: {first_line(error)}"
            threads.ProcessLocalGroup.exception_handle(error)

    forget_plans()
    threads._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    try:
        workers = [threading.Thread(target=run, args=(rank, copy.deepcopy(model))) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        threads._uninstall_threaded_pg()
        threads.ProcessLocalGroup.reset()
        forget_plans()
    return next((reasons[rank] for rank in sorted(reasons) if reasons[rank]), None)


def _difference(expected: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> str | None:
    """Return the first tensor that differs; an output of another shape is a rank's part."""
    largest = {name: float(value.abs().max()) for name, value in expected.items() if value.numel()}
    of_gradients = _SMALL * max(size for name, size in largest.items() if name.startswith("the gradient"))
    for name, size in largest.items():
        value, other, is_gradient = expected[name], computed.get(name), name.startswith("the gradient")
        if other is None or other.shape != value.shape:
            if is_gradient:
                return f"{name} is missing"
        elif not float((value - other).abs().max()) <= TOLERANCE * max(size, of_gradients * is_gradient):
            return f"{name} differs by {float((value - other).abs().max() / (size or 1.0)):.0e}"
    return None
