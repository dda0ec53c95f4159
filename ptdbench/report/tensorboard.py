"""A run as TensorBoard shows it: curves over its steps, and one line of the HPARAMS tab.

Written while a run goes on, whenever its ranks have brought their steps together, and when it is over: nothing of it
lies on the timed path, and a run that is killed has its curves all the same.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ptdbench.problems import as_typed
from ptdbench.records import ledger, series
from ptdbench.records.load import SERIES, Run
from ptdbench.records.store import Damaged
from ptdbench.report.differences import options

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def write_tensorboard(directory: Path, record: Mapping[str, Any], shown: int = 0) -> None:
    """Write the event file of the run in ``directory``, which TensorBoard then shows as one run.

    The steps of the run's last start are written, without those before step ``shown`` and their evaluations: a
    :class:`Live`, and earlier starts, have written them already.

    Per step: ``step/loss``, ``step/seconds`` (of the slowest rank), ``step/tokens_per_second`` or
    ``step/samples_per_second``, ``step/memory_bytes`` (the maximum over ranks), ``step/learning_rate``,
    ``step/data_wait_share`` (of the step's time), and ``step/gradient_norm`` where it is clipped.
    Per evaluation: ``eval/loss``, ``eval/top1``, ``eval/top5`` and ``eval/bits_per_byte``, as far as there are such.
    Per run: the hparams, and the metrics as ``summary/...``.
    """
    from torch.utils.tensorboard import SummaryWriter

    run = Run(record, directory)
    first = run["segments"][-1]["first_step"] if run.get("segments") else 0
    columns = {column: run.series(name)[first:] for name, column in SERIES.items() if column in _SHOWN}
    with SummaryWriter(str(directory)) as writer:
        _write_steps(writer, record, first, columns, record.get("evaluations") or [], _started(record), shown)
        _write_hparams(writer, directory, record)
        _write_figures(writer, record)


class Live:
    """Shows a run's curves while it goes on, as far as the ranks have brought their steps together.

    Attributes:
        shown: How many of the run's steps there are, those of earlier starts included.
    """

    def __init__(self, directory: Path) -> None:
        self.shown = 0
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._end: float | None = None

    def show(
        self, record: Mapping[str, Any], first: int, rows: np.ndarray, evaluations: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write what is new; see :func:`write_tensorboard`.

        Args:
            record: The run's record so far.
            first: The step of the first row.
            rows: Those of the steps since the last call, as :func:`ptdbench.records.series.unknown` makes them.
            evaluations: Those of these steps.
        """
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            _expect_full_disks()
            # A start of the run that was killed may have shown steps that are done once more now.
            self._writer = SummaryWriter(str(self._directory), purge_step=first or None)
            _write_hparams(self._writer, self._directory, record)
        columns = {name: series.column([rows], name) for name in _SHOWN}
        begin = _started(record) if self._end is None else self._end
        self._end = _write_steps(self._writer, record, first, columns, evaluations, begin, first)
        _write_figures(self._writer, record)
        self._writer.flush()
        self.shown = first + len(rows)

    def close(self) -> None:
        """End the event file, so that TensorBoard goes on to the next one."""
        if self._writer:
            with suppress(OSError):  # what is not shown by now is written by write_tensorboard
                self._writer.close()


def _expect_full_disks() -> None:
    """Let the thread that writes events fail without a traceback: its writer raises the error once more."""
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__name__ == "_AsyncWriterThread"):
            before(failed)

    threading.excepthook = hook


#: How a value begins that Hydra takes for several.
_SWEEPS = re.compile(r"(glob|range|choice|interval)\(")

#: The columns that become curves.
_SHOWN = (*series.NUMBERS, "slowest_seconds")


def _write_steps(
    writer: SummaryWriter,
    record: Mapping[str, Any],
    first: int,
    columns: Mapping[str, np.ndarray],
    evaluations: Sequence[Mapping[str, Any]],
    begin: float,
    shown: int,
) -> float:
    """Write the steps from ``first`` on, which began at the time ``begin``, but for those before ``shown``.

    Returns:
        When the last of them ended.
    """
    seconds = columns["slowest_seconds"]
    unit, units_per_step = _throughput_unit(record)
    curves = {
        "step/loss": columns["loss"],
        "step/seconds": seconds,
        f"step/{unit}_per_second": units_per_step / seconds,
        "step/memory_bytes": columns["memory_bytes"],
        "step/learning_rate": columns["learning_rate"],
        "step/gradient_norm": columns["gradient_norm"],
        "step/data_wait_share": columns["wait_seconds"] / seconds,
    }
    # The steps' own wall times: curves are written long after the steps.
    ends = begin + np.cumsum(np.nan_to_num(seconds))
    for tag, values in curves.items():
        for place in np.flatnonzero(np.isfinite(values)):
            if first + place >= shown:
                writer.add_scalar(tag, values[place], first + place, walltime=ends[place])
    for evaluation in evaluations:
        place = evaluation["step"] - first - 1
        if 0 <= place < len(ends) and evaluation["step"] > shown:
            for name in ("loss", "top1", "top5", "bits_per_byte"):
                if evaluation[name] is not None:
                    writer.add_scalar(f"eval/{name}", evaluation[name], evaluation["step"], walltime=ends[place])
    return float(ends[-1]) if len(ends) else begin


