"""The curves of a run that goes on, for TensorBoard."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

from ptdbench.job import Job
from ptdbench.records import store
from ptdbench.report.tensorboard import Live
from ptdbench.training import agreement
from ptdbench.training.evaluation import Evaluator
from ptdbench.training.keeper import History
from ptdbench.training.loop import StepLoop


class Curves:
    """Brings together what the ranks have seen so far, and lets rank 0 show it.

    Args:
        job: The run.
        loop: Its steps.
        history: The steps before those of this process.
        evaluator: What it has found is shown too.
    """

    def __init__(self, job: Job, loop: StepLoop, history: History, evaluator: Evaluator) -> None:
        self._job = job
        self._loop = loop
        self._history = history
        self._evaluator = evaluator
        self._live = Live(job.directory) if job.world.rank == 0 else None

    def show(self) -> None:
        """Show all steps that are done; called in all ranks, between two steps, as the ranks wait for each other."""
        agreed = agreement.reach(self._job, self._loop)
        if self._live:
            known = store.load_record(self._job.directory)
            whole = agreement.joined(self._history.facts(), self._job, agreed)
            evaluations = [evaluation.as_dict() for evaluation in self._evaluator.done]
            steps = {"rank_step_seconds": agreed.rank_step_seconds, "evaluations": evaluations}
            with suppress(OSError):  # nobody stops training because curves cannot be written
                self._live.show({**known, **whole, **steps})
        dist.barrier()  # else the others would wait for rank 0 within their next step, under its clock

    def close(self) -> int:
        """Show no more; how many steps were shown."""
        if self._live is None:
            return 0
        self._live.close()
        return self._live.shown
