"""``precision=bf16`` and ``fp16`` are one definition: the same dtypes everywhere under every layout."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchvision.models.resnet import BasicBlock

from ptdbench.data.synthetic import SyntheticImages
from ptdbench.models.resnet import SHAPES, ResNet
from ptdbench.parallel.strategy import Strategy
from tests.daily import cases, selected
from tests.parallel.made import data, gpt, laid_out, on_meta
from tests.parallel.ranks import each, on_ranks

pytestmark = pytest.mark.ranks

#: On four ranks, with the samples of a micro-batch: a batch norm needs two.
STRATEGIES = {
    "ddp": (Strategy(replicate=4), 2),
    "ddp in two passes": (Strategy(replicate=4), 1),
    "fsdp": (Strategy(shard=4), 2),
    "hsdp": (Strategy(replicate=2, shard=2), 2),
    "1f1b": (Strategy(replicate=2, pipeline=2), 2),
    "gpipe": (Strategy(replicate=2, pipeline=2, schedule="gpipe"), 2),
    "stages in shards": (Strategy(shard=2, pipeline=2), 2),
    "tensor": (Strategy(replicate=2, tensor=2, sequence=True), 2),
    "context": (Strategy(shard=2, context=2), 2),
}
#: Those that only a model with roles knows.
DIVIDED = ("tensor", "context")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Strategy, precision and model.
CASES = [
    (name, precision, kind)
    for name, (_, micro_batch) in STRATEGIES.items()
    for precision in DTYPES
    for kind in ("gpt", "resnet")
    if kind == "gpt" or (micro_batch > 1 and name not in DIVIDED)
]


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest) -> list[dict[Any, dict[str, Any]]]:
    return on_ranks(4, each, step_of, sorted(selected(request, "case")))


@cases(
    "case",
    CASES,
    daily=[case for case in CASES if case[0] in ("ddp", "fsdp", "1f1b") and case[1] == "bf16"],
    ids="-".join,
)
def test_dtypes_do_not_depend_on_the_layout(of_ranks, case):
    _, precision, kind = case
    seen = [of_rank[case] for of_rank in of_ranks]
    activations: dict[str, set[torch.dtype]] = {}
    for of_rank in seen:
        for module, dtypes in of_rank["activations"].items():
            activations.setdefault(module, set()).update(dtypes)
        assert of_rank["gradients"] == of_rank["weights"] == {torch.float32}
        assert of_rank["statistics"] <= {torch.float32, torch.int64}
        assert of_rank["loss"] == torch.float32
        assert of_rank["evaluated"] in (None, DTYPES[precision])
        assert of_rank["messages"] == ({DTYPES[precision]} if "pipeline" in of_rank else set())
    expected = {name for name, module in model(kind).named_modules() if not any(module.children())}
    assert set(activations) >= expected - NOT_CALLED
    assert {module: dtypes for module, dtypes in activations.items() if dtypes != {DTYPES[precision]}} == {}


#: The loss is computed from their weights or returned by them, or is what they return.
NOT_CALLED = {"head.projection", "head.cross_entropy", "fc"}


def model(kind: str) -> Any:
    if kind == "resnet":
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SHAPES, 10, (BasicBlock, [1, 1, 1, 1]))  # a CPU takes long for convolutions in fp16
            return on_meta(ResNet, depth=10, classes=5, image_size=8, stem="small")
    # Not tied, so that activations and their gradients are the only messages between stages.
    return gpt(layers=2, tie_weights=False)


def step_of(name: str, precision: Any, kind: str) -> dict[str, Any]:
    """In a rank: what the tensors of one training step and one evaluation are."""
    strategy, micro_batch = STRATEGIES[name]
    engine, layout, replica = laid_out(strategy, model(kind), 8, micro_batch, precision=precision)
    activations: dict[str, set[torch.dtype]] = {}
    for place, module in engine.module.named_modules():
        if not any(module.children()) and place not in NOT_CALLED:
            activations[place] = set()
            module.register_forward_hook(lambda *seen, into=activations[place]: into.add(seen[-1].dtype))
    source = data() if kind == "gpt" else SyntheticImages(image_size=8, classes=5, seed=0)
    batch = source.samples(*layout.rows(0, replica))
    with pytest.MonkeyPatch.context() as patch:
        messages = recorded(patch)
        loss = engine.gradients(*batch, lambda loss: loss * 8)
    evaluated = engine.outputs(batch[0])
    parameters = list(engine.module.parameters())
    return {
        "activations": activations, "messages": messages, "loss": loss.dtype,
        "weights": {weight.dtype for weight in parameters},
        "gradients": {weight.grad.dtype for weight in parameters if weight.grad is not None},
        "statistics": {buffer.dtype for buffer in engine.module.buffers()},
        "evaluated": None if evaluated is None else evaluated.dtype,
        **({"pipeline": True} if layout.dims.pipeline > 1 else {}),
    }  # fmt: skip


def recorded(patch: pytest.MonkeyPatch) -> set[torch.dtype]:
    seen: set[torch.dtype] = set()
    real = dist.P2POp.__init__

    def noting(self: Any, op: Any, tensor: Tensor, *arguments: Any, **options: Any) -> None:
        if tensor.is_floating_point() and tensor.numel() > 1:  # shapes are exchanged too, and torch 2.11 says hello
            seen.add(tensor.dtype)
        real(self, op, tensor, *arguments, **options)

    patch.setattr(dist.P2POp, "__init__", noting)
    return seen
