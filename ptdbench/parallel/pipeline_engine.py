"""The engine of a pipeline: stages on different ranks, driven by a schedule; absent neighbors are simulated."""

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ptdbench.launch import collect
from ptdbench.measure import memory
from ptdbench.models.protocol import Model, module_of
from ptdbench.models.state import ModuleState
from ptdbench.nested import first_tensor, map_tensors, split
from ptdbench.parallel.apply import apply
from ptdbench.parallel.engine import Engine, Scale, norm_of
from ptdbench.parallel.options import Options, Setting
from ptdbench.parallel.pipeline_stages import Stage, add_up_shared, find_shared, split_stages, united, untie
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
    arriving: tuple[Tensor, ...] | None = None
    _stage_meta: Any  # torch's, since 2.14

    def _recv_meta(self, src_stage: int) -> Any:
        """Return the shapes that the neighbor would send, as torch 2.14 requests them."""
        from torch.distributed.pipelining import _utils

        utils: Any = _utils  # none of these are in torch 2.11
        if src_stage > self.stage_index:  # the gradients of what this stage sends
            return utils._StageBackwardMeta(utils._derive_grad_metas(self._stage_meta.outputs))
        assert self.arriving is not None
        return utils._StageForwardMeta(utils.extract_tensor_metas(self.arriving))

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """Send nothing: the neighbor is absent."""

    def _shape_inference(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """Infer shapes under torch 2.11 as if the previous stage were on this rank: its output is then an argument."""
        places = self.stage_index_to_group_rank
        if self.arriving is not None:
            args = self.arriving
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
    model: Model, names: Sequence[str], inputs: Any, dtype: torch.dtype, shares: int, *, autocasts: bool = False
) -> tuple[Tensor, ...]:
    """Predict, on the meta device, what the model's first parts, with these names, would send for a micro-batch.

    The model's weights are on the meta device. ``shares``: the number of ranks that split the positions.
    ``autocasts``: torch casts to ``dtype`` where it chooses, which it does on a real or virtual device only.
    """
    device = first_tensor(inputs).device
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=autocasts):
        try:
            if autocasts:
                raise RuntimeError
            sent = _through(deepcopy(model), names, map_tensors(partial(torch.empty_like, device="meta"), inputs))
        except RuntimeError:  # a part reads values, as transformers' masks do: on a virtual GPU they are zeros
            sent = _through(deepcopy(model), names, inputs)
            memory.release(device)

    def predicted(tensor: Tensor) -> Tensor:
        batch, *rest = tensor.shape
        if shares > 1:
            rest[0] //= shares
        kind = tensor.dtype if autocasts else dtype
        return torch.empty(batch, *rest, dtype=kind, device="meta", requires_grad=True)

    return tuple(map(predicted, sent))


def _through(model: Model, names: Sequence[str], inputs: Any) -> tuple[Tensor, ...]:
    """Return what the parts with these names send; each has weights on its device meanwhile."""
    sent: Any = ()
    for name in names:
        stage = Stage(model, [name]).to_empty(device=first_tensor(inputs).device)
        sent = stage(*sent, batch=(inputs, None))
        sent = sent if isinstance(sent, tuple) else (sent,)
        stage.to("meta")
    return sent  # type: ignore[no-any-return]


#: torch's options for communicators of each pair of ranks and direction (since 2.15), or of each direction (2.14).
_OPTIONS = ("pipeline_per_edge_p2p", "pipeline_per_direction_p2p")


