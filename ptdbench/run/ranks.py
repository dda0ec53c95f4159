"""The ranks of a run on this machine: started, watched, and if one fails, the cause found in what they left."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from ptdbench.launch import local, settings
from ptdbench.launch.world import discover
from ptdbench.measure import memory
from ptdbench.measure.timing import Stopwatch
from ptdbench.problems import ConfigError
from ptdbench.records import failure, store
from ptdbench.records.failure import root_cause
from ptdbench.records.ownership import Attempt
from ptdbench.report.display import Heading
from ptdbench.run import ending, rank
from ptdbench.setup import run_spec
from ptdbench.setup.config import Config
from ptdbench.terminal import transient

#: Seconds that ranks get to finish the current step and record their results when the run is asked to stop: without and
#: with a checkpoint to save.
STOP_GRACE, SAVE_GRACE = 10.0, 120.0


def start(config: Config, attempt: Attempt, watch: Stopwatch, heading: Heading) -> None:
    """Start the ranks of a claimed run; if one fails, determine the cause from the reports that they left.

    Raises:
        Stopped: A signal asked this process to stop; the record is written.
    """
    size = store.load_record(attempt.directory)["world_size"]
    grace = SAVE_GRACE if config.checkpoint.every_steps else STOP_GRACE
    killed = memory.oom_kills()
    try:
        with transient(f"{heading} · starting the ranks…", sys.stderr):
            where = run_spec.place(config, size)
            local.start(_as_rank, size, attempt, watch, heading, grace=grace, where=where)
    except ConfigError as lack:  # the tools to build virtual GPUs are missing
        ending.fail(attempt, failure.describe(lack, rank=-1))
    except local.RankDied as death:
        exits = failure.describe_exits(death.exit_codes, size, memory.oom_kills() - killed)
        ending.fail(attempt, root_cause([*failure.read_failures(attempt.failures), *exits], size))
    except local.LaunchError as error:
        ending.fail(attempt, failure.describe(error, rank=-1))
    except local.Stopped as stop:
        reports = failure.read_failures(attempt.failures)
        # A stopped rank does not know that all were. Without reports the ranks may have saved, and recorded it.
        conclude = ending.fail if reports and all(map(failure.is_stop, reports)) else ending.fail_if_open
        conclude(attempt, failure.describe(stop, rank=-1))
        raise
    else:
        reason = "every rank ended with exit status 0 and without a result"
        ending.fail_if_open(attempt, failure.Failure(-1, "ExitStatus", reason))


def _as_rank(environ: Mapping[str, str], attempt: Attempt, watch: Stopwatch, heading: Heading) -> None:
    """Run as a local rank, after applying the settings that the fork server could not know."""
    local.die_on_signals()
    settings.enable_expandable_segments(os.environ)
    settings.enable_sanitizer(os.environ)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all peers are on this machine
    world = discover(os.environ)
    assert world is not None  # local.start has just set torchrun's variables
    rank.take_part(replace(world, launcher="local"), attempt, watch, heading)
