"""Proof of a tensor-parallel plan: on its ranks a model computes what it computes on one.

It runs in this process, in fp32 on the host, with a thread for each rank, before any rank exists.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
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

#: The largest difference, relative to the largest number of a tensor.
TOLERANCE = 1e-5

#: Gradients are compared with this share of the largest one, if they are smaller: some are zero but for rounding.
_SMALL = 1e-2


def prove(model: Model, example: tuple[Any, Tensor], ranks: int) -> str | None:
    """Return how outputs or gradients on ``ranks`` differ from those on one; ``None``: they are equal.

    A proof is kept in the user's cache, by the source of the model's classes.

    Args:
        model: One block of each kind, and what is around them; its weights are replaced by random ones.
        example: Inputs and targets of one sample on the meta device.
        ranks: Their number, which divides what they share.
    """
    key = _key(model, ranks)
    if cache.look_up("tensor_plans", key):
        return None
    _fill(model)
    batch = with_samples(example, 2, "cpu", filled=True)
    expected = _computed(copy.deepcopy(model), batch)
    difference = _on_ranks(model, batch, ranks, expected)
    if difference is None:
        with suppress(OSError):
            cache.keep("tensor_plans", key, {"equal": True})
    return difference


def _key(model: Model, ranks: int) -> dict[str, Any]:
    """Return all that a proof depends on, the plan included."""
    module = getattr(model, "module", module_of(model))
    kinds = {
        kind for part in module.modules() for kind in type(part).__mro__ if not kind.__module__.startswith("torch.")
    }
    sources = set[str]()
    for kind in kinds:
        with suppress(OSError, TypeError):  # a class of a notebook, or of C
            sources.add(inspect.getsource(inspect.getmodule(kind) or kind))
    roles = {name: role.kind for name, role in roles_of(model).items()}
    described = [
        module,
        getattr(module, "config", ""),
        roles,
        model.tied(),
        *sorted(sources),
        inspect.getsource(tensor),
    ]
    digest = hashlib.sha256("\n".join(map(str, described)).encode()).hexdigest()
    return {"model": type(module).__qualname__, "proven": digest, "ranks": ranks, "torch": torch.__version__}


@torch.no_grad()
def _fill(model: Model) -> None:
    """Fill a model with random weights: zeros and small numbers would hide what is computed with them."""
    module = module_of(model)
    materialize(model, module, device="cpu", seed=0)
    module.eval()  # no dropout, and batch norms keep their statistics
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        if weight.is_floating_point():
            spread = 0.5 / max(weight.shape[-1] if weight.dim() else 1, 1) ** 0.5
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=spread)


def _computed(model: Model, batch: tuple[Any, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a model's modules in a pass, in order, and then the gradients, by name."""
    results: dict[str, Tensor] = {}

    def note(name: str, _module: nn.Module, _arguments: Any, output: Any) -> None:
        if held := tensors(output):
            results.setdefault(f"the output of {name}" if name else "the output", _whole(held[0]))

    module = module_of(model)
    with ExitStack() as hooks:
        for name, part in module.named_modules():
            hooks.callback(part.register_forward_hook(partial(note, name)).remove)
        if not only_loss(model):
            module(batch[0])
        loss = module(*batch)
    results["the loss"] = _whole(loss)
    loss.backward()
    weights = dict(module.named_parameters())
    tensor.add_up_partial(list(weights.values()))
    gradients = {name: _whole(weight.grad) for name, weight in weights.items() if weight.grad is not None}
    return results | {f"the gradient of {name}": gradient for name, gradient in gradients.items()}


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _on_ranks(model: Model, batch: tuple[Any, Tensor], ranks: int, expected: Mapping[str, Tensor]) -> str | None:
    """Return the first difference on any rank."""
    store, reasons = dist.HashStore(), dict[int, str | None]()

    def run(rank: int, part: Model) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
            tensor.parallelize(part, module_of(part), mesh, sequence=False)
            reasons[rank] = _difference(expected, _computed(part, batch))
        except BaseException as error:  # a thread that another's failure ends raises SystemExit
            if isinstance(error, Exception):
                reasons[rank] = f"a rank fails: {first_line(error)}"
            threads.ProcessLocalGroup.exception_handle(error)

    with _threaded():
        workers = [threading.Thread(target=run, args=(rank, copy.deepcopy(model))) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return next((reasons[rank] for rank in sorted(reasons) if reasons[rank]), None)


@contextmanager
def _threaded() -> Iterator[None]:
    """Let process groups be of threads, as in torch's own tests."""
    forget_plans()
    threads._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threads._uninstall_threaded_pg()
        threads.ProcessLocalGroup.reset()
        forget_plans()


def _difference(expected: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> str | None:
    """Return the first tensor that differs; one of another shape is a rank's part of it, whose whole follows."""
    largest = max(float(value.abs().max()) for name, value in expected.items() if name.startswith("the gradient"))
    for name, value in expected.items():
        is_gradient, other = name.startswith("the gradient"), computed.get(name)
        if is_gradient and (other is None or other.shape != value.shape):
            return f"{name} is missing"
        if other is None or other.shape != value.shape or not value.is_floating_point() or not value.numel():
            continue
        scale = max(float(value.abs().max()), _SMALL * largest if is_gradient else 0.0)
        difference = float((value - other).abs().max())
        if not difference <= TOLERANCE * scale:
            return f"{name} differs by {difference / scale if scale else difference:.0e}"
    return None
