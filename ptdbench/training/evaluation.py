"""What a model makes of samples that it is not trained on: exact, whatever the number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ptdbench.data.protocol import HeldOut
from ptdbench.job import Job
from ptdbench.training.loop import StepLoop


@dataclass(frozen=True)
class Evaluation:
    """One look at the held-out part.

    Attributes:
        step: Optimizer steps that were done before it.
        samples: How many samples there were, each of them counted once.
        loss: Mean loss of a target, in nats for cross entropy; label smoothing left out.
        top1: Share of the samples whose class had the largest output; ``None`` where samples have no classes.
        top5: Share of those whose class was among the five largest.
        bits_per_byte: Loss in bits by byte of text; ``None`` where samples are no text.
        seconds: How long it took.
    """

    step: int
    samples: int
    loss: float
    top1: float | None
    top5: float | None
    bits_per_byte: float | None
    seconds: float

    def better_than(self, other: Evaluation) -> bool:
        """Whether a person would rather have the model that this was said of."""
        if math.isnan(self.loss) or math.isnan(other.loss):  # it has diverged
            return not math.isnan(self.loss)
        if self.top1 is not None and other.top1 is not None:
            return self.top1 > other.top1
        return self.loss < other.loss

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Evaluation:
        """The evaluation that :meth:`as_dict` wrote down; JSON has no NaN: there it is null."""
        return Evaluation(**{**fields, "loss": math.nan if fields["loss"] is None else fields["loss"]})

    def __str__(self) -> str:
        """The figure that matters, as in ``held-out 97.2 %``."""
        if self.top1 is not None:
            return f"held-out {100 * self.top1:.1f} %"
        if self.bits_per_byte is not None:
            return f"held-out {self.bits_per_byte:.3f} bits/byte"
        return f"held-out loss {self.loss:.4f}"

    def as_dict(self) -> dict[str, Any]:
        """As it stands in a record."""
        return asdict(self)


class Evaluator:
    """Evaluates a run's model on all of its ranks.

    The held-out part is cut into blocks of ``eval.micro_batch`` samples, which the replicas take in turns. A block is
    the same whatever the number of ranks, it is added up by one replica only, and the sums are put together exactly: so
    one rank and many come to the same result, where a sampler that fills up the last ranks would count some samples
    twice.

    Attributes:
        done: The evaluations so far, those before a checkpoint included.
        remark: What a person who watches the steps should read of the last one of this process.

    Args:
        job: The run; its data are prepared.
        loop: Has the model.
    """

    def __init__(self, job: Job, loop: StepLoop) -> None:
        self.done: list[Evaluation] = []
        self.remark = ""
        self._job = job
        self._loop = loop
        targets = job.training.data.example()[1]
        self._classifies = targets.dim() == 1 and not targets.is_floating_point()

    @property
    def best(self) -> Evaluation | None:
        """The best so far, the earliest of several."""
        best = None
        for evaluation in self.done:
            best = evaluation if best is None or evaluation.better_than(best) else best
        return best

    @property
    def is_best(self) -> bool:
        """Whether the weights as they are now have been judged, and none before were as good."""
        return bool(self.done) and self.done[-1].step == self._loop.done and self.best is self.done[-1]

    def go_on(self, done: Sequence[Mapping[str, Any]]) -> None:
        """Begin after the evaluations that a checkpoint holds, as they stand in a record."""
        self.done = [Evaluation.of(fields) for fields in done]

    def as_dicts(self) -> list[dict[str, Any]]:
        """The evaluations so far, as they stand in a record."""
        return [evaluation.as_dict() for evaluation in self.done]

    def due(self, at_end: bool = False) -> bool:
        """Whether it is time to evaluate: every ``eval.every`` steps, and after the last."""
        every, steps = self._job.spec.config.eval.every, self._loop.done
        if every is None or (self.done and self.done[-1].step == steps):
            return False
        return at_end or steps % every == 0

    def __call__(self) -> Evaluation:
        """Evaluate now; called in all ranks, between two steps."""
        with self._job.watchdog.paused():
            found = self._evaluate()
        self.done.append(found)
        self.remark = str(found)
        return found

    def _evaluate(self) -> Evaluation:
        started = time.perf_counter()
        module, held_out = self._loop.engine.module, self._job.training.data.held_out
        assert held_out is not None  # assemble() has refused data without
        module.eval()
        with torch.no_grad(), self._loop.update.averaged():
            _share_buffers(module, self._loop.replicas)
            sums = self._sums(held_out).tolist()
        module.train()
        loss, top1, top5 = (math.fsum(of_blocks) for of_blocks in zip(*sums, strict=True))
        samples, example = len(held_out), self._job.training.data.example()[1]
        loss /= samples * example.numel()
        return Evaluation(
            step=self._loop.done,
            samples=samples,
            loss=loss,
            top1=top1 / samples if self._classifies else None,
            top5=top5 / samples if self._classifies else None,
            bits_per_byte=loss / math.log(2) / held_out.bytes_per_token if held_out.bytes_per_token else None,
            seconds=time.perf_counter() - started,
        )

    def _sums(self, held_out: HeldOut) -> Tensor:
        """``[blocks, 3]`` in float64: the sum of a block's losses, and how many of it are right in one and in five."""
        size, replicas = self._job.spec.config.eval.micro_batch, self._job.training.layout.replicas
        blocks = math.ceil(len(held_out) / size)
        sums = torch.zeros(blocks, 3, dtype=torch.float64, device=self._job.device)
        for first in range(0, blocks, replicas):
            # A replica for which no block is left takes part with another's: under FSDP a layer needs all ranks.
            block = first + self._loop.replica
            idle = block >= blocks
            start = (first if idle else block) * size
            inputs, targets = held_out.samples(start, min(start + size, len(held_out)))
            found = self._judge(inputs.to(self._job.device), targets.to(self._job.device))
            if found is not None and not idle:
                sums[block] = found
        dist.all_reduce(sums)  # a block is zero on all ranks but one, so that nothing is rounded
        return sums

    def _judge(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """A block's three sums, on a rank that holds the model's end."""
        engine = self._loop.engine
        if not self._classifies:
            loss = engine.outputs(inputs, targets)  # the logits of a language model may not fit into memory
            return None if loss is None else F.pad(loss.double().reshape(1) * targets.numel(), (0, 2))
        outputs = engine.outputs(inputs)
        if outputs is None:
            return None
        loss = F.cross_entropy(outputs.float(), targets, reduction="sum")
        hits = outputs.topk(min(5, outputs.size(1))).indices == targets.unsqueeze(1)
        return torch.stack([loss.double(), hits[:, 0].sum().double(), hits.sum().double()])


def _share_buffers(module: nn.Module, replicas: dist.ProcessGroup | None) -> None:
    """Let all replicas judge with the first one's statistics: a batch norm's differ, as each has seen other samples."""
    for buffer in module.buffers():
        dist.broadcast(buffer, group=replicas, group_src=0)
