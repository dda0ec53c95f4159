"""Loggers of a training run's scalars: TensorBoard, and Weights & Biases, by ``logger=wandb``.

Scalars are written whenever the ranks drain their steps, outside the timed path, and at the end. A service never ends a
run: the first error is reported, and nothing more is sent than that the run has ended. TensorBoard's disk may have
space again later: it gets what is missing at the end.
"""

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ptdbench.problems import first_line
from ptdbench.records.effects import short_names
from ptdbench.records.ledger import sweep_of
from ptdbench.records.run_record import RunRecord, typed
from ptdbench.records.schema import Evaluation, Written
from ptdbench.report import scalars
from ptdbench.report.scalars import Scalar
from ptdbench.terminal import echo

#: A file beside the record with the service's name of the run, under which a resumed run continues.
FILE = "logger.json"

#: Timeout of a service in seconds.
_TIMEOUT = 30


@dataclass(frozen=True)
class Start:
    """A start of a run, as described to services."""

    directory: Path  #: The run's directory.
    first: int  #: Its first step, counted over all starts.
    earlier: str | None  #: The service's name of an earlier start, which goes on if ``first`` is above 0, or ``None``.
    sweep: str | None  #: The name of its sweep, if it is part of one.
    hparams: Mapping[str, str | float]  #: Hyperparameters that distinguish it from other runs.
    swept: Collection[str]  #: The hyperparameters to which the sweep gives several values.
    metrics: Mapping[str, float | None]  #: Figures of the whole run; every run has the same keys.
    kind: str | None  #: The kind of run, if it is not measured.


class Service(Protocol):
    """The type of ``logger=<name>``."""

    package: str  #: The package to import, and the name of the optional dependencies that install it.

    def begin(self, start: Start) -> str:
        """Open the run, and return the service's name of it; empty if there is none."""
        ...

    def send(self, points: Sequence[Scalar], summary: Mapping[str, float], last_step: int) -> None:
        """Add these points to the curves, and set the figures of the whole run."""
        ...

    def end(self, is_ok: bool) -> None:
        """Close the run."""
        ...


class TensorBoard:
    """TensorBoard, which every run writes: curves over its steps, and one row of the HPARAMS tab."""

    package = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None
        self._session_end: Any = None

    def begin(self, start: Start) -> str:
        """See :class:`Service`.

        ``SummaryWriter.add_hparams`` would create a second run below this one, and TensorBoard would show each run
        twice; so its three summaries are written to this run's own file.
        """
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        _expect_full_disks()
        # Purge steps that a killed start, or a file on a full disk, already has.
        self._writer = SummaryWriter(str(start.directory), purge_step=start.first)
        experiment, session_start, self._session_end = hparams(start.hparams, start.metrics)
        content = experiment.value[0].metadata.plugin_data
        declared = HParamsPluginData.FromString(content.content)
        for info in declared.experiment.hparam_infos:
            info.differs = info.name in start.swept  # shown first
        content.content = declared.SerializeToString()
        self._writer.file_writer.add_summary(experiment)
        self._writer.file_writer.add_summary(session_start)
        if start.kind:
            self._writer.add_text("kind", start.kind)
        return ""

    def send(self, points: Sequence[Scalar], summary: Mapping[str, float], last_step: int) -> None:
        """See :class:`Service`; the figures written last count."""
        for tag, value, step, time in points:
            self._writer.add_scalar(tag, value, step, walltime=time)
        for tag, value in summary.items():
            self._writer.add_scalar(tag, value, last_step)
        self._writer.flush()

    def end(self, is_ok: bool) -> None:
        """See :class:`Service`; torch's session end always says "success"."""
        if is_ok:
            self._writer.file_writer.add_summary(self._session_end)
        self._writer.close()


def _expect_full_disks() -> None:
    """Let the thread that writes events fail without a traceback: its writer raises the error again."""
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__name__ == "_AsyncWriterThread"):
            before(failed)

    threading.excepthook = hook


def none() -> None:
    """No service."""


