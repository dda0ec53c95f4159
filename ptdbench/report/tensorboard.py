"""A run as TensorBoard shows it: curves over its steps, and one line of the HPARAMS tab.

Written while a run goes on, whenever its ranks have brought their steps together, and when it is over: nothing of it
lies on the timed path, and a run that is killed has its curves all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ptdbench.records.schema import Written
from ptdbench.report import scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def write_tensorboard(directory: Path, record: Written, shown: int = 0) -> None:
    """Write the event file of the run in ``directory``, which TensorBoard then shows as one run.

    :func:`ptdbench.report.scalars.remaining` lists the curves; those before step ``shown`` were written by a
    :class:`Live` and by earlier starts. Per run: the hparams, and the metrics as ``summary/...``.
    """
    from torch.utils.tensorboard import SummaryWriter

    found = scalars.remaining(directory, record, shown)
    with SummaryWriter(str(directory)) as writer:
        _write(writer, found)
        _write_hparams(writer, directory, record)
        _write_summary(writer, record)


class Live:
    """Shows a run's curves while it goes on, as far as the ranks have brought their steps together."""

    def __init__(self, directory: Path) -> None:
        self.shown = 0  #: How many of the run's steps there are, those of earlier starts included.
        self._curves = scalars.Curves()
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def show(self, record: Written, first: int, rows: np.ndarray, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Write what is new; the arguments are those of :meth:`ptdbench.report.scalars.Curves.advance`."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            _expect_full_disks()
            # A start of the run that was killed may have shown steps that are done once more now.
            self._writer = SummaryWriter(str(self._directory), purge_step=first or None)
            _write_hparams(self._writer, self._directory, record)
        _write(self._writer, self._curves.advance(record, first, rows, evaluations))
        _write_summary(self._writer, record)
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


def _write(writer: SummaryWriter, found: Sequence[scalars.Scalar]) -> None:
    for tag, value, step, at in found:
        writer.add_scalar(tag, value, step, walltime=at)


def _write_hparams(writer: SummaryWriter, directory: Path, record: Written) -> None:
    """Write the run's row of the HPARAMS tab, and of a run that was ok that it has ended.

    ``SummaryWriter.add_hparams`` would open a second run below this one, and TensorBoard would then show
    each run twice; its three summaries go into this run's own file instead.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    swept = scalars.swept(directory)
    experiment, session_start, session_end = hparams(scalars.hparams(record, swept), scalars.summary(record))
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


def _write_summary(writer: SummaryWriter, record: Written) -> None:
    """The metrics of the run so far; of each the last one written counts. And that it is none that was measured."""
    if record.get("kind"):
        writer.add_text("kind", str(record["kind"]))
    for tag, value in scalars.summary(record).items():
        if value is not None:
            writer.add_scalar(tag, value, scalars.last_step(record))
