"""Communication that goes wrong on purpose: given to runs as ``workload._target_=tests.workloads.wrong.<class>``."""

from unittest import mock

import torch.distributed as dist

from ptdbench.job import Job, Outcome
from ptdbench.workloads.collectives import Collectives
from ptdbench.workloads.point_to_point import PointToPoint


class WrongAllReduce(Collectives):
    """On rank 1, the fourth element comes out one too large where messages have 64 elements or more."""

    def __call__(self, job: Job) -> Outcome:
        right = dist.all_reduce

        def wrong(data, *arguments, **options):
            work = right(data, *arguments, **options)
            if job.world.rank == 1 and data.numel() >= 64:
                data[3] += 1
            return work

        with mock.patch.object(dist, "all_reduce", wrong):
            return super().__call__(job)


class WrongReceive(PointToPoint):
    """On rank 1, the last byte of a message of 1 KiB is lost."""

    def __call__(self, job: Job) -> Outcome:
        right = dist.recv

        def wrong(data, *arguments, **options):
            right(data, *arguments, **options)
            if job.world.rank == 1 and data.numel() == 1024:
                data[-1] = 0

        with mock.patch.object(dist, "recv", wrong):
            return super().__call__(job)
