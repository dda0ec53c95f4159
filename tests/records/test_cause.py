"""Who is to blame where signals ended ranks, from reports alone."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest

from ptdbench.records.cause import root_cause, status_of
from ptdbench.records.failure import Failure, describe_exits

CLOSED = "Connection closed by peer [127.0.0.1]:53953."


def stopped(rank: int, at: float, *unheard: int) -> Failure:
    return Failure(rank, "Stopped", "stopped by SIGTERM", "", at, "host", unheard=list(unheard))


def lost(rank: int, at: float) -> Failure:
    return Failure(rank, "RuntimeError", CLOSED, "", at, "host")


def raised(rank: int, at: float) -> Failure:
    return Failure(rank, "ValueError", "bad input", "", at, "host")


ALONE = "rank {} was stopped by SIGTERM, which its peers did not receive"


@pytest.mark.parametrize(
    ("reports", "size", "rank", "status", "begins"),
    [
        # All were stopped, in whatever order, and whatever some of them lost then.
        ([stopped(0, 1.0), stopped(1, 2.0)], 2, 0, "preempted", "stopped by"),
        ([stopped(1, 1.0), stopped(0, 2.0)], 2, 1, "preempted", "stopped by"),
        ([stopped(0, 1.0), lost(1, 2.0)], 2, 0, "preempted", "stopped by"),
        # Stopped before they all had met: nobody can know.
        ([stopped(0, 1.0)], 2, 0, "preempted", "stopped by"),
        # One was stopped, and its peers worked on until it left; whether the launcher stopped them or they lost it.
        ([stopped(1, 1.0, 0), lost(0, 3.5)], 2, 1, "failed", ALONE.format(1)),
        ([stopped(1, 1.0, 0), stopped(0, 3.5)], 2, 1, "failed", ALONE.format(1)),
        ([stopped(3, 1.0, 0, 1, 2), stopped(0, 3.5), lost(1, 3.4), stopped(2, 3.6)], 4, 3, "failed", ALONE.format(3)),
        # By the clocks of other machines they did so before.
        ([stopped(1, 9.0, 0), stopped(0, 3.5)], 2, 1, "failed", ALONE.format(1)),
        # One died, and the launcher stopped its peers because of it; or they lost it; or both.
        ([stopped(0, 1.0, 1)], 2, 1, "failed", "rank 1 left no report; rank 0 then saw: stopped by SIGTERM"),
        ([lost(0, 1.0)], 2, 1, "failed", f"rank 1 left no report; rank 0 then saw: {CLOSED}"),
        ([stopped(0, 1.0, 3), lost(1, 1.1), stopped(2, 0.9, 3)], 4, 3, "failed", "rank 3 left no report; rank 2"),
        ([lost(1, 0.5), stopped(0, 1.0, 3), stopped(2, 0.9, 3)], 4, 3, "failed", "rank 3 left no report; rank 1"),
        # An error of one's own is the cause, however late it is told.
        ([stopped(0, 1.0, 1), raised(1, 5.0)], 2, 1, "failed", "bad input"),
        ([stopped(1, 1.0, 0), lost(2, 2.0), raised(0, 5.0)], 3, 0, "failed", "bad input"),
    ],
)
def test_where_each_rank_reports_what_it_knows(reports, size, rank, status, begins):
    for ordered in (reports, reports[::-1]):
        cause = root_cause(ordered, size)
        assert (cause.rank, status_of(cause)) == (rank, status)
        assert cause.message.startswith(begins)


@pytest.mark.parametrize(
    ("exit_codes", "reports", "rank", "status", "message"),
    [
        ({1: -signal.SIGTERM}, [], 1, "failed", ALONE.format(1)),
        ({1: -signal.SIGTERM}, [lost(0, 1.0)], 1, "failed", ALONE.format(1)),
        ({0: -signal.SIGTERM, 1: -signal.SIGTERM}, [], 0, "preempted", "stopped by SIGTERM"),
        ({0: -signal.SIGTERM, 1: -signal.SIGINT}, [], 0, "failed", ALONE.format(0)),
        ({0: -signal.SIGTERM, 1: 1}, [lost(1, 1.0)], 0, "failed", ALONE.format(0)),
        ({0: -signal.SIGTERM, 1: 1}, [raised(1, 1.0)], 1, "failed", "bad input"),
        ({0: 0, 1: 1}, [lost(1, 1.0)], 0, "failed", f"rank 0 left no report; rank 1 then saw: {CLOSED}"),
        ({0: 0, 1: 7}, [], 1, "failed", "ended with exit status 7 and without a report"),
    ],
)
def test_where_the_parent_saw_how_ranks_ended(exit_codes, reports, rank, status, message):
    later = [replace(failure, time=time.time()) for failure in describe_exits(exit_codes, 2)]
    cause = root_cause([*reports, *later], 2)
    assert (cause.rank, status_of(cause), cause.message) == (rank, status, message)
