import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.summary.writer import event_file_writer

from ptdbench.records import ledger, series
from ptdbench.report.loggers import Log, TensorBoard
from tests.report.made import phased, run

RECORD = run(
    "pdp",
    tokens_per_sample=128,
    started="2026-01-02T03:04:05+00:00",
    steps=3,
    final_loss=3.5,
    metrics={"step_seconds": {"median": 0.5}, "tokens_per_second": 4096.0, "peak_memory_bytes": 400},
    evaluations=[
        {"step": step, "samples": 10, "loss": 1.5 / step, "top1": step / 4, "top5": 1.0, "bits_per_byte": None}
        for step in (1, 3)
    ],
)
LOOKS = RECORD.evaluations
FAILED = RECORD | {"status": "failed", "steps": None, "final_loss": None, "metrics": None, "evaluations": None}


def rows(losses=(5.0, 4.0, 3.5)) -> np.ndarray:
    made = series.unknown(3, ranks=2)
    made["loss"] = losses
    made["learning_rate"] = [0.5, 0.25, 0.125]
    made["gradient_norm"] = [3.0, 2.0, 1.0]
    made["wait_seconds"] = [0.5, 0.25, 0.0]
    made["memory_bytes"] = [100, 300, 200]
    made["step_seconds"] = [[2.0, 1.0], [0.5, 0.25], [0.25, 0.5]]  # slowest: 2.0, 0.5, 0.5
    return made


