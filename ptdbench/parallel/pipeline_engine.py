"""The engine of a pipeline: stages on different ranks, driven by a schedule; absent neighbors are simulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ptdbench.launch import collect
from ptdbench.measure import memory
from ptdbench.models.protocol import Model, members, module_of
from ptdbench.models.state import ModuleState
from ptdbench.parallel.apply import Setting, apply
from ptdbench.parallel.engine import Engine, Scale, norm_of
from ptdbench.parallel.options import Options
from ptdbench.parallel.pipeline_stages import Stage, StageSplit, add_up_shared, find_shared, split_stages, untie
from ptdbench.parallel.precision import DTYPES


class _InferringStage(PipelineStage):
    """A stage that always infers shapes in its first pass, and leaves its module unchanged.

    torch infers them by running the stage; since 2.14 also backward, until which buffers cannot be restored.
    """

    def _prepare_forward_infra(self, *arguments: Any, **options: Any) -> Any:
        devices = [self.device] if self.device.type == "cuda" else []
        self._before = ModuleState(self.submod)
        with torch.random.fork_rng(devices):
            inferred = super()._prepare_forward_infra(*arguments, **options)
        if not hasattr(PipelineStage, "_post_metadata_inference_cleanup"):
            self._before.restore()
        return inferred

    def _post_metadata_inference_cleanup(self) -> None:
        """Restore the module after torch 2.14 has inferred the shapes of both passes."""
        super()._post_metadata_inference_cleanup()  # type: ignore[misc]
        self._before.restore()

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        """Vote for shape inference, under torch 2.14: virtual GPUs would not compute the product of all votes."""
        super()._warmup_forward_vote(has_backward, received_acc)  # type: ignore[misc]
        return torch.tensor([0], dtype=torch.int32, device=self.device)


class LoneStage(_InferringStage):
    """A stage that infers shapes without its neighbors, on a virtual device that discards its messages."""

    #: What the previous stage would send for a micro-batch, on the meta device; ``None`` for the first stage.
    arriving: Tensor | None = None

    def _recv_meta(self, src_stage: int) -> Any:
        """Return the shapes that the neighbor would send, as torch 2.14 requests them."""
        from torch.distributed.pipelining import _utils

        if src_stage > self.stage_index:  # the gradients of what this stage sends
            assert self._stage_meta.outputs is not None
            return _utils._StageBackwardMeta(_utils._derive_grad_metas(self._stage_meta.outputs))
        assert self.arriving is not None
        metas = _utils.extract_tensor_metas((self.arriving,))
        assert metas is not None
        return _utils._StageForwardMeta(metas)

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Send nothing: the neighbor is absent."""

    def _shape_inference(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """Infer shapes under torch 2.11 as if the previous stage were on this rank: its output is then an argument."""
        places = self.stage_index_to_group_rank
        if self.arriving is not None:
            args = (self.arriving,)
            self.stage_index_to_group_rank = {**places, self.stage_index - 1: self.group_rank}
        try:
            return super()._shape_inference(args, kwargs)  # type: ignore[misc, no-any-return]
        finally:
            self.stage_index_to_group_rank = places


def without_weights(model: Model) -> Model:
    """Copy a model that is not yet laid out, with weights on the meta device."""
    weights: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        for weight in module_of(model).parameters()
    }
    return deepcopy(model, weights)


def arriving(
    model: Model, names: Sequence[str], inputs: Tensor, dtype: torch.dtype, shares: int, *, autocasts: bool = False
) -> Tensor:
    """Predict, on the meta device, what the model's first parts, with these names, would send for a micro-batch.

    The model's weights are on the meta device. ``shares``: the number of ranks that split the positions.
    ``autocasts``: torch casts to ``dtype`` where it chooses, which it does on a real or virtual device only.
    """
    with torch.no_grad(), torch.autocast(inputs.device.type, dtype, enabled=autocasts):
        try:
            if autocasts:
                raise RuntimeError
            batch, *rest = _through(deepcopy(model), names, torch.empty_like(inputs, device="meta")).shape
        except RuntimeError:  # a part reads values, as transformers' masks do: on a virtual GPU they are zeros
            sent = _through(deepcopy(model), names, inputs)
            (batch, *rest), dtype = sent.shape, sent.dtype if autocasts else dtype
            memory.release(inputs.device)
    if shares > 1:
        rest[0] //= shares
    return torch.empty(batch, *rest, dtype=dtype, device="meta", requires_grad=True)


def _through(model: Model, names: Sequence[str], hidden: Tensor) -> Tensor:
    """Return a tensor after the parts with these names; each has weights on its device meanwhile."""
    parts = model.parts() or {}
    for name in names:
        held = members(name, parts[name]).values()
        for module in held:
            module.to_empty(device=hidden.device)
        hidden = parts[name](hidden)
        for module in held:
            module.to("meta")
    return hidden


