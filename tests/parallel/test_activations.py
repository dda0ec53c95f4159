"""What a layer keeps for the backward pass, and that it computes the same whatever that is."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ptdbench.kernels.copies import Copies
from ptdbench.models.protocol import wrap_forward
from ptdbench.parallel.activations import Keep, Offload, Recompute, Selective, _Run
from ptdbench.parallel.compile import compile_parts
from ptdbench.parallel.precision import cast_inputs
from ptdbench.setup import training_spec
from tests.conftest import read
from tests.parallel.few_steps import tokens
from tests.parallel.made import refused, small, with_weights
from tests.parallel.test_experts import model as with_experts
from tests.refusals import Abridged

pytestmark = pytest.mark.usefixtures("compiler")

FRUGAL = [Recompute(), Recompute(every=2), Selective(), Selective(products=2), Offload()]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("treat", [Recompute(), Selective()])
def test_a_batch_norm_counts_a_batch_once(treat):
    torch.manual_seed(0)
    layer, plain = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    treat([layer])
    inputs = torch.randn(8, 4, requires_grad=True)
    layer(inputs).square().sum().backward()
    plain(inputs.detach()).square().sum().backward()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(layer.state_dict()[name], tensor), name
    for weight, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight.grad, expected.grad)
    assert layer[1].momentum == plain[1].momentum


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(tokens(), tokens(first=7)).backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("frugal", FRUGAL, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_bitwise_equal_to_keep(frugal, precision):
    plain, model = small(), small()
    names = list(model.state_dict())
    for net in (plain, model):
        cast_inputs(net, net.layers(), precision)
    frugal(model.layers())
    for net in (plain, model) if precision == "bf16" else ():
        Copies(net, net.layers(), torch.bfloat16)
    assert list(model.state_dict()) == names
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("every", "twice"), [(1, [0, 1, 2]), (2, [0, 2]), (4, [0])])
def test_a_layer_that_is_recomputed_runs_twice(every, twice):
    layers, calls = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)], []
    for number, layer in enumerate(layers):
        layer[0].register_forward_hook(lambda *_, number=number: calls.append(number))
    Recompute(every=every)(layers)
    nn.Sequential(*layers)(torch.ones(2, 4)).sum().backward()
    assert sorted(calls) == sorted([0, 1, 2, *twice])


def test_selective_keeps_products_and_attention():
    counts = {}
    for activations in (Keep(), Recompute(), Selective()):
        with Operations() as seen:
            for model in (small(), with_weights(with_experts())):
                activations(model.layers())
                gradients(model)
        counts[type(activations).__name__] = seen.counts
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert counts["Keep"][attention] == counts["Selective"][attention] == counts["Recompute"][attention] - 5 == 5
    assert counts["Keep"]["_grouped_mm"] == counts["Selective"]["_grouped_mm"] == counts["Recompute"]["_grouped_mm"] - 4
    assert counts["Keep"]["addmm"] == counts["Selective"]["addmm"] < counts["Recompute"]["addmm"]
    assert counts["Keep"]["gelu"] == counts["Selective"]["gelu"] - 3 == counts["Recompute"]["gelu"] - 3


def test_of_two_products_in_a_row_the_second_is_computed_again():
    layer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    Selective(products=2)([layer])
    with Operations() as seen:
        layer(torch.ones(2, 4)).sum().backward()
    assert seen.counts["addmm"] == 5 + 2


def test_offload_frees_all_but_two_layers():
    layers, saved, alive = [nn.Linear(4, 4) for _ in range(4)], list[StorageWeakRef](), list[list[int]]()
    Offload()(layers)

    def double(x: Tensor) -> Tensor:
        alive.append([number for number, storage in enumerate(saved) if not storage.expired()])
        middle = x * 2
        saved.append(StorageWeakRef(middle.untyped_storage()))
        return middle

    for layer in layers:
        wrap_forward(layer, lambda forward: lambda x: forward(double(x)).tanh())
    out = torch.ones(2, 4, requires_grad=True)
    for layer in layers:
        out = layer(out)
    assert alive == [[], [0], [0, 1], [1, 2]]  # as each layer is about to run
    out.sum().backward()
    assert all(layer.weight.grad.abs().sum() > 0 for layer in layers)


def test_what_is_fetched_has_the_strides_it_had():
    """Compiled graphs check them. What fills one storage is fetched once, whatever its shapes."""
    whole = torch.randn(2, 3, 12)
    tensors = (
        whole, whole.transpose(0, 1), whole.unflatten(-1, (3, 4)).permute(2, 0, 1, 3)[1], whole[:, :1].expand(2, 5, 12),
        whole[0, 0, 0], torch.tensor(3), torch.empty(2, 0, 3),
    )  # fmt: skip
    run = _Run(nn.Module(), None, lambda _: None)
    fetches = [run.pack(saved) for saved in tensors]
    run.leave()
    fetched_tensors = [fetch() for fetch in fetches]
    for fetched, saved in zip(fetched_tensors, tensors, strict=True):
        assert torch.equal(fetched, saved)
        assert fetched.stride() == saved.stride()
        assert saved.numel() == 0 or fetched.data_ptr() != saved.data_ptr()
    assert fetched_tensors[0].data_ptr() == fetched_tensors[1].data_ptr()


def test_host_copies_are_contiguous():
    """Into or out of any other order torch copies through pageable memory of the host, which waits for it."""
    run = _Run(nn.Module(), None, lambda _: None)
    queries, *_ = torch.randn(2, 5, 3, 4, 3).unbind(-2)  # beside keys and values
    fetch = run.pack(queries.transpose(1, 2))
    assert [copy._kept.is_contiguous() for copy in run._copies.values()] == [True]
    run.leave()
    assert torch.equal(fetch(), queries.transpose(1, 2))


def test_offload_keeps_wrapped_weights():
    """As one does that FSDP has gathered in fp8, of which most operations are not defined."""
    numbers = torch.ones(2, 3), torch.ones(2, 3)
    layer = nn.Module()
    layer.weight = nn.Parameter(TwoTensor(*numbers))
    run = _Run(layer, None, lambda _: None)
    saved = run.pack(TwoTensor(*(number.t() for number in numbers)))()
    assert not run._copies
    assert saved.a.data_ptr() == numbers[0].data_ptr()


@pytest.mark.parametrize(("precision", "how"), [("fp32", False), ("bf16", False), ("bf16", "layers")])
def test_offload_keeps_weights_and_copies(precision, how, monkeypatch):
    moved = []
    monkeypatch.setattr(_Run, "_offload", lambda _, tensor: (moved.append(tensor.shape), tensor.clone)[1])
    layer = nn.Linear(4, 4)
    cast_inputs(layer, [layer], precision)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compile_parts(layer, [layer], (), how)
    Offload()([layer])
    if precision == "bf16":
        Copies(layer, [layer], torch.bfloat16)
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert moved == [(2, 4)]
    assert [weight.grad.dtype for weight in layer.parameters()] == [torch.float32] * 2


@pytest.mark.parametrize(("overrides", "message"), [
    (("activations=offload", "compile=whole"), "activations=offload: … compile=whole …; try compile=layers"),
    (("activations=recompute", "activations.every=0"), "activations.every=0: must be a whole number of at least 1"),
    (("activations=selective", "model=custom", "model._target_=torch.nn.Linear", "+model.in_features=32",
      "+model.out_features=8", "data=synthetic_vectors"),
     "activations=selective: is applied layer by layer, and model=Linear has no layers(); try keep"),
])  # fmt: skip
def test_ineffective_activations_are_refused(overrides, message):
    assert refused(training_spec.specify, read(*overrides), lambda ranks: ranks(2)) == Abridged(message)
