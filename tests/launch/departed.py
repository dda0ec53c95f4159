"""A model that finds out whether those of earlier runs are gone: ``model._target_=tests.launch.departed.Departed``."""

import weakref
from itertools import count

from torch import Generator, Tensor, nn

from ptdbench.models.toy import Toy

#: Modules and weights that the runs of this process have computed with, by the number of the run's model.
_used: dict[int, list[weakref.ref[object]]] = {}

_numbers = count()


class Departed(Toy):
    """Toy, whose weights are not materialized while anything of an earlier run's model is alive."""

    def __init__(self) -> None:
        super().__init__(inputs=8, width=8, outputs=4, layers=4)
        self.number = next(_numbers)
        for layer in self.chain:
            layer.register_forward_pre_hook(self._note)

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Raise RuntimeError if an earlier model is alive, at the first weight of this one."""
        alive = [number for number, things in _used.items() if any(thing() is not None for thing in things)]
        if alive and alive != [self.number]:
            raise RuntimeError(f"the weights of model {self.number} are made while these are alive: {alive}")
        super().reset(name, tensor, generator)

    def _note(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not inputs[0].is_meta:
            _used.setdefault(self.number, []).extend(weakref.ref(thing) for thing in (layer, *layer.parameters()))
