"""Specification of a training run: model, data, optimizer and strategy, built and checked against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ptdbench.data.protocol import Data, adapt
from ptdbench.models import foreign
from ptdbench.models.protocol import FlopsUnknown, Model, masked_flops, members, module_of
from ptdbench.models.state import Modes, failure, observe
from ptdbench.nested import first_tensor
from ptdbench.optim.groups import DECAYED, in_groups
from ptdbench.optim.muon import Muon
from ptdbench.optim.schedules import Schedule
from ptdbench.parallel import conflicts, proof
from ptdbench.parallel.activations import Activations, Keep, Offload, Recompute, Selective
from ptdbench.parallel.dims import BatchPlan, Dims, check_share
from ptdbench.parallel.engine import Engine, MakeOptimizer
from ptdbench.parallel.footprint import StateBytes, footprints
from ptdbench.parallel.mesh import Mesh
from ptdbench.parallel.options import Setting
from ptdbench.parallel.pipeline_stages import imbalance, split_stages
from ptdbench.parallel.precision import DTYPES
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError, ErrorCollector, Problem, divisors, first_line, require, under
from ptdbench.setup import choices
from ptdbench.setup.config import Call, Config

#: A stand-in to check an optimizer's options on if the model's own options are wrong.
_ANY_MODEL = nn.Sequential(nn.Linear(1, 1, device="meta"), nn.Linear(1, 1, device="meta"))


@dataclass(frozen=True)
class Flops:
    """FLOPs of a model, forward and backward."""

    per_sample: float | None = None  #: ``None`` if unknown.
    masked: float | None = None  #: The part of them that causal attention masks; ``None`` if unknown.
    reason: str | None = None  #: Why they are unknown.

    @staticmethod
    def of(model: Model) -> Flops:
        """Count them; only before the model is laid out."""
        try:
            return Flops(sum(model.train_flops().values()), masked_flops(model))
        except FlopsUnknown as error:
            return Flops(reason=str(error))


@dataclass(frozen=True)
class TrainingSpec:
    """The objects of a training run, and their layout over the ranks."""

    config: Config  #: The run's configuration.
    layout: BatchPlan  #: How the global batch is divided over the ranks.
    strategy: Strategy  #: Lays out the model.
    activations: Activations  #: Treatment of a layer's activations until the backward pass.
    model: Model  #: On the meta device, or whole in host memory if it can only be built there.
    data: Data  #: The source of samples.
    optimizer: MakeOptimizer  #: Makes an optimizer for named parameters.
    schedule: Schedule  #: The learning rate schedule.
    tied: Sequence[tuple[str, str]]  #: Pairs of full parameter names that share one weight.
    pinned: bool  #: Whether weights and gradients are in pinned host memory.
    flops: Flops = Flops()  #: Counted where a rank needs them.

    def footprints(self) -> list[StateBytes]:
        """Return the training state of a rank of each pipeline stage."""
        parts = (self.model, self.optimizer, self.strategy, self.layout.dims)
        general = self.config.general
        formats: Any = {"precision": general.precision, "kernels": general.kernels}
        return footprints(*parts, **formats, pinned=self.pinned)

    def check_backend(self, backend: str, device_type: str) -> None:
        """Raise ConfigError for a backend that lacks messages of this layout for tensors of such devices."""
        if (backend, device_type) == ("gloo", "cuda"):
            optimizer = self.optimizer(_of_one_number(module_of(self.model)))
            gathers = getattr(optimizer, "gathers", False) and self.config.general.offload == "none"
            rows = conflicts.of_gloo(self.strategy, self.layout.dims, self.model, gathers=gathers)
            require(next(conflicts.problems(self.strategy, rows, backend), None))
        general = self.config.general
        if general.kernels == "torch":
            rows = conflicts.of_torch(self.strategy, self.layout.dims, device_type, general.compile)
            require(next(conflicts.problems(self.strategy, rows, general.compile), None))

    @property
    def scales(self) -> bool:
        """Whether losses are scaled."""
        return self.config.general.precision == "fp16"

    def stand_ins(self) -> str | None:
        """Say what of ours is used with ``kernels=torch``, if anything."""
        used = self.strategy.stand_ins(self.layout.dims, scales=self.scales)
        if self.config.general.kernels == "fused" or not used:
            return None
        return f"kernels=torch, except for {', '.join(used)}, where ptdbench's own stands in"

    def imbalance(self) -> str | None:
        """Say which stages of a pipeline have too much of the model, if any, before :meth:`engine`."""
        dims = self.layout.dims
        if dims.pipeline == 1:
            return None
        return imbalance(self.model, split_stages(self.model, self.strategy.stage_ranks(dims)))

    def engine(self, mesh: Mesh, device: torch.device) -> Engine:
        """Lay out the model over the mesh; called in every rank."""
        general, image = self.config.general, first_tensor(self.data.example())
        setting = Setting(
            mesh=mesh,
            layout=self.layout,
            device=device,
            precision=general.precision,
            kernels=general.kernels,
            compile=general.compile,
            activations=self.activations,
            seed=general.seed,
            positions=1 if image.is_floating_point() else image[0].numel(),
            channels_last=image.dim() == 4 and not image.is_contiguous(),
            offload=general.offload,
            virtual=choices.virtual(self.config) is not None,
        )
        module = module_of(self.model)
        modes, saves = Modes(module), self.config.checkpoint.every_steps or general.resume
        is_own = not self.config.call("model").target.startswith("ptdbench.")
        written = observe(module, [], *self.data.example()).weights if saves and is_own else []
        engine = self.strategy(self.model, setting)
        modes.train()
        engine.modes, engine.written = modes, written
        return engine


def build(config: Config, layout: BatchPlan, *, on_gpu: bool, counts: bool) -> TrainingSpec:
    """Build a training run that another process has specified, and laid out like this; nothing is checked again.

    ``on_gpu`` says whether its devices are GPUs, ``counts`` whether this rank needs the model's FLOPs.
    """
    strategy, activations, schedule = (choices.build(config, it) for it in ("parallel", "activations", "lr_schedule"))
    data = _data(config)
    model = _model(config, data.example)
    optimizer = _grouped(config, module_of(model))
    flops, pinned = Flops.of(model) if counts else Flops(), on_gpu and config.general.offload != "none"
    parts = (layout, strategy, activations, model, data, optimizer, schedule)
    return TrainingSpec(config, *parts, model.tied(), pinned, flops)


def specify(
    config: Config, world_size: Callable[[Callable[[int], int]], int], *, nodes: int = 1, on_gpu: bool = False
) -> TrainingSpec:
    """Specify a training run.

    ``world_size`` returns the number of ranks, given the strategy's rule for how many devices to use; ``nodes`` is the
    number of their nodes, and ``on_gpu`` says whether these are GPUs.

    Raises:
        ConfigError: With all problems, as far as one can be checked in the presence of another.
    """
    errors = ErrorCollector()
    errors.catch(lambda: config.train)
    errors.catch(lambda: config.eval)
    strategy: Strategy | None = errors.catch(choices.build, config, "parallel")
    activations: Activations | None = errors.catch(choices.build, config, "activations")
    data: Data | None = errors.catch(_data, config)
    schedule: Schedule | None = errors.catch(_schedule, config)

    def example() -> tuple[Any, Tensor]:
        if data is None:
            raise ConfigError([])  # what is wrong with it is found already
        return data.example()

    def layout() -> BatchPlan:
        assert strategy
        train, size = config.train, world_size(strategy.ranks)
        dims = under("parallel", strategy.dims, size, model, nodes)
        # A micro-batch that must be searched for is not known yet; the search makes its own layouts.
        micro_batch: int | Literal["auto"] = train.micro_batch if isinstance(train.micro_batch, int) else "auto"
        under("train", check_share, dims.batch, train.global_batch, micro_batch)
        return under("parallel", strategy.layout, dims, train.global_batch, micro_batch)

    model = errors.catch(_model, config, example)
    if model and data:
        errors.catch(_check_data, config, model, data, on_gpu)
    if data and (type(data).held_out is Data.held_out or config.call("data").options.get("held_out") == 0):
        errors.catch(_check_evaluation, config)
    optimizer = errors.catch(_optimizer, config, module_of(model) if model else _ANY_MODEL)
    where = errors.catch(layout) if strategy else None
    if strategy:
        if model and where:
            errors.catch(_check_layout, config, strategy, model, where, data)
            errors.catch(strategy.check_option, "compile", config.resolved["compile"], where)
            errors.catch(strategy.check_option, "offload", config.resolved["offload"], where)
        if data and where:
            errors.catch(lambda: under("parallel", strategy.check_sample, *data.example(), where))
        errors.catch(strategy.check_option, "precision", config.resolved["precision"], where)
        if activations and where:
            errors.catch(strategy.check_option, "activations", activations, where)
        if optimizer and model and where:
            errors.catch(lambda: strategy.check_option("optimizer", optimizer(_of_one_number(module_of(model))), where))
    if activations and model:
        errors.catch(lambda: require(*_untreated(config, activations, model)))
    if model and data and strategy and where and activations:
        errors.catch(_check_observed, config, model, data, strategy, where.dims, activations)
    errors.close()
    assert strategy and activations and data and model and where  # noqa: PT018 - one fact
    assert optimizer and schedule  # noqa: PT018
    parts = (where, strategy, activations, model, data, optimizer, schedule)
    return TrainingSpec(config, *parts, model.tied(), pinned=on_gpu and config.general.offload != "none")


def prepare_data(config: Config, data: Data | None = None) -> None:
    """Prepare the data of a configuration once per node, unless already done; ``data`` if already built.

    Raises:
        ConfigError: The data are unusable, or hold out no samples although evaluation is requested.
    """
    data = _data(config) if data is None else data
    under("data", data.prepare)
    if config.eval.every is not None and not data.held_out:
        _check_evaluation(config)


def _check_evaluation(config: Config) -> None:
    """Refuse to evaluate on data without held-out samples."""
    if (interval := config.eval.every) is not None:
        call = config.call("data")
        other = "give data.held_out" if "held_out" in call.options else "data with held-out samples"
        require(Problem("eval.every", interval, f"data={call.name} has no held-out samples", f"try null, or {other}"))


def _data(config: Config) -> Data:
    return adapt(choices.build(config, "data"), config.call("data").target, config.general.seed)


def _schedule(config: Config) -> Schedule:
    schedule: Schedule = choices.build(config, "lr_schedule")
    if not callable(getattr(schedule, "factor", None)):
        remedy = "write it as ptdbench.optim.schedules.Schedule"
        require(Problem("lr_schedule._target_", config.call("lr_schedule").target, "has no factor()", remedy))
    return schedule


def _grouped(config: Config, model: nn.Module) -> MakeOptimizer:
    bound = choices.bound(config, "optimizer", "params")  # first: it is checked whatever else is wrong
    not_decayed = [rule for rule, decays in DECAYED.items() if not decays and config.train.decay == "matrices"]
    return in_groups(bound, model, not_decayed)


def _optimizer(config: Config, model: nn.Module) -> MakeOptimizer:
    """Return the optimizer's factory, after a trial on one-element weights, in which torch checks its options."""
    make = _grouped(config, model)
    tried = choices.guarded("optimizer", make, _of_one_number(model))
    if any(group.get("lr") is None for group in tried.param_groups):
        rule = "has parameter groups without lr, which lr_schedule scales"
        require(Problem("optimizer._target_", config.call("optimizer").target, rule, "give every group an lr"))
    if isinstance(tried, Muon) and "matrices" not in {group["rule"] for group in tried.param_groups}:
        rule = f"is for matrices, and model={config.call('model').name} has none outside embeddings, head and kernels"
        require(Problem("optimizer", config.call("optimizer").name, rule, "try adamw"))
    if tried.defaults.get("fused") and (odd := [name for name, p in model.named_parameters() if p.is_complex()]):
        rule = f"{odd[0]} is complex, and fused kernels take real weights only"
        require(Problem("optimizer.fused", True, rule, "try optimizer.fused=false"))
    is_own = not type(tried).__module__.startswith(("torch.", "ptdbench."))
    if is_own and config.checkpoint.every_steps is not None:
        require(_unsaved(tried))
    return make


