"""Muon: matrices are stepped along the nearest orthogonal matrix of their momentum, all other weights by AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

#: What a step of a matrix with so many rows and columns is multiplied by, by the name of the rule in torch.
_SCALES: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}


class Muon(torch.optim.Optimizer):
    """:class:`torch.optim.Muon` for matrices and :class:`torch.optim.AdamW` for all other weights, as one optimizer.

    Of a sharded matrix each rank keeps its shard of the momentum. In a step it gathers the update, orthogonalizes all
    of it, as every rank does, and applies its own part: numbers do not depend on the layout.

    Args:
        params: Parameter groups with a ``rule`` each, see :func:`ptdbench.optim.groups.rules`; what follows them is
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
        self.gathers = dtype.itemsize  #: Bytes of a number of what is gathered of a sharded matrix.
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            how = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
            self._parts.append(_OfWhole(matrices, dtype, lr=lr, weight_decay=weight_decay, **how))
        if others:
            first, second = betas
            self._parts.append(torch.optim.AdamW(others, adamw_lr, (first, second), eps, weight_decay, fused=fused))
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        for part in self._parts:
            # Its groups and state are those of this optimizer, also after some were loaded.
            is_of_matrices = isinstance(part, _OfWhole)
            part.param_groups = [one for one in self.param_groups if (one["rule"] == "matrices") == is_of_matrices]
            part.state = self.state
            part.step()


class _OfWhole(torch.optim.Muon):
    """torch's Muon, which orthogonalizes in a dtype, and of sharded matrices the whole.

    torch would run each product of the iteration on the shards: it communicates in every one of them, and adds up what
    ranks have rounded.
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
        weight.add_(direction, alpha=-lr * _SCALES[group["adjust_lr_fn"]](*weight.shape))


def _whole(matrix: Tensor) -> Tensor:
    """All of a matrix, gathered one dimension of the mesh after the other: of all at once torch warns."""
    if not isinstance(matrix, DTensor):
        return matrix
    for dimension in range(matrix.device_mesh.ndim):
        rest = matrix.placements[dimension + 1 :]
        matrix = matrix.redistribute(placements=[*[Replicate()] * (dimension + 1), *rest])
    return matrix.to_local()


def _orthogonal(matrix: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """The matrix with singular values near 1, by Newton-Schulz as in torch (Jordan et al., "Muon", 2024)."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
