import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from ptdbench.kernels import linear_cross_entropy as module
from ptdbench.kernels.linear_cross_entropy import FusedHead, LinearCrossEntropy, chunk_rows, fuse_heads
from ptdbench.models.decoder import Head

CPU = torch.device("cpu")

linear_cross_entropy = LinearCrossEntropy()


@pytest.fixture
def eight_rows(monkeypatch):
    """Chunks of at most eight rows."""
    monkeypatch.setattr(module, "LOGITS_CPU", 1)
    monkeypatch.setattr(module, "LEAST_ROWS", 8)


def case(rows=37, width=16, vocabulary=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=generator)


def plain(hidden, weight, targets):
    return F.cross_entropy(hidden.flatten(0, -2) @ weight.T, targets.flatten())


def with_gradients(loss_of, hidden, weight, targets, scale=1.0):
    loss = loss_of(hidden, weight, targets)
    return (loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight)))


def assert_close(ours, expected, share=None, dtype=None):
    """All of these are alike, by default as torch finds it, else to a share of the largest number of each."""
    for got, want in zip(ours, expected, strict=True):
        assert dtype in (None, got.dtype)
        tolerance = {} if share is None else {"rtol": 0, "atol": share * want.abs().max().item()}
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.usefixtures("eight_rows")
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_loss_equals_that_of_whole_logits(dtype, share, scale):
    for rows in (1, 8, 9, 37):
        inputs = case(rows, dtype=dtype)
        expected = with_gradients(plain, *inputs, scale)
        assert_close(with_gradients(linear_cross_entropy, *inputs, scale), expected, share, dtype)


@pytest.mark.usefixtures("eight_rows")
@pytest.mark.parametrize("rows", [8, 37])
def test_wide_products_are_used(monkeypatch, rows):
    """Such as on CUDA, of which this is a fake; the arguments are those of torch's schemas."""
    calls = []

    def mm(left, right, *, out_dtype):
        calls.append(("mm", left.dtype, out_dtype))
        return left.to(out_dtype) @ right.to(out_dtype)

    def addmm(total, left, right, *, out_dtype, out):
        assert out is total
        calls.append(("addmm", left.dtype, out_dtype))
        return total.addmm_(left.to(out_dtype), right.to(out_dtype))

    inputs = [tensor.detach().bfloat16().requires_grad_() for tensor in case(rows)[:2]]
    targets = case(rows)[2]
    usual = with_gradients(linear_cross_entropy, *inputs, targets)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(module, "has_wide_products", lambda device: True)
    ours = with_gradients(linear_cross_entropy, *inputs, targets)
    kinds = ["mm"] + ["addmm"] * ((rows - 1) // 8)
    assert calls == [(kind, torch.bfloat16, torch.float32) for kind in kinds]
    assert_close(ours, usual, 0.02)


@pytest.mark.usefixtures("eight_rows")
def test_compiled_wide_products_add_in_place(monkeypatch):
    """Inductor has a lowering for ``mm`` with another dtype of its output, and none for such an ``addmm``."""
    monkeypatch.setattr(module, "has_wide_products", lambda device: True)
    seen = []

    def note(graph, _):
        seen.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    hidden, weight, targets = (tensor.detach().to("meta") for tensor in case(37))
    inputs = (hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets)
    torch.compile(linear_cross_entropy, fullgraph=True, backend=aot_autograd(fw_compiler=note))(*inputs)
    assert sum(str(node.target) == "aten.mm.dtype" for node in seen) == 1  # for the first chunk
    assert sum(torch.ops.ptdbench.add_product_.default in node.args for node in seen) == 4
    assert not [node for node in seen if str(node.target).startswith("aten.add")]


@pytest.mark.usefixtures("eight_rows")
def test_original_weight_gets_unrounded_gradient():
    """The products of eight tokens are exact in bf16, and the sum of 511 times -3/4 is not: it is one in fp32."""
    hidden, original = torch.ones(512, 1).bfloat16(), torch.zeros(4, 1, requires_grad=True)
    hidden[0] = 0
    copy = original.detach().bfloat16().requires_grad_()
    targets = torch.zeros(512, dtype=torch.int64)
    linear_cross_entropy(hidden, copy, targets, original=original).backward()
    assert copy.grad is None
    assert original.grad[0].item() == -0.75 * 511 / 512
    assert original.grad[0].bfloat16().item() != original.grad[0].item()


def test_only_cuda_has_wide_products(monkeypatch):
    gpu = torch.device("cuda")
    assert [module.has_wide_products(device) for device in (CPU, torch.device("meta"), gpu)] == [False, False, True]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not module.has_wide_products(gpu)


@pytest.mark.usefixtures("eight_rows")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_give_a_wide_loss(dtype):
    inputs = case()
    ours = with_gradients(lambda h, w, t: linear_cross_entropy(h.to(dtype), w.to(dtype), t), *inputs, 64.0)
    assert_close(ours, with_gradients(plain, *inputs, 64.0), 0.02, torch.float32)


def test_small_probabilities_survive_fp16():
    """Words that are never the target get 1/50304 each; divided by the 512 tokens it would fit no fp16."""
    tokens, vocabulary, scale = 512, 50304, 2.0**16
    hidden, weight = torch.ones(tokens, 1), torch.zeros(vocabulary, 1, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight.half(), torch.zeros(tokens, dtype=torch.int64))
    (loss * scale).backward()
    expected = torch.full((vocabulary - 1,), 1 / vocabulary)
    torch.testing.assert_close(weight.grad[1:, 0] / scale, expected, rtol=5e-3, atol=0)


def test_certain_target_keeps_its_bf16_gradient():
    """softmax is 0.9991 there, which bf16 rounds to 1: the gradient must not be 0."""
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[7.0], [0.0]])
    linear_cross_entropy(hidden, weight.bfloat16(), torch.zeros(1, dtype=torch.int64)).backward()
    expected = 7 * (torch.sigmoid(torch.tensor(7.0)) - 1)
    torch.testing.assert_close(hidden.grad[0, 0], expected, rtol=1e-2, atol=0)