#: torch's options, by what gets its own communicator: each pair of ranks and direction (since 2.15), or each direction
#: (2.14).
_OPTIONS = {"edges": "pipeline_per_edge_p2p", "directions": "pipeline_per_direction_p2p"}


def open_links(group: dist.ProcessGroup, device: torch.device) -> str:
    """Let torch open separate communicators, so that messages in one direction do not wait for the other.

    NCCL runs the operations of one communicator in the order of its calls. Activations and gradients on one link would
    be serialized, and may deadlock under schedules with several stages per rank (``torch.distributed.config``). Call
    this before stages are created, as they open the communicators.

    Returns:
        The kind of links, for the record: ``messages``, independent ones, as under gloo; ``edges`` or ``directions``,
        a communicator each; or, with NCCL under torch before 2.14, ``one``.
    """
    if device.type != "cuda" or "nccl" not in dist.get_backend_config(group):
        return "messages"
    from torch.distributed import config

    links = next((name for name, option in _OPTIONS.items() if hasattr(config, option)), "one")
    if links in _OPTIONS:
        setattr(config, _OPTIONS[links], True)
    if links == "directions" and not collect.all_ranks_present():
        from torch.distributed.pipelining.stage import _PP_DIRECTION_GROUP_CACHE

        # torch would split the group, which needs all of its ranks.
        ranks = dist.get_process_group_ranks(group)
        groups: Any = (dist.new_group(ranks), dist.new_group(ranks))
        _PP_DIRECTION_GROUP_CACHE[group] = groups
    return links


#: The dtypes that a stage may send, encoded by their index.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_MOST_DIMENSIONS = 8


