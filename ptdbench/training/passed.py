"""A run that passes its ceiling: this is measured again after the last step, and a remark says what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptdbench.job import Job
from ptdbench.launch.together import gather
from ptdbench.measure import gemm
from ptdbench.measure.ceiling import Measured
from ptdbench.measure.metrics import against_ceiling
from ptdbench.problems import ConfigError
from ptdbench.training.figures import dtype_of
from ptdbench.units import flops_text

#: Why a share above 100 % may be right.
_LOADED = "other load slowed the products down"
_OTHERWISE = (
    "products are measured in a few shapes and from a cold cache, and model FLOPs count attention in full, although a "
    "causal kernel skips half of it"
)


def check(job: Job, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the ceiling again if the run passed it; called in all ranks, after the last step.

    Args:
        job: The run.
        fields: The fields of its record, with its ``metrics`` on rank 0.

    Returns:
        The fields; on rank 0, and if the run passed its ceiling, with the higher one and a remark.
    """
    share = (fields.get("metrics") or {}).get("share_of_ceiling") or 0.0
    if not gather(share > 1)[0]:
        return dict(fields)
    with job.watchdog.paused(), job.display.during("measuring the ceiling again"):
        try:
            again: Measured | str = gemm.measure_again(job.world, job.device, dtype_of(job), job.watchdog.alive)
        except ConfigError as lack:  # of memory, in all ranks: the model takes some
            again = str(lack)
    if not job.world.is_first:
        return dict(fields)
    metrics, remark = conclude(fields["metrics"], job.world.size, again)
    return {**fields, "metrics": metrics, "remarks": {**fields["remarks"], "ceiling": remark}}


def conclude(metrics: Mapping[str, Any], world_size: int, again: Measured | str) -> tuple[dict[str, Any], str]:
    """The figures against the higher of two ceilings, and what happened in words.

    Args:
        metrics: Those of the run, against the earlier ceiling.
        world_size: Number of ranks.
        again: The new ceiling, or why there is none.
    """
    earlier = Measured(metrics["ceiling_flops_per_second"], "", metrics["ceiling_beside_load"])
    best = again if isinstance(again, Measured) and again.flops_per_second > earlier.flops_per_second else earlier
    figures = {**metrics, **against_ceiling(best, None, metrics["model_flops_per_second"] / world_size)}
    if isinstance(again, str):
        remark = f"ceiling passed, and not re-measured: {again}"
    elif best is again:
        remark = f"ceiling re-measured: was {_text(earlier)}; now {_text(again)}"
    else:
        remark = f"ceiling re-measured: {_text(again)} is not above the earlier {_text(earlier)}"
    if figures["share_of_ceiling"] > 1:
        remark += f"; the model reaches {figures['share_of_ceiling']:.1%} of it: "
        remark += _LOADED if best.beside_load else _OTHERWISE
    return figures, remark


def _text(ceiling: Measured) -> str:
    return flops_text(ceiling.flops_per_second) + ", taken beside other load" * bool(ceiling.beside_load)
