"""Logging services: they get what TensorBoard gets, and never end a run. W&B is the real one, offline."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ptdbench.records import ledger, record, series
from ptdbench.records.run_record import RunRecord
from ptdbench.report import loggers, scalars
from ptdbench.report.loggers import Log, Service, Start
from ptdbench.report.scalars import Scalar
from ptdbench.setup import choices, config, run_spec
from tests.conftest import composed, read
from tests.refusals import Abridged, refusal_of
from tests.report.test_tensorboard import LOOKS, RECORD, rows
from tests.workloads.made_task import TASK

RUN = (*TASK, "parallel=ddp", "train.steps=6", "eval.every=3", "profile.steps=0")


@dataclass
class Kept:
    """A service that keeps what it gets, and fails from a certain call on."""

    fails_at: int = 99
    package: str = "kept"
    calls: list[str] = field(default_factory=list)
    opened: list[Start] = field(default_factory=list)
    points: list[Scalar] = field(default_factory=list)
    summary: Mapping[str, float] = field(default_factory=dict)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) > self.fails_at:
            raise ConnectionError("gone\nfor good")

    def begin(self, start: Start) -> str:
        self._called("begin")
        self.opened.append(start)
        return start.earlier or "abc"

    def send(self, found: Sequence[Scalar], summary: Mapping[str, float], last_step: int) -> None:
        self._called("send")
        self.points += found
        self.summary = summary

    def end(self, is_ok: bool) -> None:
        self._called(f"end {is_ok}")


def shown(service: Service, directory: Path) -> Log:
    """What has sent two of three steps, the first of which was evaluated."""
    series.append(directory / series.NAME, rows())
    log = Log(service, directory)
    log.show(RECORD, 0, rows()[:1], LOOKS[:1])
    log.show(RECORD, 1, rows()[1:2], [])
    return log


class TestLog:
    @pytest.mark.parametrize("left", [1, 0])  # steps that were not shown on the way
    def test_every_point_is_sent_once_and_as_to_tensorboard(self, tmp_path, left):
        service = Kept()
        log = shown(service, tmp_path)
        if not left:
            log.show(RECORD, 2, rows()[2:], [])
        log.finish(RECORD.written)
        assert service.calls == ["begin", *["send"] * (4 - left), "end True"]
        whole = scalars.remaining(tmp_path, RECORD)
        assert len(service.points) == len(whole)
        assert set(service.points) == set(whole)
        assert service.summary["summary/last_loss"] == 3.5

    def test_one_that_breaks_off_has_failed(self, tmp_path):
        service = Kept()
        shown(service, tmp_path).abort()
        assert service.calls[-1] == "end False"
        unopened = Kept()
        Log(unopened, tmp_path).abort()
        assert unopened.calls == []

    @pytest.mark.parametrize("fails_at", range(5))
    def test_a_service_that_fails_is_reported_once_and_asked_only_to_close_what_is_open(
        self, tmp_path, capsys, fails_at
    ):
        service = Kept(fails_at)
        shown(service, tmp_path).finish(RECORD.written)
        assert service.calls[fails_at + 1 :] == (["end True"] if 0 < fails_at < 4 else [])
        rest = "the run goes on without it; TensorBoard and the record have everything"
        assert capsys.readouterr().err == f"logger: kept failed: ConnectionError: gone; {rest}\n"

    @pytest.mark.parametrize("end", [lambda log: log.finish(RECORD.written), Log.abort], ids=["finish", "abort"])
    def test_where_tensorboard_fails_only_the_record_has_everything(self, tmp_path, capsys, end):
        (tmp_path / "no folder").touch()
        log = Log(loggers.TensorBoard(), tmp_path / "no folder")
        log.show(RECORD, 0, rows()[:1], [])
        assert capsys.readouterr().err == ""  # the disk may have room again
        end(log)
        told = "logger: tensorboard failed: …; the run goes on without it; the record has everything"
        assert capsys.readouterr().err.splitlines() == [Abridged(told)]

    def test_a_start_that_goes_on_knows_the_run(self, tmp_path):
        shown(Kept(), tmp_path)
        assert json.loads((tmp_path / loggers.FILE).read_text()) == {"kept": "abc"}
        service = Kept()
        Log(service, tmp_path).show(RECORD, 1, rows()[1:], [])
        assert (service.opened[0].earlier, service.opened[0].first) == ("abc", 1)

    def test_runs_of_a_sweep_belong_together_and_have_its_options(self, tmp_path):
        directory = tmp_path / "my_sweep" / "nested" / "0_toy"
        directory.mkdir(parents=True)
        ledger.begin(tmp_path / "my_sweep", ["optimizer.lr=0.1,0.2"])
        series.append(directory / series.NAME, rows())
        service = Kept()
        Log(service, directory).finish((RECORD | {"config": {"optimizer": {"lr": 0.2}}}).written)
        (start,) = service.opened
        assert start.sweep == "my_sweep"
        assert [start.hparams[name] for name in ("lr", "parallel", "ranks")] == [0.2, "pdp", 2]


class TestRefused:
    def test_a_package_that_is_not_installed(self, monkeypatch):
        monkeypatch.setattr(run_spec.importlib.util, "find_spec", lambda package: None)
        rule = "needs the package wandb, which is not installed; try pip install 'ptdbench[wandb]'"
        assert self.problem("logger=wandb") == f"logger=wandb: {rule}"

    def test_a_workload_that_does_not_train(self):
        rule = "logs the curves of training, and workload=hello does not train; omit it"
        assert self.problem("logger=wandb", "workload=hello") == f"logger=wandb: {rule}"

    @staticmethod
    def problem(*overrides: str) -> str:
        return refusal_of(run_spec.specify, read("model=toy", "device=cpu", *overrides), None)


def test_none_is_the_default_and_no_choice_changes_the_identity_of_a_run():
    plain, logged = composed("model=toy", "device=cpu"), composed("model=toy", "device=cpu", "logger=wandb")
    assert choices.build(config.read(plain), "logger") is None
    assert record.fingerprint(config.resolve(plain)) == record.fingerprint(config.resolve(logged))


def curves_of(directory: Path, found: RunRecord) -> dict[str, dict[int, float]]:
    """What a service should have of a run, by its record and its series: each tag by its steps."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for tag, value, step, _ in scalars.remaining(directory, found):
        curves[tag][step] = value
    return curves


