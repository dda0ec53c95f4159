"""The type of ``parallel=<preset>``: splits ranks, batch and model by its options, and lays the model out."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from ptdbench.models.protocol import Model, module_of
from ptdbench.parallel import conflicts, context, experts, pipeline_stages
from ptdbench.parallel.apply import apply
from ptdbench.parallel.compile import start_afresh
from ptdbench.parallel.dims import BatchPlan, Dims, auto_degrees, derive, sizes_by_node
from ptdbench.parallel.engine import Accumulating, Engine
from ptdbench.parallel.options import Options, Setting
from ptdbench.parallel.pipeline_engine import Pipelined
from ptdbench.problems import at_least, require


@dataclass(frozen=True)
class Strategy(Options):
    """Lays out a model over the ranks.

    Raises:
        ConfigError: With every invalid option.
    """

    def __post_init__(self) -> None:
        typed = {name: degree for name, degree in self.degrees().items() if isinstance(degree, int)}
        require(
            *at_least(1, **typed, prefetch=self.prefetch),
            *conflicts.problems(self, conflicts.of_values(self)),
            *conflicts.problems(self, conflicts.of_degrees(self)),
        )

    def ranks(self, available: int) -> int:
        """Return the number of ranks if the config does not set it: as many available devices as fit the degrees."""
        wanted = self.degrees() | ({"replicate": 2} if self.replicate == "node" else {})
        fixed = Dims(**{name: degree for name, degree in wanted.items() if isinstance(degree, int)}).world_size
        return max(available // fixed, 1) * fixed if auto_degrees(self.degrees()) else fixed

    def dims(self, world_size: int, model: Model | None = None, nodes: int = 1) -> Dims:
        """Derive the degrees for ranks on ``nodes``; an ``auto`` expert degree and ``node`` degrees need ``model``.

        Raises:
            ConfigError: The degrees do not multiply to the world size.
        """
        units = {"expert": experts.units(model)} if model and self.expert == "auto" else {}
        wanted = self.degrees()
        for name in [name for name in Dims.order() if wanted[name] == "node"]:
            sizes = sizes_by_node(name, world_size, wanted, nodes)
            typed = {other: degree for other, degree in wanted.items() if isinstance(degree, int)}
            fits = (size for size in sizes if not model or conflicts.divides(self, model, Dims(**typed | {name: size})))
            wanted[name] = next(fits, sizes[-1])
        return derive(world_size, wanted, units=units)

    def layout(self, dims: Dims, global_batch: int, micro_batch: int | Literal["auto"]) -> BatchPlan:
        """Split a global batch, a multiple of the number of replicas, over the ranks.

        ``micro_batch``, the samples of one pass, divides a replica's share; ``auto``: no accumulation.

        Raises:
            ConfigError: An option does not fit the batch.
        """
        share = global_batch // dims.batch
        if self.applies("pipeline", dims):
            plan = pipeline_stages.divide_batch(self, dims, global_batch, share, micro_batch)
        else:
            size = share if micro_batch == "auto" else micro_batch
            plan = BatchPlan(dims, global_batch, size, accumulation=share // size)
        require(*conflicts.problems(self, conflicts.of_layout(self, plan, micro_batch), plan=plan))
        return plan

    def check(self, model: Model, layout: BatchPlan) -> None:
        """Raise ConfigError for a model that cannot be laid out this way."""
        require(*conflicts.problems(self, conflicts.of_model(self, model, layout.dims), plan=layout))

    def check_sample(self, inputs: Any, targets: Tensor, layout: BatchPlan) -> None:
        """Raise ConfigError if samples, ``[batch, length]``, cannot be split this way."""
        require(*conflicts.problems(self, conflicts.of_sample(self, inputs, targets, layout.dims), plan=layout))

    def check_option(self, option: str, value: object, layout: BatchPlan | None = None) -> None:
        """Raise ConfigError if the value of an option outside ``parallel`` conflicts with these options."""
        rows = conflicts.of_option(self, layout, option, value)
        require(next(conflicts.problems(self, rows, value), None))

    def __call__(self, model: Model, setting: Setting) -> Engine:
        """Lay the model out; called in every rank."""
        start_afresh(setting.compile)
        if setting.device.type == "cuda":
            # cuDNN, or MIOpen on AMD GPUs, times its convolution algorithms for each shape and keeps the fastest. It
            # pays off as a run has few shapes: of training, of evaluation and of its last batch.
            has_convolutions = any(isinstance(part, _ConvNd) for part in module_of(model).modules())
            torch.backends.cudnn.benchmark = has_convolutions
        engine: Engine
        if self.applies("pipeline", setting.layout.dims):
            engine = Pipelined(model, setting, self)
        else:
            part = apply(model, module_of(model), setting, self)
            engine = Accumulating(part, setting.layout.micro_batch, owns_loss=setting.owns_loss)
        mesh = setting.mesh["cp"]
        return context.Sliced(engine, mesh, self.context_method) if mesh else engine