def open_links(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let torch open separate communicators, so that messages in one direction do not wait for the other.

    NCCL runs the operations of one communicator in the order of its calls. Activations and gradients on one link would
    be serialized, and may deadlock under schedules with several stages per rank (``torch.distributed.config``). Call
    this before stages are created, as they open the communicators.
    """
    if device.type != "cuda" or "nccl" not in dist.get_backend_config(group):
        return
    from torch.distributed import config

    if option := next((name for name in _OPTIONS if hasattr(config, name)), None):
        setattr(config, option, True)
    if option == _OPTIONS[1] and not collect.all_ranks_present():
        from torch.distributed.pipelining.stage import _PP_DIRECTION_GROUP_CACHE  # type: ignore[attr-defined]

        # torch would split the group, which needs all of its ranks.
        ranks = dist.get_process_group_ranks(group)
        groups: Any = (dist.new_group(ranks), dist.new_group(ranks))
        _PP_DIRECTION_GROUP_CACHE[group] = groups


class Pipelined(Engine):
    """The engine of a pipeline: a schedule and this rank's stages, each laid out over its replicas or shards."""

    def __init__(self, model: Model, setting: Setting, options: Options) -> None:
        layout, device, schedule = setting.layout, setting.device, options.pipeline_schedule
        #: A copy of the model to predict what arrives, if the previous stages are absent.
        self._whole = None if collect.all_ranks_present() else without_weights(model)
        mesh = setting.mesh["pp"] or setting.mesh.dp  # of one rank for a pipeline of one stage
        group = mesh.get_group()
        divided = split_stages(model, options.stage_ranks(layout.dims))
        tied = model.tied()  # before sharding and untying replace the weights, which a model may compare
        untie(model, tied, divided)
        last = len(divided.stages) - 1
        parts = {
            number: apply(model, Stage(model, divided.stages[number]), setting, options)
            for number in divided.stages_of(dist.get_rank(group))
        }
        self.module: nn.Module = united([part.module for part in parts.values()])
        self.parts = list(parts.values())
        self._has_loss = last in parts
        self.owns_loss = self._has_loss and setting.owns_loss
        # torch computes gradients of weights separately by torch.autograd.grad, which does not fire DDP's hooks.
        self._averages_after = schedule.splits_backward
        settles = 0 if self._averages_after else max(part.settles_after for part in parts.values())
        # DDP rebuilds its buckets in the last pass of a step, and moves the gradients accumulated before into them: it
        # divides these by the number of replicas, but multiplies others by the inverse, which rounds differently.
        self.rehearsals = settles + (layout.accumulation > 1) if settles else 1
        self._split, self._parts, self._layout, self._group, self._device = divided, parts, layout, group, device
        self._dtype = DTYPES[setting.precision]
        self._autocasts = options.autocasts(layout.dims, setting.kernels, self._dtype)
        self._sequence = layout.dims.tensor if options.sequence else 1  #: Ranks that share the positions of a message.
        open_links(group, device)
        kind = _LinkedStage if self._whole is None else LoneStage
        self._stages = {
            number: kind(part.module, number, len(divided.stages), device, group=group)
            for number, part in parts.items()
        }
        self._schedule = schedule.make([*self._stages.values()], layout.microbatches, self._share_of_loss)
        self._shared = find_shared(tied, self.module, divided, group)
        self._scale: Scale = lambda loss: loss
        self._shares: list[Tensor] = []

    def gradients(self, inputs: Any, targets: Tensor, scale: Scale) -> Tensor:
        """See :meth:`ptdbench.parallel.engine.Engine.gradients`."""
        self._scale = scale
        total = torch.zeros((), device=targets.device)
        pieces = split((inputs, targets), self._layout.micro_batch * self._layout.microbatches)
        for part in self._parts.values():
            part.begin(scale(torch.ones((), device=targets.device) / (self._layout.microbatches * len(pieces))))
        with self.parts[0].around():
            for number, batch in enumerate(pieces, start=1):
                self._shares.clear()
                self._pass(batch, last=number == len(pieces))
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
    def outputs(self, inputs: Any, targets: Tensor | None = None) -> Tensor | None:
        """See :meth:`ptdbench.parallel.engine.Engine.outputs`; without the schedule, whose micro-batches are equal."""
        ranks, last, device = self._split.ranks, len(self._split.ranks) - 1, first_tensor(inputs).device
        sent: Any = ()
        for number, part in self._parts.items():
            if number and number - 1 not in self._parts:  # else the two arms of a V meet on one rank
                sent = receive_tensors(self._group, ranks[number - 1], device)
            try:
                with part.around():
                    sent = part.module(*sent, batch=(inputs, targets))
            finally:
                part.release()
            sent = sent if isinstance(sent, tuple) else (sent,)
            if number < last and number + 1 not in self._parts:
                send_tensors(sent, self._group, ranks[number + 1])
        if not self.owns_loss:
            return None
        (outputs,) = sent
        return outputs if targets is None else outputs.mean()

    def _pass(self, batch: tuple[Any, Tensor], last: bool) -> None:
        """Run one pass of the schedule; in the last one DDP averages the gradients, unless that follows separately.

        torch arms DDP before the backward pass of the last micro-batch. Each forward pass outside no_sync() would arm
        it too, and the first backward pass would then reduce incomplete gradients.
        """
        self._foresee(batch[0])
        with ExitStack() as armed_late:
            for number, part in self._parts.items():
                runs_hooks = last and not self._averages_after
                self._stages[number].submod = part.runner if runs_hooks else part.module
                if part.runner is not part.module:
                    armed_late.enter_context(part.deferred())
            # Every stage gets the batch: masks and other inputs need not be sent.
            self._schedule.step(target=batch[1], batch=batch)

    def _foresee(self, inputs: Any) -> None:
        """Predict what will arrive at stages whose predecessors are absent."""
        for number, stage in self._stages.items():
            if isinstance(stage, LoneStage) and self._whole is not None and number and stage.arriving is None:
                before = [*chain(*self._split.stages[:number])]
                micro_batch = split(inputs, self._layout.micro_batch)[0]
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


def send_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup, to: int) -> None:
    """Send tensors to rank ``to`` of the group, preceded by their shapes and dtypes.

    For evaluation, whose last batch is smaller: ``PipelineStage`` infers shapes only once, in its first pass.
    """
    kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
    dist.send_object_list([kinds], group=group, device=tensors[0].device, group_dst=to)
    for tensor in tensors:
        dist.send(tensor.contiguous(), group=group, group_dst=to)


def receive_tensors(group: dist.ProcessGroup, origin: int, device: torch.device) -> list[Tensor]:
    """Receive, on ``device``, the tensors that rank ``origin`` of the group sends."""
    kinds: list[Any] = [None]
    dist.recv_object_list(kinds, group=group, device=device, group_src=origin)
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds[0]]
    for tensor in tensors:
        dist.recv(tensor, group=group, group_src=origin)
    return tensors
