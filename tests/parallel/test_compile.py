"""Graphs: how many there are, of what, and for how long."""

import warnings
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptdbench.kernels.copies import Copies
from ptdbench.models.materialize import materialize
from ptdbench.models.protocol import module_of
from ptdbench.parallel.compile import Compile, compile_parts, parts_outside_layers, start_afresh
from ptdbench.parallel.precision import cast_inputs
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError
from ptdbench.setup import training_spec
from tests.conftest import read
from tests.daily import cases
from tests.parallel.few_steps import tokens
from tests.parallel.made import laid_out, small, unscaled
from tests.parallel.ranks import pretended

pytestmark = pytest.mark.usefixtures("compiler")

Graphs = list[torch.fx.GraphModule]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """What is compiled, by a compiler that runs each graph as it is."""
    compiled_graphs: Graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled_graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return compiled_graphs


def compiled(model: Any, how: Compile = "layers") -> Any:
    start_afresh(how)
    compile_parts(module_of(model), model.layers(), (model.parts() or {}).values(), how)
    return model


def test_fp32_runs_get_no_tf32_advice(monkeypatch):
    """As torch 2.11 does, which has this text; others log it."""
    from torch._inductor import compile_fx

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with warnings.catch_warnings(record=True) as warned:
        start_afresh("layers")
        compile_fx._warn_tf32_disabled.__wrapped__()
        warnings.warn(
            "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider"
            " setting `torch.set_float32_matmul_precision('high')` for better performance.",
            stacklevel=1,
        )
    assert warned == []


def test_compile_processes_equal_threads(monkeypatch):
    """Not as many as the node has cores, once more for each of its ranks."""
    from torch._inductor import config

    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(config, "compile_threads", 7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    start_afresh("layers")
    assert config.compile_threads == 3
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    start_afresh("layers")
    assert config.compile_threads == 3


@pytest.mark.parametrize(
    ("precision", "mode", "count"), [("fp32", "layers", 3), ("bf16", "layers", 3), ("bf16", "blocks", 1)]
)
def test_equal_layers_share_a_graph(graphs, precision, mode, count):
    """Casts of inputs are in it, and those of weights outside."""
    plain, model = small(), small()
    names = list(model.state_dict())
    for net in (plain, model):
        cast_inputs(net, net.layers(), precision)
    compiled(model, mode)
    for net in (plain, model) if precision == "bf16" else ():
        Copies(net, [*net.layers(), *parts_outside_layers(net, net.layers(), net.parts().values())], torch.bfloat16)
    torch.testing.assert_close(model(tokens(), tokens()), plain(tokens(), tokens()))
    assert len(graphs) == count
    assert list(model.state_dict()) == names


def test_a_model_that_is_not_one_graph_says_so(graphs):
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = Broken(2, 2)
    start_afresh("whole")
    compile_parts(model, [], [], "whole")
    with pytest.raises(ConfigError, match=r"compile=whole: the forward of Broken .*; try layers"):
        model(torch.ones(1, 2))


def test_reset_only_after_compilation(graphs, monkeypatch):
    """On a GPU torch would import Inductor to do so: seconds of the start of each rank."""
    calls = []
    torch.compiler.reset()
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    compiled(small())
    assert calls == []
    compiled(small())(tokens(), tokens())
    start_afresh(False)
    assert calls == ["reset"]


def test_autotune_times_kernels(monkeypatch):
    compilations = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda forward, **options: compilations.append(options) or forward)
        compiled(small(), "layers")
        compiled(small(), "autotune")
    assert compilations[:5] == [{"dynamic": False}] * 5
    (options,) = {tuple(compilation.pop("options").items()) for compilation in compilations[5:]}
    assert compilations[5:] == [{"dynamic": False}] * 5
    assert {("max_autotune", True), ("triton.enable_persistent_tma_matmul", True)} <= set(options)
    torch.compile(lambda x: x, options=dict(options))  # refuses options that it does not know


