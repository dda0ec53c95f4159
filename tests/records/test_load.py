"""Results for programs and notebooks."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ptdbench
from ptdbench.records import record, series, store
from tests.records.test_series import rows
from tests.sweep.made import CONFIG


def made(directory: Path, steps: int | None = 3, **changes: object) -> Path:
    directory.mkdir(parents=True)
    done = record.begin(CONFIG, directory, {}) | {"status": "ok", "error": None, "steps": steps} | changes
    store.write_record(directory, done)
    if steps:
        series.append(directory / series.NAME, rows(0, steps))
    return directory


def the_sound_one(folder: Path, warning: str) -> None:
    made(folder / "sound")
    with pytest.warns(UserWarning, match=warning):
        (run,) = ptdbench.load(folder)
    assert run.directory == folder / "sound"


def test_a_run(tmp_path):
    run = ptdbench.load(made(tmp_path / "run"))
    assert (run["status"], run["schema"], run.get("nothing"), len(run)) == ("ok", 2, None, len(record.FIELDS))
    assert run.series("losses").tolist() == [0, 1, 2]
    assert run.series("step_seconds").shape == (3, 2)
    assert run.series("slowest_seconds").tolist() == [0.1, 1.1, 2.1]
    with pytest.raises(KeyError, match="no series 'loss': try losses, "):
        run.series("loss")
    assert "model=toy" in repr(run)


def test_a_run_that_goes_on_has_the_steps_that_are_on_the_disk(tmp_path):
    run = ptdbench.load(str(made(tmp_path / "run", steps=None, status="failed")))
    assert (run.series("losses").shape, run.series("step_seconds").shape) == ((0,), (0, 0))
    series.append(tmp_path / "run" / series.NAME, rows(0, 2))
    assert run.series("losses").tolist() == [0, 1]


def test_steps_that_a_damaged_file_has_lost_are_nan_and_a_missing_file_is_an_error(tmp_path):
    run = ptdbench.load(made(tmp_path / "run"))
    path = tmp_path / "run" / series.NAME
    store.write_record(tmp_path / "run", dict(run) | {"steps": 3_000_000_000})
    with pytest.raises(store.Damaged, match=r"series\.npy is damaged: it holds 3 of the 3,000,000,000 steps on record"):
        ptdbench.load(tmp_path / "run").series("losses")
    path.write_bytes(path.read_bytes()[:-1])
    assert np.isnan(run.series("losses")).tolist() == [True] * 3
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"series\.npy is missing: it holds the series of the run"):
        run.series("losses")


def test_a_folder_however_deep_in_the_order_of_its_numbers(tmp_path):
    in_order = ("a", "b/2_toy", "b/010_toy", f"b/{'9' * 200}")
    for name in (*in_order[::-1], "a/tries/1_micro_batch_1"):  # the last one nobody asked for
        made(tmp_path / name)
    assert [run.directory for run in ptdbench.load(tmp_path)] == [tmp_path / name for name in in_order]


def test_damaged_records_are_left_out_with_a_warning(tmp_path):
    (made(tmp_path / "1") / store.RECORD).write_text("{")
    the_sound_one(tmp_path, r"record\.json is damaged: not JSON")
    with pytest.raises(store.Damaged):
        ptdbench.load(tmp_path / "1")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_irregular_files_are_left_out_with_a_warning(tmp_path, make):
    """A pipe would keep its reader waiting for ever, and a device fill its memory."""
    (tmp_path / "1").mkdir()
    make(tmp_path / "1" / store.RECORD)
    the_sound_one(tmp_path, r"record\.json is damaged: Not a regular file")


def test_a_record_that_cannot_be_read_today_is_left_out_with_a_warning(tmp_path, monkeypatch):
    """As of another user, or while a disk of the network is away: it is not damaged, and nobody may move it away."""
    away = made(tmp_path / "1") / store.RECORD

    def read(path: Path) -> bytes:
        if path == away:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return path.read_bytes()

    monkeypatch.setattr(store, "read_bytes", read)
    the_sound_one(tmp_path, r"record\.json: cannot be read: Permission denied")
    with pytest.raises(PermissionError):
        store.load_or_set_aside(away.parent)


class TestFrame:
    def test_a_row_for_each_run_and_a_column_for_each_field(self, tmp_path):
        metrics = {"tokens_per_second": 5.0, "step_seconds": {"median": 0.5}}
        made(tmp_path / "0", metrics=metrics, layout={"shard": 2}, overrides=["seed=1", "a=b"])
        made(tmp_path / "1", status="oom", metrics=None, nodes=["a", "b"])
        runs = ptdbench.load(tmp_path)
        frame = runs.frame()
        assert frame["status"].tolist() == ["ok", "oom"]
        assert frame["directory"].tolist() == [str(tmp_path / "0"), str(tmp_path / "1")]
        assert frame["config.train.global_batch"].tolist() == [16, 16]
        assert frame["layout.shard"].tolist()[0] == 2
        for column, figure in (("metrics.tokens_per_second", 5.0), ("metrics.step_seconds.median", 0.5)):
            np.testing.assert_equal(frame[column].to_numpy(), [figure, np.nan])
        assert frame["overrides"][0] == ["seed=1", "a=b"]
        assert frame["nodes"][1] == ["a", "b"]
        empty = {"environment", "remarks"}
        assert {name.partition(".")[0] for name in frame} == set(record.FIELDS) - empty

    def test_integers_that_a_failed_run_lacks_are_integers(self, tmp_path):
        made(tmp_path / "0", metrics={"peak_memory_bytes": 2**53 + 1, "mfu": 0.5})
        made(tmp_path / "1", status="oom", metrics={"peak_memory_bytes": None, "mfu": None})
        frame = ptdbench.load(tmp_path).frame()
        assert str(frame["metrics.peak_memory_bytes"][0]) == str(2**53 + 1)
        assert frame["metrics.peak_memory_bytes"].isna().tolist() == [False, True]
        assert frame["metrics.mfu"].isna().tolist() == [False, True]

    def test_frame_columns_exist_only_for_known_values(self, tmp_path):
        made(tmp_path / "0", metrics={"step_seconds": {"median": 0.5}}, config={"seed": 1})
        alone = {*ptdbench.load(tmp_path).frame().columns}
        for name, metrics in (("1", None), ("2", {"step_seconds": None})):
            made(tmp_path / name, metrics=metrics, config={"seed": {"data": 2}})
            assert {*ptdbench.load(tmp_path).frame().columns} == {*alone, "config.seed.data"}


@pytest.mark.parametrize(("name", "said"), [
    ("", "no record.json there or below; give the directory of a run"),
    ("nowhere", "no record.json there or below; give the directory of a run"),
    ("notes.txt", "no record.json there or below; give the directory of a run"),
    ("damaged", "no record there or below can be read"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.* is damaged")
def test_a_path_without_records(tmp_path, name, said):
    (tmp_path / "notes.txt").touch()
    if name.startswith("damaged"):
        (made(tmp_path / "damaged" / "0_toy") / store.RECORD).write_text("{")
    with pytest.raises(FileNotFoundError) as caught:
        ptdbench.load(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: {said}")


def test_neither_torch_nor_more_than_is_needed_is_imported(tmp_path):
    script = (
        "import sys, ptdbench; assert 'numpy' not in sys.modules;"
        f"run = ptdbench.load({str(made(tmp_path / 'run'))!r}); run.series('losses');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)
