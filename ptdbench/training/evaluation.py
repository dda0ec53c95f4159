"""Evaluation on held-out samples: exact for any number of ranks."""

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptdbench.data.protocol import HeldOut, read
from ptdbench.job import Job
from ptdbench.launch.collect import total
from ptdbench.local_part import without_repeats
from ptdbench.models.protocol import loss_of_outputs, only_loss
from ptdbench.models.state import preserved
from ptdbench.records.schema import Evaluation
from ptdbench.training.loop import StepLoop


class Evaluator:
    """Evaluates the model on all ranks.

    The held-out part is split into blocks of ``eval.micro_batch`` samples, assigned to the replicas round-robin. Each
    block is summed by one replica, and sums are combined exactly, so that the result is the same for any number of
    ranks; a sampler that pads the last ranks would count some samples twice.
    """

    def __init__(self, job: Job, loop: StepLoop) -> None:
        self.done: list[Evaluation] = []  #: The evaluations so far, including those before a checkpoint.
        self._job = job
        self._loop = loop
        self._example = job.training.data.example()
        targets, model = self._example[1], job.training.model
        has_classes = targets.dim() == 1 and not targets.is_floating_point()
        self._classifies = has_classes and not only_loss(model)
        # The loss as a function of the outputs, which accuracy needs; otherwise the loss takes a second forward pass.
        self._loss = loss_of_outputs(model) if self._classifies else None

    def due(self, at_end: bool = False) -> bool:
        """Return whether an evaluation is due: every ``eval.every`` steps and after the last step."""
        interval, steps = self._job.spec.config.eval.every, self._loop.done
        if interval is None or (self.done and self.done[-1].step == steps):
            return False
        return at_end or steps % interval == 0

    def __call__(self, stopped: Callable[[int], str | None]) -> None:
        """Evaluate, unless it is stopped; called in all ranks, between two steps.

        ``stopped``: called after each batch with their number; returns why to stop, the same on all ranks.
        """
        with self._job.watchdog.paused(), self._job.display.during("evaluating"):
            evaluation = self._evaluate(stopped)
        if evaluation:
            self.done.append(evaluation)
            self._job.display.remark = str(evaluation)

    def _evaluate(self, stopped: Callable[[int], str | None]) -> Evaluation | None:
        if self._job.device.type == "cuda":
            torch.cuda.synchronize(self._job.device)  # do not time queued training steps
        started = time.perf_counter()
        module, held_out = self._loop.engine.module, self._job.training.data.held_out
        assert held_out  # assemble() refuses data without held-out samples
        modes = self._loop.engine.modes
        with torch.no_grad(), preserved(module, self._job.device):
            modes.evaluate()
            broadcast_buffers(module, self._loop.mesh.dp.get_group())
            sums = self._sums(held_out, stopped)
            modes.train()
        if sums is None:
            return None
        loss, top1, top5 = (math.fsum(of_blocks) for of_blocks in zip(*sums.tolist(), strict=True))
        samples = len(held_out)
        loss /= samples * self._example[1].numel()
        has_accuracy = self._classifies and not math.isnan(top1)
        return Evaluation(
            step=self._loop.done,
            samples=samples,
            loss=loss if math.isfinite(loss) else None,
            top1=top1 / samples if has_accuracy else None,
            top5=top5 / samples if has_accuracy else None,
            bits_per_byte=loss / math.log(2) / held_out.bytes_per_token if held_out.bytes_per_token else None,
            seconds=time.perf_counter() - started,
        )

    def _sums(self, held_out: HeldOut, stopped: Callable[[int], str | None]) -> Tensor | None:
        """Return each block's sum of losses, top-1 hits and top-5 hits, ``[blocks, 3]`` in float64.

        Hits are NaN if the model does not have one output per class.
        """
        size, replicas = self._job.spec.config.eval.micro_batch, self._job.training.layout.replicas
        blocks = math.ceil(len(held_out) / size)
        sums = torch.zeros(blocks, 3, dtype=torch.float64, device=self._job.device)
        for batches, first in enumerate(range(0, blocks, replicas), start=1):
            # An idle replica repeats the first block of the round: under FSDP every forward pass needs all ranks.
            block = first + self._loop.replica
            idle = block >= blocks
            start = (first if idle else block) * size
            batch = read(held_out, start, min(start + size, len(held_out)), self._example)
            of_block = self._evaluate_block(*self._loop.feed.to_device(batch))
            if of_block is not None and not idle:
                sums[block] = of_block
            if stopped(batches):
                return None
        return total(sums.cpu())  # exact: a block is zero on all ranks but one

    def _evaluate_block(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return a block's three sums; ``None`` on a rank without the loss."""
        engine = self._loop.engine
        outputs = engine.outputs(inputs) if self._classifies else None  # a language model's may not fit in memory
        if self._loss is None:
            loss = engine.outputs(inputs, targets)
        else:
            loss = None if outputs is None else self._loss(outputs.float(), targets)
        if loss is None:
            return None
        hits = torch.full((2,), math.nan, dtype=torch.float64, device=loss.device)
        if outputs is not None and outputs.dim() == 2 and outputs.size(1) > 1:
            is_hit = outputs.topk(min(5, outputs.size(1))).indices == targets.unsqueeze(1)
            hits = torch.stack([is_hit[:, 0].sum(), is_hit.sum()]).double()
        return torch.cat([loss.double().reshape(1) * targets.numel(), hits])


@torch.no_grad()
def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all replicas the buffers of the first one, as batch norm statistics differ.

    They are sent as contiguous bytes: NCCL rejects some types and strides, and gloo writes past expanded tensors.
    """
    for once in map(without_repeats, module.buffers()):
        sent = once.clone(memory_format=torch.contiguous_format)
        dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
        once.copy_(sent)