def test_parts_within_layers_are_not_compiled(monkeypatch):
    compiled_modules: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled_modules.append(forward.__self__) or forward)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    first, stateless, last = nn.Sequential(*layers), nn.ReLU(), nn.Linear(2, 2)
    model = nn.Sequential(first, stateless, last)
    compile_parts(model, layers, [first, stateless, last, nn.Linear(2, 2)], "layers")
    assert compiled_modules == [*layers, last]


def test_each_run_compiles_its_batch_size_and_endless_shapes_fail(graphs):
    """More sizes than the eight graphs after which torch gives up; each of constant shapes."""
    for batch in range(2, 12):
        compiled(nn_chain(4, 4))(torch.ones(batch, 4))
    assert len(graphs) == 10
    for graph in graphs:
        placeholders = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        assert all(isinstance(size, int) for value in placeholders for size in value.shape)
    model = compiled(nn_chain(4, 5, 4))  # two kinds of layer
    rule = "compile=layers: the forward of Linear needs more than 16 compilations; try false, or samples of equal"
    for batch in range(1, 9):
        model(torch.ones(batch, 4))
    assert len(graphs) == 10 + 16
    with pytest.raises(ConfigError, match=rule):
        model(torch.ones(99, 4))


def test_graphs_are_one_per_kind_mode_and_size(graphs):
    """As in a ResNet, whose blocks of many shapes are one piece of code, for which torch allows eight graphs."""
    model = compiled(nn_chain(2, 3, 4, 5, 6, 2))
    for batch, trains in [(4, True), (4, True), (6, False), (6, False), (3, False), (4, True)]:
        with torch.set_grad_enabled(trains):
            model(torch.ones(batch, 2, requires_grad=trains))
    assert len(graphs) == 3 * 5


def nn_chain(*widths: int) -> "Chain":
    return Chain(*(nn.Linear(width, other) for width, other in pairwise(widths)))


class Chain(nn.Sequential):
    def layers(self) -> list[nn.Module]:
        return list(self)

    def parts(self) -> None:
        pass


#: One of each kind of model and recipe, and what its command line adds so that it runs on a CPU within seconds.
RECIPES = {
    "gpt_tiny": ("model=gpt_tiny", "model.sequence_length=16"),
    "digits_resnet18": ("experiment=digits_resnet18",),
    "resnet50": ("model=resnet50", "model.image_size=32", "model.classes=10"),
    "toy": ("model=toy",),
    "custom": ("model=custom",),
    "hf_gpt2_tiny": ("model=hf_gpt2_tiny", "data.sequence_length=16"),
    "hf_llama_tiny": ("model=hf_llama_tiny", "data.sequence_length=16"),
}


@cases(
    ("recipe", "how"),
    [*((recipe, "layers") for recipe in RECIPES), ("gpt_tiny", "whole"), ("digits_resnet18", "whole"),
     ("custom", "whole"), ("hf_gpt2_tiny", "whole"), ("hf_llama_tiny", "whole")],
    daily=[("gpt_tiny", "whole"), ("custom", "layers")],
)  # fmt: skip
def test_compiled_recipes_keep_their_losses(graphs, recipe, how):
    """In the graphs of the compiler that the run would use; how these are computed is left to torch."""
    config = read(*RECIPES[recipe], f"compile={how}", "train.global_batch=4", "parallel=single")
    losses = {}
    for compiles in (False, how):
        spec = training_spec.specify(config, lambda ranks: ranks(1))
        materialize(spec.model, module_of(spec.model), device="cpu", seed=0)
        loss = compiled(spec.model, compiles)(*spec.data.samples(0, 4))
        loss.backward()
        losses[compiles] = loss.item()
        assert compiles or not graphs
    assert losses[how] == pytest.approx(losses[False], rel=1e-4)
    assert len(graphs) == 1 if how == "whole" else graphs


@pytest.mark.parametrize(("how", "count"), [("layers", 3), ("whole", 1)])
def test_ddp_buckets_do_not_split_graphs(graphs, how, count):
    """In buckets so small that torch would cut each block."""
    with pretended(1):
        engine, *_ = laid_out(Strategy(replicate="auto", bucket_mb=0.0001), small(), 4, 2, compile=how)
        engine.gradients(tokens(), tokens(), unscaled)
    assert len(graphs) == count