@pytest.fixture(autouse=True)
def _few_files(monkeypatch) -> None:
    """Files of one second are read in the order of their names: the tenth of a process would come before the ninth."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def shown(directory) -> EventAccumulator:
    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def written(directory, record, steps=None) -> EventAccumulator:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / series.NAME).unlink(missing_ok=True)
    if record.steps:
        series.append(directory / series.NAME, rows() if steps is None else steps)
    log(directory).finish(record.written)
    return shown(directory)


def log(directory) -> Log:
    return Log(TensorBoard(), directory)


def plugin_data(events: EventAccumulator, tag: str) -> plugin_data_pb2.HParamsPluginData:
    content = events.SummaryMetadata(tag).plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content)


def values(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_curves_over_the_steps_and_evaluations_at_their_own_wall_times(tmp_path):
    events = written(tmp_path, RECORD)
    curves = [tag for tag in events.Tags()["scalars"] if not tag.startswith("summary/")]
    assert {tag: values(events, tag) for tag in curves} == {
        "step/loss": [(0, 5.0), (1, 4.0), (2, 3.5)],
        "step/seconds": [(0, 2.0), (1, 0.5), (2, 0.5)],
        "speed/tokens_per_second": [(0, 1024.0), (1, 4096.0), (2, 4096.0)],
        "step/memory_bytes": [(0, 100.0), (1, 300.0), (2, 200.0)],
        "step/learning_rate": [(0, 0.5), (1, 0.25), (2, 0.125)],
        "step/gradient_norm": [(0, 3.0), (1, 2.0), (2, 1.0)],
        "step/data_wait_share": [(0, 0.25), (1, 0.5), (2, 0.0)],
        "validation/loss": [(1, 1.5), (3, 0.5)],
        "validation/top1": [(1, 0.25), (3, 0.75)],
        "validation/top5": [(1, 1.0), (3, 1.0)],
    }
    started = 1767323045  # date -u -d 2026-01-02T03:04:05 +%s
    assert [event.wall_time - started for event in events.Scalars("step/loss")] == [2.0, 2.5, 3.0]
    assert [event.wall_time - started for event in events.Scalars("validation/top1")] == [2.0, 3.0]


def test_the_phases_that_take_time_are_points_at_the_last_step(tmp_path):
    """A mean step of 100 ms, whose ranks spend 40 and 60 ms forward and 10 and 20 ms in exposed communication."""
    profiled = phased("pdp", 100, {"forward": [40, 60], "backward": [20, 20], "communication": [10, 20]})
    record = RECORD | {"phases": profiled["phases"]}
    events = written(tmp_path, record)
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("step_seconds/")]
    assert {tag.partition("/")[2]: values(events, tag) for tag in tags} == {
        "forward": [(2, pytest.approx(0.05))], "backward": [(2, pytest.approx(0.02))],
        "exposed_communication": [(2, pytest.approx(0.015))], "other": [(2, pytest.approx(0.015))],
    }  # fmt: skip
    assert sorted(events.Tags()["scalars"])[0] == "speed/tokens_per_second"  # TensorBoard shows it first


def test_images_are_counted_in_samples_and_curves_go_on_past_infinite_losses(tmp_path):
    metrics = {**RECORD["metrics"], "tokens_per_second": None, "samples_per_second": 5.0}
    events = written(tmp_path, RECORD | {"tokens_per_sample": None, "metrics": metrics})
    assert values(events, "speed/samples_per_second") == [(0, 8.0), (1, 32.0), (2, 32.0)]
    assert values(events, "summary/throughput") == [(2, 5.0)]
    assert "speed/tokens_per_second" not in events.Tags()["scalars"]
    assert values(written(tmp_path, RECORD, rows([5.0, np.nan, 3.0])), "step/loss") == [(0, 5.0), (2, 3.0)]


def test_the_run_is_one_session_with_its_hparams_and_metrics(tmp_path):
    events = written(tmp_path, RECORD)
    hparams = plugin_data(events, metadata.SESSION_START_INFO_TAG).session_start_info.hparams
    assert [hparams[name].string_value for name in ("model", "parallel", "precision")] == ["gpt_tiny", "pdp", "fp32"]
    assert [hparams[name].number_value for name in ("ranks", "batch")] == [2, 16]
    summary = {tag: values(events, tag) for tag in events.Tags()["scalars"] if tag.startswith("summary/")}
    assert summary == {
        "summary/ok": [(2, 1.0)], "summary/throughput": [(2, 4096.0)], "summary/step_seconds_median": [(2, 0.5)],
        "summary/peak_memory_bytes": [(2, 400.0)], "summary/last_loss": [(2, 3.5)], "summary/top1": [(2, 0.75)],
    }  # fmt: skip
    end = plugin_data(events, metadata.SESSION_END_INFO_TAG).session_end_info
    assert end.status == api_pb2.STATUS_SUCCESS


def test_a_failed_run_is_not_ok_and_has_no_success(tmp_path):
    events = written(tmp_path, FAILED)
    assert events.Tags()["scalars"] == ["summary/ok"]
    live = log(tmp_path / "diverged")  # what it had before counts neither: sorted by it, it might be the first
    live.show(RECORD | {"status": "unfinished"}, 0, rows()[:2], [])
    live.finish((RECORD | {"status": "diverged", "steps": 2}).written)
    tags = shown(tmp_path / "diverged").Tags()["scalars"]
    assert [tag for tag in tags if tag.startswith("summary/")] == ["summary/ok"]
    assert values(events, "summary/ok") == [(0, 0.0)]
    with pytest.raises(KeyError):
        events.SummaryMetadata(metadata.SESSION_END_INFO_TAG)


def test_every_option_that_was_swept_is_a_column_and_the_first(tmp_path):
    typed = ["model=toy", "parallel=ddp,fsdp", "parallel.schedule=1f1b,gpipe", "optimizer.lr=0.1,0.2", "+a.seed=1,2"]
    lists = ["optimizer.betas=[0.9,0.99]", "data.path='a,b'", "optimizer.milestones=[1,2],[3,4]"]  # of these one swept
    ledger.begin(tmp_path, [*typed, *lists, "+b.seed=range(3)", "train.steps=9"])
    config = {"parallel": {"name": "pdp", "schedule": "gpipe"}, "optimizer": {"lr": 0.2}, "a": {"seed": 1}}
    events = written(tmp_path / "0_toy_pdp", RECORD | {"config": config})
    found = plugin_data(events, metadata.SESSION_START_INFO_TAG).session_start_info.hparams
    assert (found["parallel"].string_value, found["schedule"].string_value) == ("pdp", "gpipe")
    assert (found["lr"].number_value, found["a.seed"].number_value, found["b.seed"].string_value) == (0.2, 1, "null")
    assert not {"steps", "betas", "path"} & found.keys()
    declared = plugin_data(events, metadata.EXPERIMENT_TAG).experiment.hparam_infos
    swept = {"parallel", "schedule", "lr", "milestones", "a.seed", "b.seed"}
    assert {info.name for info in declared if info.differs} == swept


def test_all_runs_declare_the_same_columns(tmp_path):
    """TensorBoard reads the columns of the HPARAMS tab from one run, whichever comes first."""

    def columns(directory, record):
        experiment = plugin_data(written(directory, record), metadata.EXPERIMENT_TAG).experiment
        return (
            {(info.name, info.type) for info in experiment.hparam_infos},
            {(info.name.group, info.name.tag) for info in experiment.metric_infos},
        )

    of_success, of_failure = columns(tmp_path / "0", RECORD), columns(tmp_path / "1", FAILED)
    assert of_success == of_failure
    assert ("", "summary/throughput") in of_success[1]


@pytest.mark.parametrize("looks", [1, 2])
def test_what_was_written_before_the_disk_was_full_is_there_once(tmp_path, monkeypatch, capsys, looks):
    series.append(tmp_path / series.NAME, rows())
    send, sent = TensorBoard.send, []

    def full(self, *arguments):
        send(self, *arguments)
        sent.append(arguments)
        if len(sent) == looks:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "send", full)
    live = log(tmp_path)
    live.show(RECORD, 0, rows()[:1], LOOKS[:1])
    live.show(RECORD, 1, rows()[1:2], [])
    live.finish(RECORD.written)
    events = shown(tmp_path)
    assert values(events, "step/loss") == [(0, 5.0), (1, 4.0), (2, 3.5)]
    assert values(events, "validation/top1") == [(1, 0.25), (3, 0.75)]
    assert capsys.readouterr().err == ""


def test_what_a_killed_start_had_shown_beyond_its_checkpoint_is_replaced(tmp_path):
    killed = log(tmp_path)
    killed.show(RECORD, 0, rows([5.0, 9.0, 9.0]), LOOKS[:1])
    killed.abort()
    going_on = log(tmp_path)  # after step 1
    going_on.show(RECORD, 1, rows()[1:], [])
    going_on.abort()
    events = shown(tmp_path)
    assert values(events, "step/loss") == [(0, 5.0), (1, 4.0), (2, 3.5)]
    assert values(events, "validation/top1") == [(1, 0.25)]  # of the checkpoint, at the step that is replaced


def test_a_run_that_was_resumed_shows_the_steps_of_its_last_start(tmp_path):
    one_rank = series.unknown(1)
    for name in series.NUMBERS:
        one_rank[name] = 7.0
    one_rank["step_seconds"] = 7.0
    for block in (one_rank, rows()[1:]):
        series.append(tmp_path / series.NAME, block)
    segments = [{"first_step": 0, "steps": 1}, {"first_step": 1, "steps": 2}]
    log(tmp_path).finish((RECORD | {"segments": segments}).written)
    events = shown(tmp_path)
    assert values(events, "step/loss") == [(1, 4.0), (2, 3.5)]
    assert np.diff([event.wall_time for event in events.Scalars("step/loss")]) == [0.5]
    assert values(events, "validation/top1") == [(1, 0.25), (3, 0.75)]