def summary_of(found: RunRecord) -> dict[str, float]:
    return {tag: value for tag, value in scalars.summary(found).items() if value is not None}


def wandb_records(path: Path) -> Iterator[Any]:
    """The messages in a file of W&B's offline mode, which has the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            found = Record()
            found.ParseFromString(message)
            message = b""
            yield found


def test_wandb_gets_a_run_of_its_own_where_an_earlier_one_of_this_process_is_open(tmp_path):
    """Under a launcher one process carries out all runs of a sweep, and W&B may have failed in one of them."""
    starts = [Start(tmp_path / name, 0, None, None, {}, [], {}, None) for name in ("0_ddp", "1_fsdp")]
    services = [loggers.WandB("any", mode="offline") for _ in starts]
    for start in starts:
        start.directory.mkdir()
    names = {service.begin(start) for service, start in zip(services, starts, strict=True)}
    for service in services:
        service.end(is_ok=True)
    assert len(names) == 2


def test_wandb_offline_has_the_series_of_the_record(tmp_path):
    import wandb

    shown(loggers.WandB("any", mode="offline"), tmp_path).finish(RECORD.written)
    wandb.teardown()  # which ends the process that writes the file
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    summary, hparams, ends = {}, {}, []
    for message in wandb_records(path):
        kind = message.WhichOneof("record_type")
        if kind == "history":
            row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in message.history.item}
            for tag in row.keys() - {"_step", "_timestamp", "_runtime"}:
                curves[tag][row["_step"]] = row[tag]
        elif kind == "summary":
            summary |= {item.key: json.loads(item.value_json) for item in message.summary.update if item.key}
        elif kind == "run":
            hparams |= {item.key: json.loads(item.value_json) for item in message.run.config.update}
        elif kind == "exit":
            ends.append(message.exit.exit_code)
    assert curves == curves_of(tmp_path, RECORD)
    assert {tag: value for tag, value in summary.items() if tag.startswith("summary/")} == summary_of(RECORD)
    assert (hparams["model"], hparams["parallel"], hparams["ranks"]) == ("gpt_tiny", "pdp", 2)
    assert ends == [0]
