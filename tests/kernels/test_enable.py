import torch
from torch import nn

from ptdbench.kernels.enable import FusedHead, enable
from ptdbench.models.decoder import Head


def passes(head: Head, kernels: str) -> tuple[type[nn.Module], torch.Tensor, torch.Tensor, torch.Tensor]:
    enable(head, kernels, None, torch.device("cpu"))
    x = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
    loss = head(x, torch.tensor([[0, 1, 2], [3, 4, 0]]))
    head.zero_grad()
    loss.backward()
    return type(head), loss, x.grad, head.projection.weight.grad.clone()


def test_a_fused_head_has_the_loss_and_gradients_of_a_plain_one():
    torch.manual_seed(0)
    head = Head(nn.LayerNorm(4), 4, 5)
    (plain, *expected), (fused, *numbers) = passes(head, "torch"), passes(head, "fused")
    assert (plain, fused) == (Head, FusedHead)
    torch.testing.assert_close(numbers, expected)
    assert head(torch.zeros(1, 1, 4)).shape == (1, 1, 5)
