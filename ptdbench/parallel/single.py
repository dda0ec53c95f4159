"""One rank and no communication: the reference that every other strategy is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ptdbench.models.protocol import Model, module_of
from ptdbench.parallel.engine import Accumulating, Engine, Setting
from ptdbench.parallel.layout import Layout, arrange
from ptdbench.parallel.precision import autocast_forward
from ptdbench.problems import Problem, require


@dataclass(frozen=True)
class Single:
    """The model as it is, on one rank."""

    def ranks(self, available: int) -> int:
        """How many of the available devices a run takes where its config does not say."""
        return 1

    def layout(self, world_size: int, global_batch: int, micro_batch: int | Literal["auto"]) -> Layout:
        """One replica, one rank.

        Raises:
            ConfigError: There is more than one rank.
        """
        if world_size != 1:
            rule = f"runs on one rank, and there are {world_size}"
            require(Problem("parallel", "single", rule, "try cluster.ranks_per_node=1, or parallel=ddp"))
        return arrange(1, global_batch, micro_batch)

    def check(self, model: Model, where: Layout) -> None:
        """Every model will do."""

    def __call__(self, model: Model, setting: Setting) -> Engine:
        """Give the model its weights and its number format."""
        module = module_of(model)
        setting.fill(model, module)
        setting.fit(module)
        setting.dress(model.layers())
        autocast_forward(module, setting.precision, setting.device.type)
        return Accumulating(module, setting.layout.micro_batch)
