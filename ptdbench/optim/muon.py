"""Muon: updates matrices along the orthogonal matrix nearest to their momentum, and all other weights by AdamW."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim._muon import _adjust_lr


class Muon(torch.optim.Optimizer):
    """:class:`torch.optim.Muon` for matrices and :class:`torch.optim.AdamW` for all other weights, as one optimizer.

    For a sharded matrix each rank keeps its shard of the momentum. In a step all ranks gather and orthogonalize the
    whole update, and each applies its part: numbers do not depend on the layout.

    Args:
        params: Parameter groups with a ``rule`` each, see :func:`ptdbench.optim.groups.rules`; the other arguments are
            described in ``conf/optimizer/muon.yaml``.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp8_tensorwise"] = "bf16",
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = True,
    ) -> None:
        groups = list(params)
        matrices = [group for group in groups if group["rule"] == "matrices"]
        others = [group for group in groups if group["rule"] != "matrices"]
        dtype = torch.float32 if ns_precision in ("fp32", "tf32") else torch.bfloat16
        self.gathers = dtype.itemsize  #: Bytes per element of a gathered update.
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            options = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
            self._parts.append(_GatheredMuon(matrices, dtype, lr=lr, weight_decay=weight_decay, **options))
        if others:
            first, second = betas
            self._parts.append(torch.optim.AdamW(others, adamw_lr, (first, second), eps, weight_decay, fused=fused))
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for part in self._parts:
            # From this optimizer, whose groups and state loading a checkpoint replaces.
            has_matrices = isinstance(part, _GatheredMuon)
            part.param_groups = [group for group in self.param_groups if (group["rule"] == "matrices") == has_matrices]
            part.state = self.state
            part.step()


class _GatheredMuon(torch.optim.Muon):
    """torch's Muon, but it gathers sharded matrices and then orthogonalizes them in a given dtype.

    torch would run each product on shards, which communicates in every product and sums rounded partial results.
    """

    def __init__(self, groups: list[dict[str, Any]], dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, **options)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, momentum, lr = self.state[weight], group["momentum"], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = (gradient.lerp(average, momentum) if group["nesterov"] else average).to(self._dtype)
        direction = _orthogonal(_whole(update), group["ns_steps"], group["ns_coefficients"], group["eps"])
        if isinstance(update, DTensor):
            direction = distribute_tensor(direction, update.device_mesh, update.placements, src_data_rank=None)
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(direction, alpha=-_adjust_lr(lr, group["adjust_lr_fn"], weight.shape))


def _whole(matrix: Tensor) -> Tensor:
    """Gather a matrix, one dimension of the mesh at a time, as torch warns about gathering all at once."""
    if not isinstance(matrix, DTensor):
        return matrix
    for dimension in range(matrix.device_mesh.ndim):
        rest = matrix.placements[dimension + 1 :]
        matrix = matrix.redistribute(placements=[*[Replicate()] * (dimension + 1), *rest])
    return matrix.to_local()


def _orthogonal(matrix: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """Bring the singular values of a matrix near 1, by Newton-Schulz as in torch (Jordan et al., "Muon", 2024)."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
