import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ptdbench.records import schema, store
from ptdbench.records.store import claim_directory, load_record, write_record
from tests.refusals import Abridged, refusal_of


def result(number: int) -> dict:
    """A record as short as one can be."""
    directory = f"outputs/sweep/{number}"
    return {"schema": 2, "status": "ok", "workload": "train", "fingerprint": "f" * 16, "directory": directory}


def test_a_record_is_strict_json_whatever_it_holds(tmp_path):
    text = 'quote " newline \n lone surrogate \udcff'
    record = {
        "losses": [1.0, float("nan"), float("inf"), -float("inf")],
        "numpy": [np.float32(0.5), np.int64(3), np.array([1.0, np.nan])],
        "others": (torch.tensor([1.5, 2.5]), Path("a/b"), text),
        7: True,
    }
    write_record(tmp_path, record)
    assert schema.parse((tmp_path / "record.json").read_bytes()) == {
        "losses": [1.0, None, None, None], "numpy": [0.5, 3, [1.0, None]], "others": [[1.5, 2.5], "a/b", text],
        "7": True,
    }  # fmt: skip


@pytest.fixture
def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))


def test_a_write_that_fails_leaves_the_old_record_and_nothing_else(tmp_path, fill_the_disk):
    write_record(tmp_path, result(0))
    fill_the_disk()
    with pytest.raises(OSError, match="No space left"):
        write_record(tmp_path, {"status": "failed"})
    assert load_record(tmp_path) == result(0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_vanishing_folders_are_passed_over(tmp_path, monkeypatch):
    """As a checkpoint of a run that goes on, or a directory that is being made."""
    for name in ("a/checkpoints/step-1", "b", "b/tries/1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / store.RECORD).touch()
    scandir = os.scandir

    def going(path):
        if Path(path).name == "step-1":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", going)
    assert store.run_directories(tmp_path) == [tmp_path / "b"]


def first_file(folder: Path, directory: Path) -> None:
    (folder / "first").write_text(directory.name)


def claim(parent: Path, name: str, option: str = "hydra.run.dir") -> Path:
    return claim_directory(parent, name, option, first_file)


def test_a_directory_is_given_once_and_appears_with_its_first_file(tmp_path):
    claimed = [claim(tmp_path / "sweep", "run") for _ in range(3)]
    assert [path.name for path in claimed] == ["run", "run-2", "run-3"]
    assert [(path / "first").read_text() for path in claimed] == ["run", "run-2", "run-3"]


def claim_many(parent: Path) -> list[str]:
    return [claim(parent, "run").name for _ in range(20)]


def test_processes_do_not_share_a_directory(tmp_path):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        claimed = pool.map(claim_many, [tmp_path] * 3)
    assert len({name for names in claimed for name in names}) == 60


@pytest.mark.parametrize(
    ("name", "expected"),
    [("train.betas=[0.9, 0.95]", "train.betas-0.9-0.95"), ("a/b", "a-b"), ("..", "run"), ("x" * 400, "x" * 120)],
)
def test_names_need_no_quoting(tmp_path, name, expected):
    assert claim(tmp_path, name) == tmp_path / expected


def test_a_parent_that_cannot_be_written_is_one_clear_problem(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for parent in (tmp_path / "file", tmp_path / "file" / "below"):
        told = f"hydra.sweep.dir={parent}: nothing can be written there…"
        assert refusal_of(claim, parent, "run", option="hydra.sweep.dir") == Abridged(told)


class TestLatest:
    def test_of_sweeps_it_is_the_last_one(self, tmp_path):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            store.point_latest(tmp_path / name)
        assert (tmp_path / "latest").readlink() == Path("two")
        assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "latest"}

    def test_what_is_no_link_is_left_alone(self, tmp_path):
        (tmp_path / "latest").mkdir()
        store.point_latest(tmp_path / "one")
        assert not (tmp_path / "latest").is_symlink()

    def test_a_file_system_without_links_has_none(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError(errno.EPERM, os.strerror(errno.EPERM))))
        store.point_latest(tmp_path / "one")
        assert not list(tmp_path.iterdir())
