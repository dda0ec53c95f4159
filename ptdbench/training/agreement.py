"""The result of a training run: the fields of its record, on which all ranks agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptdbench.job import Job, Outcome
from ptdbench.launch.together import gather
from ptdbench.training.figures import first_not_finite
from ptdbench.training.recorder import Recorder


def outcome(job: Job, recorder: Recorder, remarks: Mapping[str, Any]) -> Outcome:
    """Compute the record's fields and whether the run diverged; called in all ranks after the last step.

    Args:
        job: The run.
        recorder: Holds the steps of the run.
        remarks: Remarks for the record.

    Returns:
        The error on every rank; all fields on rank 0, and only the remarks on other ranks.
    """
    shown = recorder.finish()
    fields = recorder.figures()
    # The series of the whole run are on rank 0, and whether others follow it into the profiling pass depends on them.
    wrong = gather(first_not_finite(recorder.path) if job.world.is_first else None)[0]
    error = None if wrong is None else FloatingPointError(f"the loss of step {wrong} is not a finite number")
    if not job.world.is_first:
        return Outcome({"remarks": dict(remarks)}, error=error)
    return Outcome({**fields, "remarks": dict(remarks)}, error=error, shown=shown, log=recorder.log)