class WandB:
    """Weights & Biases.

    Args:
        project: The project of the runs.
        entity: A user or a team; ``null``: the default of the account.
        mode: ``online``, or ``offline``: files in the run's directory, for ``wandb sync``; ``null``: ``WANDB_MODE``,
            else ``online``.
    """

    package = "wandb"

    def __init__(
        self, project: str, entity: str | None = None, mode: Literal["online", "offline"] | None = None
    ) -> None:
        self._project, self._entity, self._mode = project, entity, mode
        self._run: Any = None

    def begin(self, start: Start) -> str:
        """See :class:`Service`."""
        os.environ.setdefault("WANDB_SILENT", "true")  # otherwise it may ask for a key, and wait
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            x_disable_stats=True,  # its sampling would run during steps
            reinit="create_new",  # otherwise W&B would continue an earlier run of this process that was not closed
            init_timeout=_TIMEOUT,
            finish_timeout=_TIMEOUT,
            finish_timeout_raises=True,
        )
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            dir=str(start.directory),
            name=start.directory.name,
            group=start.sweep,
            config=dict(start.hparams),
            id=start.earlier if start.first else None,
            resume="allow",
            settings=settings,
        )
        return str(self._run.id)

    def send(self, points: Sequence[Scalar], summary: Mapping[str, float], last_step: int) -> None:
        """See :class:`Service`."""
        rows: dict[int, dict[str, float]] = defaultdict(dict)
        for tag, value, step, _ in points:
            rows[step][tag] = value
        for step in sorted(rows):
            self._run.log(rows[step], step=step)
        self._run.summary.update(dict(summary))

    def end(self, is_ok: bool) -> None:
        """See :class:`Service`."""
        self._run.finish(exit_code=0 if is_ok else 1)


class Log:
    """Sends the curves of a run's current start to a service during the run."""

    def __init__(self, service: Service, directory: Path) -> None:
        self._service = service
        self._directory = directory
        self._end: float | None = None  # when the last of the steps sent ended
        self._shown = self._evaluated = 0  # number of steps sent, and the step of the last evaluation sent
        self._is_open = self._is_ok = False
        self._failure: Exception | None = None
        self._is_patient = isinstance(service, TensorBoard)  # retries at the end before it reports an error

    def show(self, record: RunRecord, first: int, rows: np.ndarray, evaluations: Sequence[Evaluation]) -> None:
        """Send new points; arguments as for :func:`ptdbench.report.scalars.advance`."""

        def send() -> None:
            points, self._end = scalars.advance(record, first, rows, evaluations, self._end)
            self._send(record, points, first)

        self._try(send)
        self._shown = first + len(rows)
        self._evaluated = max((evaluation.step for evaluation in evaluations), default=self._evaluated)

    def finish(self, written: Written, closes: bool = True) -> None:
        """Send the remaining points of the run with this record, and close it unless more is to come."""
        is_patient, self._is_patient = self._is_patient, False
        if self._failure and is_patient:  # start a new file, whose steps replace those in the last one
            self._is_open, self._failure = False, None
            self._shown = self._evaluated = 0

        def send() -> None:
            record = typed(written)
            points = scalars.remaining(self._directory, record, self._shown, self._evaluated)
            self._send(record, points, record.first_step)
            self._shown = self._evaluated = record.steps or 0

        self._try(send)
        self._is_ok = written["status"] == "ok"
        if closes:
            self._close()

    def abort(self, tells: bool = True) -> None:
        """Close the run as one that failed; ``tells``: report an error that was to be tried again."""
        if self._failure and self._is_patient and tells:
            self._report(self._failure)
        self._is_patient = False
        self._close()

    def _close(self) -> None:
        """Close the run, even after an error: a service that is back would otherwise show it as running forever."""
        try:
            if self._is_open:
                self._service.end(self._is_ok)
        except Exception as error:  # as above
            if not self._failure:
                self._report(error)

    def _send(self, record: RunRecord, points: Sequence[Scalar], first: int) -> None:
        if not self._is_open:
            self._open(record, first)
            points = [*scalars.evaluated_at(record, first), *points]  # opening purges events from this step on
        summary = {tag: value for tag, value in scalars.summary(record).items() if value is not None}
        self._service.send(points, summary, max((record.steps or 0) - 1, 0))

    def _open(self, record: RunRecord, first: int) -> None:
        path = self._directory / FILE
        earlier = None
        with suppress(OSError, ValueError, AttributeError):  # AttributeError: it holds something else
            earlier = json.loads(path.read_text()).get(self._service.package)
        sweep, swept = sweep_of(self._directory), scalars.swept(self._directory)
        hparams, metrics = scalars.hparams(record, swept), scalars.summary(record)
        names, within = short_names(swept).values(), sweep.name if sweep else None
        start = Start(self._directory, first, earlier, within, hparams, names, metrics, record.kind)
        name = self._service.begin(start)
        self._is_open = True
        if name:
            path.write_text(json.dumps({self._service.package: name}))

    def _try(self, step: Callable[[], None]) -> None:
        try:
            if not self._failure:
                step()
        except Exception as error:  # a third-party service may raise anything
            self._failure = error
            if not self._is_patient:
                self._report(error)

    def _report(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {first_line(error)}"
        others = "the record has" if isinstance(self._service, TensorBoard) else "TensorBoard and the record have"
        rest = f"the run goes on without it; {others} everything"
        echo(f"logger: {self._service.package} failed: {cause}; {rest}", sys.stderr)
