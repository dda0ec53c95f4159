"""Compilation of a model by torch.compile: part by part, or as one graph."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import nn

from ptdbench.models.protocol import wrap_forward
from ptdbench.problems import ConfigError, Problem, first_line

#: ``layers``: a graph for each layer, and for each other part of a model that is a chain. ``blocks``: for each layer
#: only. ``whole``: one graph for the model, or for each stage of a pipeline. ``autotune``: like ``layers``, with
#: kernels chosen by timing.
Compile = Literal[False, "layers", "blocks", "whole", "autotune"]

#: The environment variable by which users set the number of compile processes.
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"

#: Graphs that a run may need of one kind of part: for training, evaluation, a smaller last batch, and outputs without
#: a loss, each with inputs that need a gradient or not.
VARIANTS = 8


def start_afresh(mode: Compile) -> None:
    """Set up the compiler for one run, whatever earlier runs of this process have compiled.

    Graphs of earlier runs are dropped: after a second batch size torch would compile for dynamic shapes, and after
    eight sizes not at all. Reaching the recompile limit is an error: torch would only warn, and the run would be
    measured without compilation.
    """
    if "torch._dynamo" in sys.modules and torch._dynamo.convert_frame.FRAME_COUNTER:
        torch.compiler.reset()  # on a GPU this imports the compiler itself, which takes seconds
    if mode:
        config = torch._dynamo.config  # imports it, which takes a second that only runs that compile should spend
        config.fail_on_recompile_limit_hit = True
        config.recompile_limit = VARIANTS
        # Under DDP torch would also split graphs at bucket boundaries. Parts are the boundaries here.
        config.optimize_ddp = False
        # torch 2.11 recommends TF32 to every run in fp32, which is what the user asked for.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores .* available but not enabled")
        if _THREADS not in os.environ:  # each rank would use all cores of the node
            from torch._inductor import config as inductor

            inductor.compile_threads = min(32, torch.get_num_threads())


def compile_parts(module: nn.Module, layers: Sequence[nn.Module], parts: Iterable[nn.Module], mode: Compile) -> None:
    """Compile a model or stage with these ``layers``; ``parts``: the whole model's, if it is a chain.

    Identical layers share one compiled graph, so 96 of them compile as fast as one. Communication between layers stays
    between the graphs, where it can overlap.
    """
    if not mode:
        return
    outside = [] if mode == "blocks" else parts_outside_layers(module, layers, parts)
    units = [module] if mode == "whole" else [*layers, *outside]
    options: dict[str, Any] = {"fullgraph": True} if mode == "whole" else {}
    if mode == "autotune":
        from torch._inductor import list_mode_options

        # torch's max-autotune options, plus persistent matrix products that load through the tensor memory accelerator
        # (TMA), which torch omits: on Hopper its plain kernels seldom beat cuBLAS. GPUs without TMA skip them.
        tuned = list_mode_options("max-autotune-no-cudagraphs")
        options["options"] = {**tuned, "triton.enable_persistent_tma_matmul": True}
    # Allow for every kind of part: a ResNet's blocks of many shapes share one code object, and so one limit.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, VARIANTS * len({repr(unit) for unit in units}))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
    for unit in units:
        wrap_forward(unit, partial(_compiled, name=type(unit).__name__, mode=mode, options=options))


def parts_outside_layers(module: nn.Module, layers: Sequence[nn.Module], parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the parts of a chain that have weights and share no module with a layer: embedding and head."""
    inside, of_layers = set(module.modules()), {inner for layer in layers for inner in layer.modules()}
    return [
        part
        for part in parts
        if part in inside and of_layers.isdisjoint(part.modules()) and any(True for _ in part.parameters())
    ]


def _compiled(forward: Callable[..., Any], name: str, mode: Compile, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile the forward of a module whose class has this name, for the shapes it is called with."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

    compiled = torch.compile(forward, dynamic=False, **options)

    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        try:
            return compiled(*arguments, **named)
        except FailOnRecompileLimitHit as error:
            rule = f"the forward of {name} needs more than {torch._dynamo.config.recompile_limit} compilations"
            raise ConfigError([Problem("compile", mode, rule, "try false, or samples of equal shape")]) from error
        except Unsupported as error:
            reason = first_line(error)
            rule = f"the forward of {name} cannot be compiled as one graph: {reason}"
            raise ConfigError([Problem("compile", mode, rule, "try layers")]) from error

    return run
