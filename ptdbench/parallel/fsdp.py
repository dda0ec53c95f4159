"""FSDP2: weights, gradients and optimizer state in shards; each layer is gathered just before it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ptdbench.models.protocol import Model, module_of
from ptdbench.parallel.engine import Accumulating, Engine, Setting
from ptdbench.parallel.layout import Layout, arrange
from ptdbench.parallel.precision import DTYPES
from ptdbench.parallel.sync_batchnorm import synchronise_batchnorm
from ptdbench.problems import Problem, require


class Sharded(Accumulating):
    """The engine of a sharded model."""

    def outputs(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`ptdbench.parallel.engine.Engine.outputs`; every weight is in shards again afterwards.

        With ``reshard_after_forward=False`` a backward pass would see to that, and here is none: what comes next,
        another step or a checkpoint, would meet whole weights that nobody brings up to date.
        """
        try:
            return super().outputs(inputs, targets)
        finally:
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()


@dataclass(frozen=True)
class FSDP:
    """Options of ``fully_shard``.

    Attributes:
        reshard_after_forward: Free a layer's gathered weights after its forward pass and gather them again for
            the backward pass (ZeRO-3); false keeps them in between (ZeRO-2): more memory, less traffic.
        reduce_dtype: Format in which gradients are reduced; ``auto``: fp32, also where the arithmetic is narrower.
        sync_batchnorm: Normalise over the whole global batch instead of over each rank's share.
    """

    reshard_after_forward: bool = True
    reduce_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    sync_batchnorm: bool = False

    def ranks(self, available: int) -> int:
        """How many of the available devices a run takes where its config does not say."""
        return available

    def layout(self, world_size: int, global_batch: int, micro_batch: int | Literal["auto"]) -> Layout:
        """Every rank takes its share of the batch; raises ConfigError where the batch does not divide."""
        return arrange(world_size, global_batch, micro_batch)

    def check(self, model: Model, where: Layout) -> None:
        """Raises ConfigError for a weight that is shared between layers; without layers a model is sharded as one."""
        layers = set(model.layers())
        units = [f"{name}." for name, part in module_of(model).named_modules() if part in layers]
        first: dict[nn.Parameter, tuple[str, str | None]] = {}
        for name, weight in module_of(model).named_parameters(remove_duplicate=False):
            unit = next((unit for unit in units if name.startswith(unit)), None)
            other, other_unit = first.setdefault(weight, (name, unit))
            if unit != other_unit:
                rule = f"{other} and {name} are one weight, and fully_shard wants it in one layer"
                require(Problem("parallel", "fsdp", rule, "try parallel=ddp"))

    def __call__(self, model: Model, setting: Setting) -> Engine:
        """Shard the model over the mesh, layer by layer."""
        mesh, module = setting.mesh["data"], module_of(model)
        if self.sync_batchnorm:
            synchronise_batchnorm(module, mesh.get_group(), setting.device)
        layers = model.layers()
        setting.dress(layers)
        names = {part: name for name, part in module.named_modules()}
        # One layer after the other is given its weights and cut up, so that never more than one is whole here.
        for layer in layers:
            setting.fill(model, layer, f"{names[layer]}.")
            self._shard(layer, mesh, setting)
        # What is left, embedding and head, forms one group of its own: it is gathered first and freed last.
        setting.fill(model, module)
        sharded = self._shard(module, mesh, setting)

        @contextmanager
        def bracket(last: bool) -> Iterator[None]:
            sharded.set_requires_gradient_sync(last)
            yield

        return Sharded(module, setting.layout.micro_batch, bracket)

    def _shard(self, module: nn.Module, mesh: DeviceMesh, setting: Setting) -> FSDPModule:
        narrow = setting.precision != "fp32"
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[setting.precision] if narrow else None,
            reduce_dtype=DTYPES["fp32" if self.reduce_dtype == "auto" else self.reduce_dtype] if narrow else None,
        )
        return fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
