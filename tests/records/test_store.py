import errno
import json
import multiprocessing
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ptdbench.records import schema, store
from ptdbench.records.store import append_result, claim_directory, load_record, read_results, write_record
from tests.refusals import Abridged, refusal_of


def result(number: int) -> dict:
    """A record as short as one can be."""
    directory = f"outputs/sweep/{number}"
    return {"schema": 2, "status": "ok", "workload": "train", "fingerprint": "f" * 16, "directory": directory}


def lines(sweep: Path) -> list[dict]:
    return [schema.parse(line) for line in (sweep / "results.jsonl").read_bytes().splitlines()]


def results(sweep: Path, *tell: Callable[[str], object]) -> list[dict]:
    return [record.written for record in read_results(sweep, *tell)]


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


def append_many(directory: Path, writer: int) -> None:
    for number in range(20):
        padding = {"number": number, "padding": "x" * 20_000}
        append_result(directory, {"writer": writer, "directory": f"{writer}_{number}", **padding})
        append_result(directory, {"writer": writer, "directory": f"again_{writer}", **padding})


def test_results_of_writers_at_the_same_time_are_all_whole(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(tmp_path, writer)) for writer in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert [process.exitcode for process in writers] == [0, 0, 0]
    found = [(one["writer"], one["number"], one["directory"].startswith("again")) for one in lines(tmp_path)]
    assert sorted(found) == sorted(product(range(3), range(20), [False, True]))


def test_a_torn_last_line_is_passed_over_and_repaired(tmp_path):
    assert results(tmp_path) == []
    (tmp_path / "results.jsonl").write_text('{"ru')
    append_result(tmp_path, result(1))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"run": 2, "losses": [1.0, 2')
    told = []
    assert results(tmp_path, told.append) == [result(1)]
    assert told == []  # the run that was killed there has a record of its own
    append_result(tmp_path, result(3))
    assert lines(tmp_path) == results(tmp_path) == [result(1), result(3)]


def test_of_a_run_that_was_done_again_the_last_line_counts(tmp_path):
    failed = result(2) | {"status": "failed"}
    by_earlier_version = "".join(f"{json.dumps(record)}\n" for record in (result(1), result(2), result(12), failed))
    (tmp_path / "results.jsonl").write_text(by_earlier_version)
    assert results(tmp_path) == [result(1), result(12), failed]
    again = result(2) | {"directory": f"elsewhere/{tmp_path.name}/2"}
    append_result(tmp_path, again)  # also after the sweep was moved
    assert results(tmp_path) == [result(1), result(12), again]
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize(("directory", "name"), [
    ("outputs/fsdp/0_toy/ddp", "0_toy/ddp"),
    ("moved/from/0_toy", "0_toy"),
    ("outputs/fsdp/fsdp", "fsdp"),  # hydra.sweep.subdir='${parallel.name}'
])  # fmt: skip
def test_a_run_is_known_by_its_place_below_its_sweep(directory, name):
    assert store.below(Path("/now/fsdp"), directory) == name


def test_runs_are_known_in_folders_of_the_same_name_and_in_renamed_ones(tmp_path):
    """``hydra.sweep.dir=toy hydra.sweep.subdir='${model.name}/${seed}'``; or a sweep in a folder of its own name."""
    (tmp_path / "toy" / "toy" / "1").mkdir(parents=True)
    assert store.below(tmp_path / "toy", "outputs/toy/toy/1") == "toy/1"
    assert store.below(tmp_path / "toy" / "toy", "outputs/toy/toy/1") == "1"
    (tmp_path / "mine" / "toy" / "ddp").mkdir(parents=True)
    assert store.below(tmp_path / "mine", str(tmp_path / "old" / "toy" / "ddp")) == "toy/ddp"
    assert store.below(tmp_path / "mine", "outputs/old/toy/fsdp") == "fsdp"


@pytest.mark.parametrize("place", [".", "link"])
def test_runs_of_a_sweep_in_the_current_folder_or_behind_a_link_are_kept_apart(tmp_path, monkeypatch, place):
    """``hydra.sweep.subdir='${model.name}/${parallel.name}'``; the folder is called as one of the models."""
    for name in ("toy/ddp", "gpt/ddp"):
        (tmp_path / "toy" / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("toy")
    monkeypatch.chdir(tmp_path / "toy" if place == "." else tmp_path)
    found = [store.below(Path(place), str(Path(place, name))) for name in ("toy/ddp", "gpt/ddp")]
    assert found == ["toy/ddp", "gpt/ddp"]


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
    assert store.holding(tmp_path, store.RECORD) == [tmp_path / "b"]


def test_a_full_disk_leaves_the_results_as_they_were(tmp_path, monkeypatch):
    append_result(tmp_path, result(1))
    before = (tmp_path / "results.jsonl").read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(OSError, match=r"no room for a result in .*results\.jsonl"):
        append_result(tmp_path, result(2))
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_results_survive_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(store.fcntl, "flock", Mock(side_effect=OSError(38, "Function not implemented")))
    append_result(tmp_path, result(1))
    assert results(tmp_path) == [result(1)]


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
