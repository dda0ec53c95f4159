"""The engine of a pipeline: stages on different ranks, driven by a schedule; absent neighbors are made up."""

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
from ptdbench.parallel.apply import Setting, apply
from ptdbench.parallel.engine import Engine, Scale, norm_of
from ptdbench.parallel.options import Options
from ptdbench.parallel.pipeline.stage import Cut, Stage, add_up_shared, cut, find_shared, untie
from ptdbench.parallel.precision import DTYPES


class _Asking(PipelineStage):
    """A stage that knows no shapes before it asks for them."""

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        """Vote, under torch 2.14, for asking; the product of all votes is nothing that a virtual GPU would compute."""
        super()._warmup_forward_vote(has_backward, received_acc)  # type: ignore[misc]
        return torch.tensor([0], dtype=torch.int32, device=self.device)


class LoneStage(_Asking):
    """A stage that asks nobody for shapes; its messages are left to a device that lets them go nowhere."""

    #: What the stage before it would send for a micro-batch, on the meta device; ``None`` for the first.
    arriving: Tensor | None = None

    def _recv_meta(self, src_stage: int) -> Any:
        """The shapes that the neighbor would send, as torch 2.14 asks for them."""
        from torch.distributed.pipelining import _utils

        if src_stage > self.stage_index:  # the gradients of what this stage sends
            assert self._stage_meta.outputs is not None
            return _utils._StageBackwardMeta(_utils._derive_grad_metas(self._stage_meta.outputs))
        assert self.arriving is not None
        metas = _utils.extract_tensor_metas((self.arriving,))
        assert metas is not None
        return _utils._StageForwardMeta(metas)

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Tell nobody."""

    def _shape_inference(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """The same for torch 2.11, which hands over what comes from a stage of the same rank."""
        places = self.stage_index_to_group_rank
        if self.arriving is not None:
            args = (self.arriving,)
            self.stage_index_to_group_rank = {**places, self.stage_index - 1: self.group_rank}
        try:
            return super()._shape_inference(args, kwargs)  # type: ignore[misc, no-any-return]
        finally:
            self.stage_index_to_group_rank = places


def without_weights(model: Model) -> Model:
    """Copy a model before it is laid out, with weights on the meta device: it runs whatever becomes of the other."""
    weights: dict[int, Any] = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
        for one in module_of(model).parameters()
    }
    return deepcopy(model, weights)


def arriving(model: Model, names: Sequence[str], inputs: Tensor, dtype: torch.dtype, shares: int) -> Tensor:
    """Predict what the first parts of a model, of these names, would send for the inputs of a micro-batch.

    The model's weights, and what is returned, are on the meta device. ``shares``: ranks that share its positions.
    """
    with torch.no_grad():
        try:
            batch, *rest = _through(deepcopy(model), names, torch.empty_like(inputs, device="meta"))
        except RuntimeError:  # a part asks for values, as masks of transformers do: those of a virtual GPU are zeros
            batch, *rest = _through(deepcopy(model), names, inputs)
            memory.release(inputs.device)
    if shares > 1:
        rest[0] //= shares
    return torch.empty(batch, *rest, dtype=dtype, device="meta", requires_grad=True)


def _through(model: Model, names: Sequence[str], found: Tensor) -> torch.Size:
    """The shape of what the parts of these names make of a tensor, on whose device each has its weights meanwhile."""
    parts = model.parts() or {}
    for name in names:
        held = members(name, parts[name]).values()
        for module in held:
            module.to_empty(device=found.device)
        found = parts[name](found)
        for module in held:
            module.to("meta")
    return found.shape


#: torch's options by what they give a communicator of its own: a pair of ranks and a direction since 2.15, in 2.14 a
#: direction.
_OPTIONS = {"edges": "pipeline_per_edge_p2p", "directions": "pipeline_per_direction_p2p"}


def open_links(group: dist.ProcessGroup, device: torch.device) -> str:
    """Let torch open more than one communicator where messages of one direction would wait for the other's.

    NCCL carries out what is sent through one communicator in the order of its calls. Activations and gradients of a
    link then exclude each other, and under schedules whose ranks have several stages they may wait for each other for
    ever, as ``torch.distributed.config`` says. Call this before stages are made, which open them.

    Returns:
        What messages go through, for the record: ``messages``, each by itself, as under gloo; ``edges`` or
        ``directions``, a communicator each; or, with NCCL under torch before 2.14, ``one``.
    """
    if device.type != "cuda" or "nccl" not in dist.get_backend_config(group):
        return "messages"
    from torch.distributed import config

    links = next((name for name, option in _OPTIONS.items() if hasattr(config, option)), "one")
    if links in _OPTIONS:
        setattr(config, _OPTIONS[links], True)
    if links == "directions" and not collect.are_all_there():
        from torch.distributed.pipelining.stage import _PP_DIRECTION_GROUP_CACHE

        # torch would split the group, which takes all of its ranks.
        ranks = dist.get_process_group_ranks(group)
        groups: Any = (dist.new_group(ranks), dist.new_group(ranks))
        _PP_DIRECTION_GROUP_CACHE[group] = groups
    return links


#: The dtypes that a stage may send, encoded by their index.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_MOST_DIMENSIONS = 8


class Pipelined(Engine):
    """The engine of a pipeline: this rank's stages, each laid out over its replicas or shards, and their schedule."""

    def __init__(self, model: Model, setting: Setting, how: Options) -> None:
        layout, device, schedule = setting.layout, setting.device, how.pipeline_schedule
        #: A copy of the model by which to foresee what arrives, where the stages before are not there to say it.
        self._whole = None if collect.are_all_there() else without_weights(model)
        mesh = setting.mesh["pipeline"] or setting.mesh.batch  # of one rank for a pipeline of one stage
        group = mesh.get_group()
        where = cut(model, how.stage_ranks(layout.dims))
        tied = model.tied()  # before sharding and untying replace the weights, which a model may compare
        untie(model, tied, where)
        last, named = len(where.stages) - 1, model.parts() or {}
        parts = {
            number: apply(model, _stage(named, where, [number], is_last=number == last), setting, how)
            for number in where.of(dist.get_rank(group))
        }
        self.module: nn.Module = next(iter(parts.values())).module
        if len(parts) > 1:  # the same parts in one module
            self.module = _stage(named, where, parts)
        self.parts = list(parts.values())
        self._has_loss = last in parts
        self.owns_loss = self._has_loss and setting.owns_loss
        # torch computes the gradients of weights apart by torch.autograd.grad, which fires no hook of DDP.
        self._averages_after = schedule.splits_backward
        settles = 0 if self._averages_after else max(part.settles_after for part in parts.values())
        # The very first pass begins with a shape inference pass, which also draws random numbers. DDP rebuilds its
        # buckets in the last pass of a step, and moves the gradients accumulated before into them. It divides those by
        # the number of replicas, and multiplies others by the inverse.
        self.rehearsals = settles + (layout.accumulation > 1) if settles else 1
        self._where, self._parts, self._layout, self._group, self._device = where, parts, layout, group, device
        self._dtype = DTYPES[setting.precision]
        self._sequence = layout.dims.tensor if how.sequence else 1  #: Ranks that share the positions of what is sent.
        self.links = open_links(group, device)
        kind = _Linked if self._whole is None else LoneStage
        self._stages = {
            number: kind(part.module, number, len(where.stages), device, group=group) for number, part in parts.items()
        }
        self._schedule = schedule.make([*self._stages.values()], layout.microbatches, self._share_of_loss)
        self._shared = find_shared(tied, self.module, where, group)
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
        others = {copy for one in self._shared for copy in one.others}
        square = norm_of(weight for weight in self.module.parameters() if weight not in others).square()
        square = square.to(self._device)  # a stage without gradients has its zero on the host
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    @torch.no_grad()
    def outputs(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`ptdbench.parallel.engine.Engine.outputs`; each stage sends its outputs to the next.

        Not through the schedule, whose micro-batches must all have one size.
        """
        ranks, last = self._where.ranks, len(self._where.ranks) - 1
        found = None
        for number, part in self._parts.items():
            if number == 0:
                arrived = inputs
            elif number - 1 in self._parts:  # the two arms of a V meet on one rank
                assert found is not None
                arrived = found
            else:
                arrived = receive_tensor(self._group, ranks[number - 1], inputs.device)
            try:
                found = part.module(arrived) if targets is None else part.module(arrived, targets)
            finally:
                part.release()
            if number < last and number + 1 not in self._parts:
                send_tensor(found, self._group, ranks[number + 1])
        if not self.owns_loss or found is None:
            return None
        return found if targets is None else found.mean()

    def _pass(self, inputs: Tensor, targets: Tensor, last: bool) -> None:
        """Run one pass of the schedule; in the last one DDP averages the gradients, unless that is done after it.

        torch itself arms DDP before the backward of a pass's last micro-batch. Each forward outside no_sync() would
        arm it too, and the first backward would then reduce incomplete gradients.
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
        """Tell the stages what will arrive, where those before them are not there."""
        for number, stage in self._stages.items():
            if isinstance(stage, LoneStage) and self._whole is not None and number and stage.arriving is None:
                before, micro_batch = [*chain(*self._where.stages[:number])], inputs[: self._layout.micro_batch]
                stage.arriving = arriving(self._whole, before, micro_batch, self._dtype, self._sequence)

    def _share_of_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """A micro-batch's contribution to the loss of the step; the last stage has already computed the mean."""
        share = loss.sum() / (self._layout.microbatches * self._layout.accumulation)
        self._shares.append(share.detach())
        return self._scale(share)


class _Linked(_Asking):
    """A stage whose neighbor may be on the same rank."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The messages by which torch 2.11 opens the links between stages; gloo cannot send one to its own rank."""
        messages = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [message for message in messages if message.peer != dist.get_rank()]


def _stage(parts: Mapping[str, nn.Module], where: Cut, numbers: Iterable[int], is_last: bool = False) -> Stage:
    """The stages of these numbers as one."""
    return Stage({name: parts[name] for number in numbers for name in where.stages[number]}, is_last)


def send_tensor(tensor: Tensor, group: dist.ProcessGroup, to: int) -> None:
    """Send a tensor of an evaluation, preceded by its shape and dtype.

    By hand: ``PipelineStage``, which training uses, infers shapes too, but once, in its first pass, and receives into
    buffers of these shapes from then on. The last batch of an evaluation is smaller. The tensor has at most eight
    dimensions, and ``to`` is the receiver's rank in the group.
    """
    header = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    header += [0] * (2 + _MOST_DIMENSIONS - len(header))
    dist.send(torch.tensor(header, device=tensor.device), group=group, group_dst=to)
    dist.send(tensor.contiguous(), group=group, group_dst=to)


def receive_tensor(group: dist.ProcessGroup, origin: int, device: torch.device) -> Tensor:
    """Receive the tensor that rank ``origin`` of the group sends, on ``device``."""
    header = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=origin)
    dtype, dimensions, *shape = header.tolist()
    tensor = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=device)
    dist.recv(tensor, group=group, group_src=origin)
    return tensor