class Recorder(TorchDispatchMode):
    """Counts matrix products and remembers the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.usefixtures("eight_rows")
def test_largest_tensor_is_a_chunk():
    rows, vocabulary, width = 64, 256, 4
    inputs = case(rows, width, vocabulary)
    with Recorder() as recorder:
        linear_cross_entropy(*inputs).backward()
    assert recorder.largest == 8 * vocabulary  # and not 64 times
    assert recorder.products == 3 * rows // 8
    with Recorder() as usual:
        plain(*inputs).backward()
    assert usual.largest == rows * vocabulary


@pytest.mark.usefixtures("eight_rows")
def test_unneeded_gradients_are_not_computed():
    hidden, weight, targets = case(32)
    expected, *gradients = with_gradients(plain, hidden, weight, targets)
    for grad, frozen, products in [(False, (), 1), (True, (hidden,), 2), (True, (weight,), 2)]:
        for tensor in (hidden, weight):
            tensor.requires_grad_(all(tensor is not other for other in frozen))
            tensor.grad = None
        with Recorder() as recorder, torch.set_grad_enabled(grad):
            loss = linear_cross_entropy(hidden, weight, targets)
        torch.testing.assert_close(loss, expected)
        assert loss.requires_grad == grad
        assert recorder.products == products * 32 // 8
        if grad:
            loss.backward()
            for tensor, gradient in zip((hidden, weight), gradients, strict=True):
                torch.testing.assert_close(tensor.grad, gradient if tensor.requires_grad else None)


def test_kept_graph_repeats_gradients():
    hidden, weight, targets = case()
    loss = linear_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(gradient, other) for gradient, other in zip(first, second, strict=True))


@pytest.mark.usefixtures("eight_rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_without_a_graph_break(dtype):
    inputs = case(20, dtype=dtype)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    expected = with_gradients(linear_cross_entropy, *inputs, 3.0)
    assert_close(with_gradients(compiled, *inputs, 3.0), expected)


def test_cpu_chunks_bound_the_logits():
    assert chunk_rows(1100, 50304, torch.float32, CPU) == 550  # two of equal size, and not 1024 rows and 76
    assert chunk_rows(8192, 256, torch.float32, CPU) == 8192  # 8 MiB of logits are not worth a second chunk
    assert chunk_rows(1, 50304, torch.float32, CPU) == 1


def test_gpu_chunks_follow_total_memory(monkeypatch):
    class Properties:
        total_memory = 79 * 2**30 + 123 * 2**20  # 2 % of 79 GiB are 16,862 rows of GPT-2's in bf16

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert chunk_rows(16862, 50304, torch.bfloat16, gpu) == 16862
    assert chunk_rows(16863, 50304, torch.bfloat16, gpu) == 8432
    assert chunk_rows(16862, 50304, torch.float32, gpu) == 8431
    Properties.total_memory += 2**29
    assert chunk_rows(16863, 50304, torch.bfloat16, gpu) == 8432
    Properties.total_memory = 2**30
    assert chunk_rows(8192, 50304, torch.bfloat16, gpu) == 1024  # rather than products of 213 rows


def test_a_fused_head_has_the_loss_and_gradients_of_a_plain_one():
    torch.manual_seed(0)
    head, results = Head(nn.LayerNorm(4), 4, 5), []
    for kind in (Head, FusedHead):
        assert type(head) is kind
        x = torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_()
        loss = head(x, torch.tensor([[0, 1, 2], [3, 4, 0]]))
        results.append((loss, *torch.autograd.grad(loss, [x, head.projection.weight])))
        fuse_heads(head)
    torch.testing.assert_close(results[1], results[0])
    assert head(torch.zeros(1, 1, 4)).shape == (1, 1, 5)