class Pipelined(Engine):
    """The engine of a pipeline: a schedule and this rank's stages, each laid out over its replicas or shards."""

    def __init__(self, model: Model, setting: Setting, options: Options) -> None:
        layout, device, schedule = setting.layout, setting.device, options.pipeline_schedule
        #: A copy of the model to predict what arrives, if the previous stages are absent.
        self._whole = None if collect.all_ranks_present() else without_weights(model)
        mesh = setting.mesh["pp"] or setting.mesh.dp  # of one rank for a pipeline of one stage
        group = mesh.get_group()
        split = split_stages(model, options.stage_ranks(layout.dims))
        tied = model.tied()  # before sharding and untying replace the weights, which a model may compare
        untie(model, tied, split)
        last, named = len(split.stages) - 1, model.parts() or {}
        parts = {
            number: apply(model, _stage(named, split, [number], is_last=number == last), setting, options)
            for number in split.of(dist.get_rank(group))
        }
        self.module: nn.Module = next(iter(parts.values())).module
        if len(parts) > 1:  # the same parts in one module
            self.module = _stage(named, split, parts)
        self.parts = list(parts.values())
        self._has_loss = last in parts
        self.owns_loss = self._has_loss and setting.owns_loss
        # torch computes gradients of weights separately by torch.autograd.grad, which does not fire DDP's hooks.
        self._averages_after = schedule.splits_backward
        settles = 0 if self._averages_after else max(part.settles_after for part in parts.values())
        # DDP rebuilds its buckets in the last pass of a step, and moves the gradients accumulated before into them: it
        # divides these by the number of replicas, but multiplies others by the inverse, which rounds differently.
        self.rehearsals = settles + (layout.accumulation > 1) if settles else 1
        self._split, self._parts, self._layout, self._group, self._device = split, parts, layout, group, device
        self._dtype = DTYPES[setting.precision]
        self._autocasts = options.autocasts(layout.dims, setting.kernels, self._dtype)
        self._sequence = layout.dims.tensor if options.sequence else 1  #: Ranks that share the positions of a message.
        self.links = open_links(group, device)
        kind = _LinkedStage if self._whole is None else LoneStage
        self._stages = {
            number: kind(part.module, number, len(split.stages), device, group=group) for number, part in parts.items()
        }
        self._schedule = schedule.make([*self._stages.values()], layout.microbatches, self._share_of_loss)
        self._shared = find_shared(tied, self.module, split, group)
        self._scale: Scale = lambda loss: loss
        self._shares: list[Tensor] = []

    def gradients(self, inputs: Tensor, targets: Tensor, scale: Scale) -> Tensor:
        """See :meth:`ptdbench.parallel.engine.Engine.gradients`."""
        self._scale = scale
        total = torch.zeros((), device=inputs.device)
        size = self._layout.micro_batch * self._layout.microbatches
        pieces = list(zip(inputs.split(size), targets.split(size), strict=True))
        for part in self._parts.values():
            part.begin(scale(torch.ones((), device=inputs.device) / (self._layout.microbatches * len(pieces))))
        with self.parts[0].around():
            for number, (some_inputs, some_targets) in enumerate(pieces, start=1):
                self._shares.clear()
                self._pass(some_inputs, some_targets, last=number == len(pieces))
                # The very first pass begins with torch's shape inference on uninitialized memory.
                total += sum(self._shares[-self._layout.microbatches :])
        for part in self._parts.values():
            part.settle()
            if self._averages_after:
                part.average()
        add_up_shared(self._shared, self._group)
        return total if self.owns_loss else torch.zeros_like(total)

    def gradient_norm(self) -> Tensor:
        """See :meth:`ptdbench.parallel.engine.Engine.gradient_norm`; a shared weight counts once."""
        others = {copy for shared in self._shared for copy in shared.others}
        square = norm_of(weight for weight in self.module.parameters() if weight not in others).square()
        square = square.to(self._device)  # for a stage without gradients, the zero is on the host
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    @torch.no_grad()
    def outputs(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`ptdbench.parallel.engine.Engine.outputs`; without the schedule, whose micro-batches are equal."""
        ranks, last = self._split.ranks, len(self._split.ranks) - 1
        outputs = None
        for number, part in self._parts.items():
            if number == 0:
                arrived = inputs
            elif number - 1 in self._parts:  # the two arms of a V meet on one rank
                assert outputs is not None
                arrived = outputs
            else:
                arrived = receive_tensor(self._group, ranks[number - 1], inputs.device)
            try:
                with part.around():
                    outputs = part.module(arrived) if targets is None else part.module(arrived, targets)
            finally:
                part.release()
            if number < last and number + 1 not in self._parts:
                send_tensor(outputs, self._group, ranks[number + 1])
        if not self.owns_loss or outputs is None:
            return None
        return outputs if targets is None else outputs.mean()

    def _pass(self, inputs: Tensor, targets: Tensor, last: bool) -> None:
        """Run one pass of the schedule; in the last one DDP averages the gradients, unless that follows separately.

        torch arms DDP before the backward pass of the last micro-batch. Each forward pass outside no_sync() would arm
        it too, and the first backward pass would then reduce incomplete gradients.
        """
        arguments = (inputs,) if 0 in self._parts else ()
        self._foresee(inputs)
        options: dict[str, Any] = {"targets": targets} if self._has_loss else {}
        with ExitStack() as armed_late:
            for number, part in self._parts.items():
                runs_hooks = last and not self._averages_after
                self._stages[number].submod = part.runner if runs_hooks else part.module
                if part.runner is not part.module:
                    armed_late.enter_context(part.deferred())
            self._schedule.step(*arguments, target=targets, **options)

    def _foresee(self, inputs: Tensor) -> None:
        """Predict what will arrive at stages whose predecessors are absent."""
        for number, stage in self._stages.items():
            if isinstance(stage, LoneStage) and self._whole is not None and number and stage.arriving is None:
                before, micro_batch = [*chain(*self._split.stages[:number])], inputs[: self._layout.micro_batch]
                shares, autocasts = self._sequence, self._autocasts
                stage.arriving = arriving(self._whole, before, micro_batch, self._dtype, shares, autocasts=autocasts)

    def _share_of_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """Return the scaled contribution of a micro-batch to the step's loss, from its mean loss."""
        share = loss.sum() / (self._layout.microbatches * self._layout.accumulation)
        self._shares.append(share.detach())
        return self._scale(share)


class _LinkedStage(_InferringStage):
    """A stage whose neighbor may be on the same rank."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the messages by which torch 2.11 opens links between stages, except to this rank: gloo cannot."""
        messages = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [message for message in messages if message.peer != dist.get_rank()]


def _stage(parts: Mapping[str, nn.Module], split: StageSplit, numbers: Iterable[int], is_last: bool = False) -> Stage:
    return Stage({name: parts[name] for number in numbers for name in split.stages[number]}, is_last)


def send_tensor(tensor: Tensor, group: dist.ProcessGroup, to: int) -> None:
    """Send a tensor of at most eight dimensions to rank ``to`` of the group, preceded by its shape and dtype.

    For evaluation, whose last batch is smaller: ``PipelineStage`` infers shapes only once, in its first pass.
    """
    header = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    header += [0] * (2 + _MOST_DIMENSIONS - len(header))
    dist.send(torch.tensor(header, device=tensor.device), group=group, group_dst=to)
    dist.send(tensor.contiguous(), group=group, group_dst=to)


def receive_tensor(group: dist.ProcessGroup, origin: int, device: torch.device) -> Tensor:
    """Receive, on ``device``, the tensor that rank ``origin`` of the group sends."""
    header = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=origin)
    dtype, dimensions, *shape = header.tolist()
    tensor = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=device)
    dist.recv(tensor, group=group, group_src=origin)
    return tensor
