"""A run as TensorBoard shows it: curves over its steps, and one line of the HPARAMS tab.

Written from a run's record, when it is over and after every evaluation, so that nothing of it lies on the timed path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def write_tensorboard(directory: Path, record: Mapping[str, Any], shown: int = 0) -> None:
    """Write a record's event file into ``directory``, which TensorBoard then shows as one run.

    The first ``shown`` steps and their evaluations are left out: a :class:`Live` has written them already.

    Per step: ``step/loss``, ``step/seconds`` (of the slowest rank), ``step/tokens_per_second`` or
    ``step/samples_per_second``, ``step/memory_bytes`` (``step_memory_bytes`` of the record, the maximum over
    ranks), ``step/learning_rate``, ``step/data_wait_share`` (of the step's time), and ``step/gradient_norm`` where it
    is clipped.
    Per evaluation: ``eval/loss``, ``eval/top1``, ``eval/top5`` and ``eval/bits_per_byte``, as far as there are such.
    Per run: the hparams, and the metrics as ``summary/...``.
    """
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory)) as writer:
        _write_steps(writer, record, shown)
        _write_summary(writer, record)


class Live:
    """Shows a run's curves while it goes on, as far as the ranks have agreed on them.

    Attributes:
        shown: How many of the run's steps it has written.
    """

    def __init__(self, directory: Path) -> None:
        self.shown = 0
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def show(self, record: Mapping[str, Any]) -> None:
        """Write what is new in a record since the last time; see :func:`write_tensorboard`."""
        from torch.utils.tensorboard import SummaryWriter

        first = len(record["losses"]) - len(record["rank_step_seconds"][0])
        # A start of the run that was killed may have shown steps that are done once more now.
        self._writer = self._writer or SummaryWriter(str(self._directory), purge_step=first or None)
        _write_steps(self._writer, record, self.shown)
        self._writer.flush()
        self.shown = len(record["losses"])

    def close(self) -> None:
        """End the event file, so that TensorBoard goes on to the next one."""
        if self._writer:
            self._writer.close()


def _write_steps(writer: SummaryWriter, record: Mapping[str, Any], shown: int) -> None:
    seconds = [max(ranks) for ranks in zip(*record.get("rank_step_seconds") or [], strict=False)]
    first = max(len(record.get("losses") or []) - len(seconds), 0)  # earlier starts of the run have written theirs
    unit, units_per_step = _throughput_unit(record)
    curves = {
        "step/loss": (record.get("losses") or [])[first:],
        "step/seconds": seconds,
        f"step/{unit}_per_second": [units_per_step / duration for duration in seconds],
        "step/memory_bytes": (record.get("step_memory_bytes") or [])[first:],
        "step/learning_rate": (record.get("learning_rates") or [])[first:],
        "step/gradient_norm": (record.get("gradient_norms") or [])[first:],
        "step/data_wait_share": [
            wait / duration for wait, duration in zip((record.get("wait_seconds") or [])[first:], seconds, strict=False)
        ],
    }
    # The steps' own wall times: curves are written long after the steps.
    started = datetime.fromisoformat(record["started"]).timestamp()
    ends = [started + elapsed for elapsed in accumulate(seconds)]
    for tag, values in curves.items():
        for step, (value, end) in enumerate(zip(values, ends, strict=False), start=first):
            if value is not None and step >= shown:
                writer.add_scalar(tag, value, step, walltime=end)
    for evaluation in record.get("evaluations") or []:
        done = evaluation["step"] - first
        if done > 0 and evaluation["step"] > shown:
            for name in ("loss", "top1", "top5", "bits_per_byte"):
                if evaluation[name] is not None:
                    writer.add_scalar(f"eval/{name}", evaluation[name], evaluation["step"], walltime=ends[done - 1])


def _write_summary(writer: SummaryWriter, record: Mapping[str, Any]) -> None:
    """The hparams and summary metrics.

    ``SummaryWriter.add_hparams`` would open a second run below this one, and TensorBoard would then show
    each run twice; its three summaries go into this run's own file instead.
    """
    from torch.utils.tensorboard.summary import hparams

    figures = _summary_figures(record)
    experiment, session_start, session_end = hparams(_hparams(record), figures)
    assert writer.file_writer is not None  # open until the writer is closed
    writer.file_writer.add_summary(experiment)
    writer.file_writer.add_summary(session_start)
    if record["status"] == "ok":  # the session end that torch builds says "success"
        writer.file_writer.add_summary(session_end)
    last_step = max(len(record.get("losses") or []) - 1, 0)
    for tag, value in figures.items():
        if value is not None:
            writer.add_scalar(tag, value, last_step)


def _hparams(record: Mapping[str, Any]) -> dict[str, str | float]:
    """What tells the runs of a sweep apart.

    Every run has all of them, because TensorBoard takes the columns from whichever run it reads first. It shows
    the first five of the alphabet and hides the others until they are ticked: hence the ``x_`` of those that matter
    less, the factors of the layout.
    """
    layout = record.get("layout") or {}
    factors = ("data", "pipeline", "micro_batch", "microbatches", "accumulation")
    return {
        **{name: str(record.get(name) or "") for name in ("model", "parallel", "precision")},
        **{name: record.get(name) or 0 for name in ("world_size", "global_batch")},
        **{f"x_{name}": layout.get(name) or 0 for name in factors},
        "x_status": str(record["status"]),
    }


def _summary_figures(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics by tag, for every run the same tags; a failed run has few values."""
    metrics = record.get("metrics") or {}
    last: Mapping[str, float | None] = next(reversed(record.get("evaluations") or [{}]))
    names: Sequence[str] = (
        "tokens_per_second",
        "samples_per_second",
        "model_flops_per_second",
        "mfu",
        "peak_memory_bytes",
        "first_step_seconds",
    )
    return {
        **{f"summary/{name}": metrics.get(name) for name in names},
        "summary/step_seconds_median": (metrics.get("step_seconds") or {}).get("median"),
        "summary/last_loss": next(reversed(record.get("losses") or [None])),
        **{f"summary/{name}": last.get(name) for name in ("top1", "bits_per_byte")},
    }


def _throughput_unit(record: Mapping[str, Any]) -> tuple[str, float]:
    """What throughput counts, and how many of it a step makes."""
    batch, tokens = record.get("global_batch") or 0, record.get("tokens_per_sample")
    return ("tokens", batch * tokens) if tokens else ("samples", batch)
