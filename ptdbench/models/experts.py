"""A mixture of experts: a router that chooses a few experts for each token, the experts, and their weighted sum."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptdbench.problems import Problem, require

#: The method of load balancing, see :class:`RouterOptions`.
Balance = Literal["none", "loss", "bias", "forced"]

#: How experts compute: by one grouped kernel, or in a loop of products.
Product = Literal["grouped", "loop"]


@dataclass(frozen=True)
class RouterOptions:
    """How tokens choose experts: top-k of an fp32 softmax over all experts.

    Raises:
        ConfigError: With every invalid option.
    """

    #: ``loss``: the auxiliary loss of Switch (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6) over the global
    #: batch, with the fractions of tokens of the previous step, so that it is equal under every layout.
    #: ``bias``: a bias that affects only the choice, moved once per step against the load (Wang et al. 2024, arXiv
    #: 2408.15664). ``forced``: round-robin by position, for benchmarks. ``none``: no balancing.
    balance: Balance = "loss"
    coefficient: float = 0.01  #: Weight of the auxiliary loss, which the reported loss excludes.
    bias_rate: float = 0.001  #: Change of a bias per step.
    normalize: bool = True  #: Whether the weights of the chosen experts are scaled to a sum of 1.

    def __post_init__(self) -> None:
        rules = {
            "balance": (self.balance in get_args(Balance), f"must be {', '.join(get_args(Balance))}"),
            "coefficient": (_is_magnitude(self.coefficient), "must be a number of at least 0"),
            "bias_rate": (_is_magnitude(self.bias_rate), "must be a number of at least 0"),
            "normalize": (isinstance(self.normalize, bool), "must be true or false"),
        }
        problems = {name: rule for name, (holds, rule) in rules.items() if not holds}
        require(*(Problem(f"router.{name}", getattr(self, name), rule) for name, rule in problems.items()))


def _is_magnitude(value: object) -> bool:
    return isinstance(value, int | float) and value >= 0


class Router(nn.Module):
    """Chooses ``active`` experts for each token, and counts the choices.

    Its state across steps is the same on all ranks: once per step the layout sums :attr:`counts` over ranks and calls
    :meth:`balance` if :attr:`balances` is true; :attr:`share` must be set to the factor of a micro-batch's loss.

    Args:
        width: Features of a token.
        experts: Number of experts.
        active: How many are chosen for each token.
        capacity: Maximum tokens of a micro-batch for an expert, as a multiple of its fair share.
        routing: How they are chosen.
    """

    load: Tensor  #: Each expert's fraction of the choices of the previous step, ``[experts]`` in fp32.
    bias: Tensor  #: Added to scores for the choice only, ``[experts]`` in fp32.

    def __init__(self, width: int, experts: int, active: int, capacity: float | None, routing: RouterOptions) -> None:
        super().__init__()
        self.experts = experts
        self.active = active
        self.capacity = capacity
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.positions = nn.Identity()
        self.register_buffer("load", torch.empty(experts))
        self.register_buffer("bias", torch.empty(experts))
        #: For each backward pass, the choices of each expert and how many of them were dropped: ``[experts + 1]`` in
        #: fp32. The consumer clears the list.
        self.counts: list[Tensor] = []
        self.share: Tensor | float = 1.0  #: Weight of a micro-batch's auxiliary loss in the gradients of a step.

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts.

        Args:
            tokens: ``[batch, length, width]``.

        Returns:
            The weights of the choices, ``[tokens, active]`` in fp32; their indices, ``token * active + place``, ordered
            by expert, without dropped ones; and the number of tokens for each expert, ``[experts]`` in int64.
        """
        scores = F.linear(tokens.flatten(0, 1).float(), self.weight.float()).softmax(dim=-1)
        chosen = self._choose(scores.detach(), *tokens.shape[:2])
        order, counts, kept = self._sort(chosen)
        scores = _Counted.apply(scores, self, counts, kept)
        weights = scores.gather(1, chosen)
        if self.routing.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, order, kept

    def _choose(self, scores: Tensor, batch: int, length: int) -> Tensor:
        """Return the experts of each token, ``[tokens, active]``."""
        if self.routing.balance == "forced":
            places = self.positions(torch.arange(length, device=scores.device))
            turns = torch.add(torch.arange(self.active, device=scores.device), places[:, None], alpha=self.active)
            return (turns % self.experts).repeat(batch, 1)
        return (scores + self.bias if self.routing.balance == "bias" else scores).topk(self.active, dim=-1).indices

    def _sort(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the choices ordered by expert, the number of choices of each expert, and how many are kept."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(self.experts).scatter_add_(0, flat, torch.ones_like(flat))
        if self.capacity is None:
            return order, counts, counts
        most = math.ceil(self.capacity * len(flat) / self.experts)
        ends = counts.cumsum(0) - counts + most  # of what an expert keeps
        is_kept = torch.arange(len(flat), device=flat.device) < ends[flat[order]]
        return order[is_kept], counts, counts.clamp(max=most)

    @property
    def balances(self) -> bool:
        """Whether a step depends on the choices of all ranks in the previous step."""
        return self.routing.balance in ("loss", "bias")

    def auxiliary_gradient(self, counts: Tensor) -> Tensor | None:
        """Return the gradient of the auxiliary loss with respect to each token's scores, given these choices."""
        if self.routing.balance != "loss":
            return None
        return self.routing.coefficient * self.experts * self.active / counts.sum() * self.share * self.load

    @torch.no_grad()
    def balance(self, counts: Tensor) -> None:
        """Update load and bias by how often each expert was chosen in a step, ``[experts]`` over all ranks."""
        self.load.copy_(counts / counts.sum())
        if self.routing.balance == "bias":
            self.bias.add_((1 / self.experts - self.load).sign(), alpha=self.routing.bias_rate)


class _Counted(torch.autograd.Function):
    """The identity on scores, whose backward pass counts choices and adds the gradient of the auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, router: Router, counts: Tensor, kept: Tensor) -> Tensor:
        ctx.router, ctx.counts, ctx.kept = router, counts, kept
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        router, counts = ctx.router, ctx.counts.to(gradient)
        dropped = counts.sum(0, keepdim=True) - ctx.kept.sum(0, keepdim=True).to(gradient)
        router.counts.append(torch.cat([counts, dropped]))
        auxiliary_gradient = router.auxiliary_gradient(counts)
        return gradient if auxiliary_gradient is None else gradient + auxiliary_gradient, None, None, None


class Experts(nn.Module):
    """SwiGLU experts (Shazeer 2020) with stacked matrices; the rows of ``gate_up`` are the gate's, then the up's.

    With the first ``n`` matrices of each stack it computes the first ``n`` experts.
    """

    def __init__(self, experts: int, width: int, hidden: int, product: Product) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.product = product

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Let each expert compute its tokens.

        Args:
            tokens: ``[tokens, width]``, ordered by expert.
            counts: Number of tokens of each expert, ``[experts]``, int64.

        Returns:
            ``[tokens, width]``, in the same order.
        """
        if self.product == "loop":
            matrices = zip(tokens.split(counts.tolist()), self.gate_up.unbind(), self.down.unbind(), strict=True)
            return torch.cat([F.linear(_Gated.apply(F.linear(x, gate_up)), down) for x, gate_up, down in matrices])
        if not len(tokens):  # the kernel's gradient needs a token: give the last expert a row of zeros
            tokens, ends = F.pad(tokens, (0, 0, 0, 1)), (torch.arange(len(counts)) == len(counts) - 1).int()
            return self._grouped(tokens, ends.to(tokens.device))[:0]
        return self._grouped(tokens, counts.cumsum(0).to(torch.int32))

    def _grouped(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Compute all experts by one kernel; ``ends``: the end of each expert's tokens."""
        gate_up, down = (matrix.transpose(-2, -1) for matrix in (self.gate_up, self.down))
        return F.grouped_mm(_Gated.apply(F.grouped_mm(tokens, gate_up, offs=ends)), down, offs=ends)


class _Gated(torch.autograd.Function):
    """``silu(gate) * up`` of the two halves of ``[tokens, 2 * hidden]``; gradients are written side by side."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        opened = F.silu(gate)
        ctx.save_for_backward(gate_up, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gate_up, opened = ctx.saved_tensors
        (gate, up), gradients = gate_up.chunk(2, dim=-1), torch.empty_like(gate_up)
        of_gate, of_up = gradients.chunk(2, dim=-1)
        torch.mul(gradient, opened, out=of_up)
        torch.ops.aten.silu_backward(gradient * up, gate, grad_input=of_gate)
        return gradients


class Mixture(nn.Module):
    """Norm, router, and the weighted sum of each token's experts; optionally shared experts for all tokens."""

    def __init__(self, norm: nn.Module, router: Router, experts: Experts, shared: nn.Module | None) -> None:
        super().__init__()
        self.norm = norm
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        x = self.norm(x)
        mixed = self.routed(x)
        return mixed if self.shared is None else mixed + self.shared(x)

    @torch.compiler.disable  # the number of tokens per expert depends on the data
    def routed(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for ``x``."""
        if x.is_meta:  # no values to choose by
            return torch.empty_like(x)
        weights, order, counts = self.router(x)
        active, places = weights.shape[1], places_in(order, weights.numel())
        computed = self.experts(take(x.flatten(0, 1), order, places, copies=active), counts)
        of_choices = take(computed, places, order).unflatten(0, (-1, active))
        return (of_choices * weights.to(x.dtype).unsqueeze(-1)).sum(dim=1).view_as(x)


def places_in(order: Tensor, choices: int) -> Tensor:
    """Return the position in ``order`` of each number from 0 to ``choices - 1``; ``len(order)``: absent."""
    places = torch.full((choices,), len(order), device=order.device)
    return places.scatter_(0, order, torch.arange(len(order), device=order.device))


def take(rows: Tensor, numbers: Tensor, back: Tensor, copies: int = 1) -> Tensor:
    """Gather rows by number, each number at most once.

    Args:
        rows: ``[rows, width]``.
        numbers: Numbers of rows, ``copies`` consecutive ones for each row; ``rows``: absent, gives zeros.
        back: Position of each number in ``numbers``, see :func:`places_in`.
        copies: How many numbers each row has.

    Returns:
        ``[len(numbers), width]``.
    """
    return _Taken.apply(rows, numbers, back, copies)


class _Taken(torch.autograd.Function):
    """See :func:`take`. The backward pass gathers too; torch's would scatter-add, as numbers could repeat."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, numbers: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return _select(rows, numbers if copies == 1 else numbers // copies, len(numbers) > len(rows) * copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        selected = _select(gradient, back, len(back) > len(gradient))
        return selected if ctx.copies == 1 else selected.unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None


def _select(rows: Tensor, numbers: Tensor, any_absent: bool) -> Tensor:
    """Return the rows with these numbers; ``any_absent``: numbers may include ``len(rows)``, which gives zeros."""
    return (F.pad(rows, (0, 0, 0, 1)) if any_absent else rows).index_select(0, numbers)
