"""torch's own elastic agent for the ranks of this machine, with somebody who looks at them before it does.

The agent knows two things about its ranks, that they run and that one has failed, and once it has seen a failure or
caught a signal it waits for half a minute for ranks that cannot hear it; and it waits for what ranks return, for ever
where one ends without. Here it catches no signals, ranks return nothing, and what their ends and signals mean is
decided by whoever looks: :func:`ptdbench.launch.local.start`.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest, MultiprocessContext
from torch.distributed.launcher.api import LaunchConfig

from ptdbench.launch.host import HostRendezvous

#: Seconds between two looks at the ranks, at most: the end of a rank is seen at once.
INTERVAL = 0.05

#: What the agent sleeps between two looks by itself; it insists on more than nothing.
_NO_TIME = 1e-4


class Agent(LocalElasticAgent):
    """Runs ``entry(*arguments)`` in ``size`` processes that are forked from the fork server.

    Args:
        entry: A function that can be pickled.
        size: How many ranks.
        arguments: Its arguments.
        look: Called with the ranks' processes, by rank, at least every :data:`INTERVAL` seconds; says whether all have
            ended well. What it raises ends the run, and by then it has ended the ranks.
    """

    def __init__(
        self,
        entry: Callable[..., Any],
        size: int,
        arguments: Sequence[Any],
        look: Callable[[Sequence[BaseProcess]], bool],
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=size,
            rdzv_handler=HostRendezvous(uuid.uuid4().hex),
            entrypoint=entry,
            args=tuple(arguments),
            max_restarts=0,
            monitor_interval=_NO_TIME,
            local_addr="localhost",
            numa_options=LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=size).numa_options,  # as torchrun would
        )
        super().__init__(spec, _NoLogs(log_dir=os.devnull), start_method="forkserver")
        self._look = look

    def run(self, role: str = "rank") -> RunResult:
        """Start the ranks and wait until they have ended."""
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # or the agent would put its handlers in the place of ours
        return super().run(role)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert isinstance(self._pcontext, MultiprocessContext)
        assert self._pcontext._pc is not None
        ranks = self._pcontext._pc.processes
        _await_end(ranks)
        if not self._look(ranks):
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})


class _NoLogs(DefaultLogsSpecs):
    """Ranks write to the streams of this process.

    Without this the agent follows ``/dev/null`` for each of them, in threads that end up to 0.1 s after the ranks.
    """

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """No file to follow."""
        return replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})


def _await_end(ranks: Sequence[BaseProcess]) -> None:
    """Wait until a rank ends, for a short time; where one has failed, for as long for others to fail with it."""
    if running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
        connection.wait(running, INTERVAL)
    if any(rank.exitcode for rank in ranks):
        time.sleep(INTERVAL)