def _started(record: Mapping[str, Any]) -> float:
    """When a run started, in seconds since the epoch."""
    return datetime.fromisoformat(record["started"]).timestamp()


def _write_hparams(writer: SummaryWriter, directory: Path, record: Mapping[str, Any]) -> None:
    """What the HPARAMS tab shows of the run, and of a run that was ok that it has ended.

    ``SummaryWriter.add_hparams`` would open a second run below this one, and TensorBoard would then show
    each run twice; its three summaries go into this run's own file instead.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    swept = _swept(directory)
    experiment, session_start, session_end = hparams(_hparams(record, swept), _figures(record))
    content = experiment.value[0].metadata.plugin_data
    declared = HParamsPluginData.FromString(content.content)
    for info in declared.experiment.hparam_infos:
        info.differs = info.name in swept.values()  # shown first
    content.content = declared.SerializeToString()
    assert writer.file_writer is not None  # open until the writer is closed
    writer.file_writer.add_summary(experiment)
    writer.file_writer.add_summary(session_start)
    if record["status"] == "ok":  # the session end that torch builds says "success"
        writer.file_writer.add_summary(session_end)


def _swept(directory: Path) -> dict[str, str]:
    """The options that a run's sweep gives several values, and what each is called: its last part if that is enough."""
    for parent in directory.resolve().parents:
        if (parent / ledger.LEDGER).exists():
            with suppress(Damaged):
                asked = (override.lstrip("+").partition("=") for override in ledger.read(parent).overrides)
                names = [name for name, _, value in asked if "," in value or _SWEEPS.match(value)]
                lasts = [name.rpartition(".")[2] for name in names]
                return {name: last if lasts.count(last) == 1 else name for name, last in zip(names, lasts, strict=True)}
    return {}


def _write_figures(writer: SummaryWriter, record: Mapping[str, Any]) -> None:
    """The metrics of the run so far; of each the last one written counts."""
    last_step = max((record.get("steps") or 0) - 1, 0)
    for tag, value in _figures(record).items():
        if value is not None:
            writer.add_scalar(tag, value, last_step)


def _hparams(record: Mapping[str, Any], swept: Mapping[str, str]) -> dict[str, str | float]:
    """What tells the runs of a sweep apart.

    Every run of it has all of them, because TensorBoard takes the columns from whichever run it reads first.
    """
    config = options(record.get("config") or {})
    values = {called: config.get(name) for name, called in swept.items()}
    return {
        **{name: str(record.get(name) or "") for name in ("model", "parallel", "precision")},
        **{called: record.get(name) or 0 for called, name in (("ranks", "world_size"), ("batch", "global_batch"))},
        **{
            name: value if isinstance(value, int | float) and not isinstance(value, bool) else as_typed(value)
            for name, value in values.items()
        },
    }


def _figures(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics by tag, for every run the same tags; a failed run has few values."""
    metrics = record.get("metrics") or {}
    last: Mapping[str, float | None] = next(reversed(record.get("evaluations") or [{}]))
    names: Sequence[str] = (
        "model_flops_per_second",
        "mfu",
        "peak_memory_bytes",
        "first_step_seconds",
    )
    return {
        "summary/ok": float(record["status"] == "ok"),  # no hparam: these are written before a run ends
        "summary/throughput": metrics.get(f"{_throughput_unit(record)[0]}_per_second"),  # one for any kind of data
        **{f"summary/{name}": metrics.get(name) for name in names},
        "summary/step_seconds_median": (metrics.get("step_seconds") or {}).get("median"),
        "summary/last_loss": record.get("final_loss"),
        **{f"summary/{name}": last.get(name) for name in ("top1", "bits_per_byte")},
    }


def _throughput_unit(record: Mapping[str, Any]) -> tuple[str, float]:
    """What throughput counts, and how many of it a step makes."""
    batch, tokens = record.get("global_batch") or 0, record.get("tokens_per_sample")
    return ("tokens", batch * tokens) if tokens else ("samples", batch)
