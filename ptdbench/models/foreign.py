"""Your own ``nn.Module`` as a model of ptdbench.

Any module works whose ``forward`` takes the inputs of the data as they are: a tensor, the tensors of a tuple as
positional arguments, or those of a dict as keyword arguments. It returns a tensor, or an object or dict with ``logits``
or ``loss``, as in Hugging Face transformers. Their ``labels`` are used only if the data give them: they would shift
targets that are already the next tokens.

Buffers, counters and lists in attributes may change in ``forward``, once per micro-batch. Trials, rehearsals and
evaluations leave them unchanged, and recomputation starts from what the forward pass had; a resumed run has its
buffers, but not what is counted in Python. Parts that the constructor puts into ``eval()`` stay there, and an
overridden ``train()`` is called under every layout. ``forward`` may change weights in place, as a momentum encoder
does, under ``single`` and ``ddp`` in fp32, and buffers without ``compile``; elsewhere, where such a change would be
lost or repeated, it is refused, and so are layers that are not called as ``layer(x)``, if that matters.

The module may define these methods, all optional:

``loss(outputs, targets)``
    The mean loss, a scalar; ``model.criterion`` of the configuration replaces it. Default: cross entropy for integer
    targets, mean squared error for floating-point ones. A module whose ``forward`` takes ``targets`` returns the loss
    itself: alone, in a tuple with outputs, or as ``.loss``. Evaluation uses the same loss; it measures accuracy only if
    ``forward`` returns outputs without ``targets``.
``layers()``
    The repeated blocks, a list of modules (an attribute that is a ``ModuleList`` will do): the units of sharding
    (fsdp), recomputation and compilation. Default: the members of the longest ``ModuleList`` or ``Sequential`` of one
    class, and all others of that class; without one, fsdp shards the module as a whole.
``parts()``
    The module as an ordered chain, a dict from the full name of each submodule to the submodule; ``forward`` then takes
    ``targets``, and so does the last part. Default: the members of an ``nn.Sequential``; otherwise what comes before
    the repeated blocks, each block and what follows (``ptdbench.models.stages``).
``tied()``
    Pairs of full parameter names in different parts that are one weight. Default: parameters that are one object.
``roles()``
    The roles of modules under tensor or context parallelism, a dict from full name to
    :class:`ptdbench.models.protocol.Role`, or only to its kind, such as ``colwise`` or ``rowwise``. Default: by the
    option ``model.tp_plan``, or transformers' plan of the class, or by structure (``ptdbench.models.plans``).
``train_flops()``
    FLOPs of forward and backward pass for one sample, a dict by part. Default: counted on the meta device, including
    what the module itself recomputes; ``activations=recompute`` is not counted.
``masked_flops()``
    The part of these FLOPs that causal attention masks, or ``None``. Default: half of the products in modules whose
    ``is_causal`` is true, as in Hugging Face's; unknown if other modules multiply batches of matrices, or if the module
    defines ``train_flops()``.
``reset(name, tensor, generator)``
    Fills one parameter or buffer in place with its initial value. With it the module is built on the meta device, and
    may exceed a machine's memory; without it each rank builds the whole module in host memory, under the run's seed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import hydra
import torch
from torch import Generator, Tensor, nn
from torch.nn.parameter import is_lazy

from ptdbench.models import plans
from ptdbench.models.flops import Flops, count_train_flops
from ptdbench.models.protocol import FlopsUnknown, Model, Role, Runs, default_loss, module_of
from ptdbench.models.stages import NoStages, Stages
from ptdbench.models.state import failure, widen_scalars
from ptdbench.problems import Problem, first_line, require

Example = tuple[Any, Tensor]

PREFIX = "module."

#: The option of a model that is no argument of its constructor.
PLAN = "tp_plan"


def build(config: Mapping[str, Any], *, seed: int, example: Callable[[], Example]) -> Model:
    """Build the model that ``config`` describes: on the meta device if it has ``reset``, else with its weights.

    Args:
        config: A class or function under ``_target_``, and its arguments; under ``tp_plan`` a plan, see
            ``ptdbench.models.plans``; under ``criterion`` the loss, unless it is one of the arguments.
        seed: The run's seed, for a module whose constructor initializes it.
        example: ``(inputs, targets)`` of one sample on the meta device; see ``Data.example``.

    Raises:
        hydra.errors.InstantiationException: The constructor raised; the cause is its exception.
        ConfigError: A weight is not fp32, or has no shape yet.
    """
    plan, config = config.get(PLAN), {name: value for name, value in config.items() if name != PLAN}
    target = hydra.utils.get_object(config["_target_"])
    criterion = None
    if "criterion" in config and "criterion" not in inspect.signature(target).parameters:
        criterion = hydra.utils.instantiate(config["criterion"])
        config = {name: value for name, value in config.items() if name != "criterion"}
    if callable(getattr(target, "reset", None)):
        with torch.device("meta"):
            module = hydra.utils.instantiate(config)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = hydra.utils.instantiate(config)
    for name, weight in module.named_parameters():
        if is_lazy(weight):
            rule = f"{name} is lazy: its shape is unknown until the first samples, but needed before"
            require(Problem("_target_", config["_target_"], rule, "replace lazy modules: nn.LazyLinear by nn.Linear"))
        if weight.is_floating_point() and weight.dtype != torch.float32:
            dtype = str(weight.dtype).removeprefix("torch.")
            loads = config["_target_"].endswith(".from_pretrained")  # transformers loads in the dtype of the file
            remedy = "try +model.dtype=float32" if loads else "return it as .float()"
            rule = f"{name} is {dtype}, but weights must be fp32 under every precision"
            require(Problem("_target_", config["_target_"], rule, remedy))
    if plan is not None and hasattr(module, "roles"):
        require(Problem(PLAN, plan, "the class says by roles() what ranks split", "omit it"))
    if plan is not None:
        plans.expand(module, plan)
    model = adapt(module, example, plan)
    if criterion is not None:
        if not isinstance(model, Adapted) or model.loss is None:
            rule = f"{type(module).__name__} computes its loss itself"
            require(Problem("criterion", type(criterion).__name__, rule, "omit it"))
        model.__dict__["criterion"] = criterion
    widen_scalars(module_of(model), example)
    return model


def adapt(module: nn.Module, example: Callable[[], Example], plan: Mapping[str, str] | None = None) -> Model:
    """Return ``module`` itself if it implements the protocol :class:`Model`, else a wrapper that does."""
    if plan is None and not hasattr(module, "roles"):  # optional, even if all other methods exist
        module.roles = dict  # type: ignore[assignment]
    return module if isinstance(module, Model) else Adapted(module, example, plan)


class Adapted(nn.Module):
    """A wrapper with defaults for the protocol methods that a module does not define; names begin with ``module.``."""

    unsplit: str | None = None  #: Why the module has no :meth:`parts`; set once they are requested.
    undivided: str | None = None  #: Why the module has no roles; set once they are requested.

    def __init__(
        self, module: nn.Module, example: Callable[[], Example], plan: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training  # as the constructor left it, see :class:`ptdbench.models.state.Modes`
        self._example = example
        self.__dict__["criterion"] = None  # the loss of outputs and targets that is given; no part of the module
        self._plan = plan or getattr(module, "_tp_plan", None)  # Hugging Face
        takes = inspect.signature(module.forward).parameters
        self.takes = [*takes]  #: Names of what its forward takes.
        self._takes_targets = "targets" in takes
        #: See :func:`ptdbench.models.protocol.only_loss`.
        self.only_loss = self._takes_targets and takes["targets"].default is inspect.Parameter.empty
        name = getattr(module, "main_input_name", None)  # Hugging Face
        self._input_name = name if name in takes else None
        # A cache is for generation; contrastive models compute their loss on request.
        options = {"use_cache": False, "return_loss": True}
        self._options = {name: value for name, value in options.items() if name in takes}

    def forward(self, inputs: Any, targets: Tensor | None = None) -> Tensor:
        """Return the module's outputs, or with ``targets`` its mean loss in fp32."""
        return self._run(self.module, inputs, targets)

    def _run(self, module: nn.Module, inputs: Any, targets: Tensor | None) -> Tensor:
        """Run a module with the signature of this one."""
        if self._takes_targets and targets is not None:
            returned = _alone(self._call(module, inputs, targets=targets), lambda output: output.dim() == 0)
            loss = returned if isinstance(returned, Tensor) else _part(returned, "loss")
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(returned).__name__
                rule = "must return the mean loss, a scalar, or an object with .loss"
                raise TypeError(f"{type(self.module).__name__}.forward(inputs, targets) {rule}, but returns {kind}")
            return _scalar(loss)
        return self._finish(self._call(module, inputs), targets)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """See :func:`ptdbench.models.protocol.loss_of_outputs`."""
        return None if self._takes_targets else self._finish

    def layers(self) -> list[nn.Module]:
        """Return the module's own blocks, else its repeated ones, see :func:`repeated`."""
        layers: Any = getattr(self.module, "layers", None)
        if inspect.ismethod(layers):
            return list(layers())
        if isinstance(layers, nn.ModuleList | nn.Sequential | list | tuple):
            return list(layers)
        return list(repeated(self.module).values())

    def parts(self) -> dict[str, nn.Module] | None:
        """Return the module's own chain, else pieces found by trial passes; ``None``: none, see ``unsplit``."""
        parts = self._method("parts")
        if parts:
            return _prefixed(parts())
        return self._stages.parts(self.module, PREFIX) if self._stages else None

    def runner(self, names: Sequence[str]) -> Runs | None:
        """See :func:`ptdbench.models.protocol.runner`."""
        if self._method("parts") or not self._stages:
            return None
        start = [*self._stages.parts(self.module, PREFIX)].index(names[0])
        return self._stages.runner(self.module, range(start, start + len(names)), self._run, PREFIX)

    @cached_property
    def _stages(self) -> Stages | None:
        try:
            return Stages(self.module, self.layers(), self._run, self._example())
        except NoStages as reason:
            self.unsplit = str(reason)
            return None

    def _call(self, module: nn.Module, inputs: Any, **options: Any) -> Any:
        options |= self._options
        if self._input_name and isinstance(inputs, Tensor):
            inputs = {self._input_name: inputs}
        if isinstance(inputs, Mapping):
            return module(**inputs, **options)
        return module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **options)

    def _finish(self, returned: Any, targets: Tensor | None) -> Tensor:
        """Convert what the module returned to the outputs, or with targets to the loss."""
        returned = _alone(returned, lambda output: output.dim() > 0)
        outputs = returned if isinstance(returned, Tensor) else _part(returned, "logits")
        has_targets = targets is not None and targets.shape[1:] != (0,)
        if targets is not None and (outputs is None or not has_targets):
            loss = returned if isinstance(returned, Tensor) and returned.numel() == 1 else _part(returned, "loss")
            if loss is not None:
                return _scalar(loss)
            if not has_targets:
                raise TypeError("there are no targets, and forward() returns no loss, a scalar or an object with .loss")
        if outputs is None:
            kind = type(returned).__name__
            raise TypeError(f"forward() must return a tensor, or an object with .logits or .loss, but returns {kind}")
        if targets is None:
            return outputs
        if outputs.is_floating_point():
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        criterion = self.__dict__["criterion"] or getattr(self.module, "loss", default_loss)
        return _scalar(criterion(outputs, targets))

    def roles(self) -> dict[str, Role]:
        """Return the roles that the module names, else those by a plan or by structure; empty: see ``undivided``."""
        return _prefixed(roles() if (roles := self._method("roles")) else self._planned)

    def shortened(self) -> Adapted | None:
        """Return a copy to prove its plan; ``None``: it names its roles itself.

        It has the first of equal blocks in each list, or all if the module counts them.
        """
        if self._method("roles"):
            return None
        example, blocks, lists = self._example(), {*self.layers()}, dict[nn.Module, Any]()
        for part in self.module.modules():
            if isinstance(part, nn.ModuleList | nn.Sequential) and blocks.issuperset(part.children()):
                lists[part] = part._modules
                first = {str(child): name for name, child in reversed(part._modules.items())}.values()
                part._modules = {name: child for name, child in lists[part].items() if name in first}
        try:
            short = Adapted(copy.deepcopy(self.module), lambda: example, self._plan)
        finally:
            for part, modules in lists.items():
                part._modules = modules
        return Adapted(copy.deepcopy(self.module), lambda: example, self._plan) if failure(short, example) else short

    @cached_property
    def _planned(self) -> dict[str, Role]:
        """Roles by a plan, computed before a layout replaces the layers."""
        example = self._example()
        try:
            kinds = plans.expand(self.module, self._plan or {}, in_part=True)
            roles = plans.roles(self, example, _prefixed(kinds))
            return {name.removeprefix(PREFIX): role for name, role in roles.items()}
        except ValueError as reason:
            self.undivided = first_line(reason)
            return {}

    def train_flops(self) -> dict[str, float]:
        """Return the module's own figures, else PyTorch's count for one sample, under the key ``module``.

        Raises:
            FlopsUnknown: The module does not run on the meta device, where FLOPs are counted.
        """
        train_flops = self._method("train_flops")
        return _prefixed(train_flops()) if train_flops else {"module": self._flops.total}

    def flops_of_modules(self) -> Mapping[str, float]:
        """Return the FLOPs of the forward pass for one sample by full name of a module; empty if they are unknown."""
        try:
            return self._flops.of_modules
        except FlopsUnknown:
            return {}

    def masked_flops(self) -> float | None:
        """Return the module's own figure, else a count, unless the module defines ``train_flops()``."""
        if masked_flops := self._method("masked_flops"):
            return masked_flops()
        return None if self._method("train_flops") else self._flops.masked

    @cached_property
    def _flops(self) -> Flops:
        return count_train_flops(self, *self._example())

    def tied(self) -> list[tuple[str, str]]:
        """Return the tied weights that the module names, else those that are one object."""
        tied = self._method("tied")
        return [(PREFIX + first, PREFIX + second) for first, second in (tied() if tied else self._same)]

    @cached_property
    def _same(self) -> list[tuple[str, str]]:
        """Names of parameters that are one object, computed before sharding replaces the weights."""
        first: dict[nn.Parameter, str] = {}
        named = self.module.named_parameters(remove_duplicate=False)
        return [(first[weight], name) for name, weight in named if first.setdefault(weight, name) != name]

    def reset(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Let the module fill one of its tensors; raise NotImplementedError if it has no ``reset``."""
        reset = self._method("reset")
        if reset is None:
            raise NotImplementedError(f"{type(self.module).__name__} has no reset() to fill {name} with")
        reset(name.removeprefix(PREFIX), tensor, generator)

    def _method(self, name: str) -> Callable[..., Any] | None:
        """Return the module's method of that name; a submodule does not count."""
        attribute = getattr(self.module, name, None)
        return attribute if inspect.ismethod(attribute) else None


def repeated(module: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a module, by name.

    Blocks are the members of the longest ``ModuleList`` or ``Sequential`` of one class whose members consist of several
    modules, of others whose members repeat each other, as in a decoder, and of shorter lists of these classes, as in a
    ResNet. Lists within a block, such as heads and experts, do not count: their members need not run on every rank.
    """
    lists = {
        part: list(part.children())
        for part in module.modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len({type(child) for child in part.children()}) == 1
    }
    within = {
        part for children in lists.values() if _are_blocks(children) for child in children for part in child.modules()
    }
    outer = [children for part, children in lists.items() if part not in within and len(children) > 1]
    of_several = [children for children in outer if list(children[0].children())]
    if not of_several:
        return {}
    longest = max(of_several, key=len)
    # An encoder's and a decoder's blocks are of two classes.
    kinds = {type(children[0]) for children in of_several if children is longest or _are_blocks(children)}
    of_kind = {child for children in lists.values() for child in children if type(child) in kinds}
    blocks: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        if part in of_kind and not any(name.startswith(f"{around}.") for around in blocks):
            blocks[name] = part
    return blocks


def _are_blocks(members: Sequence[nn.Module]) -> bool:
    """Whether members of a list repeat each other, unlike the stages of an image network, which grow wider."""
    shapes = {tuple(weight.shape for weight in member.parameters()) for member in members}
    return len(shapes) < len(members) and type(members[0]) not in (nn.ModuleList, nn.Sequential)


def _scalar(loss: Tensor) -> Tensor:
    """Return a loss in fp32, and of shape ``(1,)`` as a scalar; not as a view, which FSDP warns about."""
    return loss.float().sum() if loss.dim() and loss.numel() == 1 else loss.float()


def _part(returned: Any, name: str) -> Any:
    """Return an attribute of an object, or an item of a mapping; ``None`` if it has none."""
    return returned.get(name) if isinstance(returned, Mapping) else getattr(returned, name, None)


def _alone(returned: Any, fits: Callable[[Tensor], bool]) -> Any:
    """Return the only tensor of a tuple that fits, such as the loss; else what was returned."""
    alone = [out for out in returned if isinstance(out, Tensor) and fits(out)] if isinstance(returned, tuple) else []
    return alone[0] if len(alone) == 1 else returned


def _prefixed(by_part: Mapping[str, Any]) -> dict[str, Any]:
    return {PREFIX + name: value for name, value in by_part.items()}