def _unsaved(optimizer: torch.optim.Optimizer) -> Problem | None:
    """Return a problem if a step leaves numbers that no checkpoint holds: in a weight's state, or in its group."""
    before = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    with suppress(Exception):  # a user's optimizer may need more for a step, which the memory check refuses
        optimizer.step()
    states = (
        f"{key} as {type(value).__name__}"
        for state in optimizer.state.values()
        for key, value in state.items()
        if not (value is None or isinstance(value, Tensor))
    )
    groups = (
        f"{key} in its parameter groups"
        for earlier, group in zip(before, optimizer.param_groups, strict=True)
        for key, value in group.items()
        if key != "lr" and isinstance(value, int | float) and value != earlier.get(key)
    )
    if (unsaved := next(chain(states, groups), None)) is None:
        return None
    rule = f"keeps {unsaved}, but checkpoints hold only tensors in its state"
    return Problem("optimizer", type(optimizer).__name__, rule, "try adamw, sgd, or checkpoint.every_steps=null")


def _of_one_number(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return one-element weights with the names and the number of dimensions of a model's weights."""
    return [
        (name, nn.Parameter(torch.zeros([1] * weight.dim()), weight.requires_grad))
        for name, weight in model.named_parameters()
    ]


def _model(config: Config, example: Callable[[], tuple[Any, Tensor]]) -> Model:
    call = config.call("model")
    options = {name: value for name, value in call.options.items() if name not in (foreign.PLAN, "criterion")}
    try:
        choices.check(replace(call, options=options), "model", "criterion")
    except ConfigError as error:
        raise _meant_for_another(call, error) from None
    seed = config.resolved["seed"]  # not from config.general, where another option may be wrong
    return choices.guarded("model", foreign.build, call.described, seed=seed, example=example)


def _check_data(config: Config, model: Model, data: Data, on_gpu: bool) -> None:
    """Try the model on two samples, on the meta device if it runs there, where that costs nothing."""
    call, data_call = config.call("model"), config.call("data")
    for name in ("sequence_length", "image_size") if call.target.startswith("ptdbench.") else ():
        size, data_size = call.options.get(name), data_call.options.get(name)
        if None not in (size, data_size) and size != data_size:
            rule = f"must be {size}, that of model={call.name}, for which FLOPs are counted"
            require(Problem(f"data.{name}", data_size, rule, f"try model.{name}={data_size}"))
    error = failure(module_of(model), data.example())
    only_on_gpu = on_gpu and isinstance(error, RuntimeError | AssertionError)  # code for GPUs may run nowhere else
    if error and not only_on_gpu:
        rule = f"does not suit model={call.name}: {first_line(error)}"
        remedy = ""
        if isinstance(model, foreign.Adapted):
            rule += f"; its forward takes {', '.join(model.takes)}"
            names = ("data=synthetic_inputs, or " * ("config" in call.options), "samples that are a dict of these")
            inputs = data.example()[0]
            if len(model.takes) > 1 and not (isinstance(inputs, dict) and {*inputs} <= {*model.takes}):
                remedy = f"try {''.join(names)} by data=custom"
        raise ConfigError([Problem("data", data_call.name, rule, remedy)]) from None


def _check_layout(config: Config, strategy: Strategy, model: Model, layout: BatchPlan, data: Data | None) -> None:
    """Refuse a model that cannot be laid out this way, or whose tensor-parallel plan changes its results."""
    under("parallel", strategy.check, model, layout)
    if layout.dims.tensor == 1 or not isinstance(model, foreign.Adapted) or data is None:
        return
    degree = layout.dims.tensor
    try:
        part = model.shortened()
    except TypeError as error:  # of copy.deepcopy
        difference: str | None = f"the proof needs a copy of it: {first_line(error)}"
    else:
        difference = proof.prove(part, data.example(), divisors(degree)[1]) if part else None
    if difference:
        first = difference.replace(f" {foreign.PREFIX}", " ")
        rule = f"by the plan of model={config.call('model').name}, ranks do not compute what one does: {first}"
        require(Problem("parallel.tensor", degree, rule, "give +model.tp_plan, or try parallel=ddp,fsdp"))


def _untreated(config: Config, activations: Activations, model: Model) -> Iterator[Problem]:
    """Yield what keeps layers from this treatment of activations, and modules of PyTorch that train under no layout."""
    name, inside = config.call("activations").name, {part for layer in model.layers() for part in layer.modules()}
    if activations.after_compilation and config.resolved["compile"] == "whole":
        rule = "handles what each layer has saved at its end, and compile=whole makes one graph of all layers"
        yield Problem("activations", name, rule, "try compile=layers")
    if not isinstance(activations, Keep) and not model.layers():
        rule = f"is applied layer by layer, and model={config.call('model').name} has no layers()"
        yield Problem("activations", name, rule, "try keep")
    for path, part in module_of(model).named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            rule = f"{path} has sparse gradients, which nothing here divides, clips or updates"
            yield Problem("model", config.call("model").name, rule, "give it sparse=False")
        if isinstance(part, nn.RReLU) and part in inside and isinstance(activations, Offload):
            rule = f"{path} draws its noise after autograd has saved it, so that what is copied is not yet there"
            yield Problem("activations", name, rule, "try keep, recompute")


#: What a forward pass may do that excludes some options, in words for messages; see :class:`Observed`.
_OBSERVED = {
    "weights": "the model's forward pass changes weights in place, such as {}",
    "buffers": "the model's forward pass changes buffers, such as {}",
    "overwritten": "the model's forward pass changes buffers in place, such as {}",
    "outside": "the model uses weights of a layer while it does not run, such as {}",
    "bypassed": "the model does not call the layers whose weights it uses, such as {}",
}


def _check_observed(
    config: Config, model: Model, data: Data, strategy: Strategy, dims: Dims, activations: Activations
) -> None:
    """Refuse options that lose or repeat what the forward pass changes, or miss layers that it calls by other means."""
    if config.call("model").target.startswith("ptdbench."):
        return
    general, shards, pipeline = config.general, strategy.shards(dims), strategy.applies("pipeline", dims)
    again, treatment = isinstance(activations, Recompute | Selective), config.call("activations").name
    has_copies = DTYPES[general.precision] != torch.float32 and general.kernels == "fused"
    rows = [
        (shards, "weights", "parallel.shard", strategy.shard, "FSDP drops what it has gathered", "parallel=ddp"),
        (dims.tensor > 1, "weights", "parallel.tensor", dims.tensor, "ranks divide the weights", "parallel=ddp"),
        (pipeline, "weights", "parallel.pipeline", strategy.pipeline, "each stage runs it for each micro-batch",
         "parallel=ddp"),
        (has_copies, "weights", "precision", general.precision, "it has narrow copies of them", "fp32"),
        (again, "weights", "activations", treatment, "it runs again in the backward pass", "keep, offload"),
        (again and bool(general.compile), "buffers", "activations", treatment,
         "a compiled layer runs again on changed ones", "keep, offload, or compile=false"),
        (bool(general.compile), "overwritten", "compile", general.compile,
         "a compiled backward pass may read what it has changed", "self.buffer = self.buffer + 1, or compile=false"),
        (pipeline, "buffers", "parallel.pipeline", strategy.pipeline, "no stage holds them", "parallel=ddp"),
        (shards, "outside", "parallel.shard", strategy.shard, "FSDP has them in shards then",
         "calling layer(x), or parallel=ddp"),
        (not isinstance(activations, Keep), "bypassed", "activations", treatment, "it is applied to calls",
         "calling layer(x), or keep"),
        (general.compile not in (False, "whole"), "bypassed", "compile", general.compile, "calls are compiled",
         "calling layer(x), or whole"),
    ]  # fmt: skip
    if not (affected := [row[1:] for row in rows if row[0]]):
        return
    observed, problems = observe(module_of(model), model.layers(), *data.example()), []
    for kind, option, value, why, other in affected:
        names: Sequence[str] = getattr(observed, kind)
        if name := next((name for name in names if _matters(model, kind, name, option)), None):
            shown = name.removeprefix(foreign.PREFIX)
            problems.append(Problem(option, value, f"{_OBSERVED[kind].format(shown)}, and {why}", f"try {other}"))
    require(*problems)


def _matters(model: Model, kind: str, name: str, option: str) -> bool:
    """Return whether an option affects a tensor that a pass changes: ``max_norm`` may be applied again, for one."""
    owner = module_of(model).get_submodule(name.rpartition(".")[0])
    is_in = {layer for layer in model.layers() if owner in set(layer.modules())}
    if kind == "weights" and option in ("parallel.pipeline", "activations"):
        return getattr(owner, "max_norm", None) is None and (option == "parallel.pipeline" or bool(is_in))
    if kind == "buffers" and option == "parallel.pipeline":
        parts = [module for key, part in (model.parts() or {}).items() for module in members(key, part).values()]
        return not any(owner in set(part.modules()) for part in parts)
    return kind != "buffers" or bool(is_in)  # only layers are recomputed


def _meant_for_another(call: Call, error: ConfigError) -> ConfigError:
    """Add an explanation to the problems of a user's model that was given another model's options."""
    is_named = any(problem.option == "model.name" for problem in error.problems)  # the name itself is the problem
    if call.target.startswith("ptdbench.") or call.is_custom or is_named:
        return error
    rule = f"does not go with the options of model={call.name}"
    remedy = f"try model=custom model._target_={call.target}, which has no options but those you add"
    return ConfigError([*error.problems, Problem("model._target_", call.target, rule, remedy)])
