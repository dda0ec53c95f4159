import errno
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ptdbench.problems import ConfigError
from ptdbench.records import store
from ptdbench.records.store import append_result, claim_directory, load_record, read_results, write_record


def strictly(text: str):
    """Parse JSON as the standard has it, where Python also takes NaN."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def result(number: int) -> dict:
    """A record as short as one can be."""
    directory = f"outputs/sweep/{number}"
    return {"schema": 2, "status": "ok", "workload": "train", "fingerprint": "f" * 16, "directory": directory}


def test_a_record_is_strict_json_whatever_it_holds(tmp_path):
    record = {
        "losses": [1.0, float("nan"), float("inf"), -float("inf")],
        "directory": Path("a/b"),
        "numpy": [np.float32(0.5), np.int64(3), np.array([1.0, np.nan])],
        "tensor": torch.tensor([1.5, 2.5]),
        "tuple": (1, 2),
        "text": 'quote " newline \n lone surrogate \udcff',
        7: True,
    }
    found = strictly(write_record(tmp_path, record).read_text())
    assert found["losses"] == [1.0, None, None, None]
    assert found["directory"] == "a/b"
    assert found["numpy"] == [0.5, 3, [1.0, None]]
    assert found["tensor"] == [1.5, 2.5]
    assert found["tuple"] == [1, 2]
    assert found["text"] == record["text"]
    assert found["7"] is True


@pytest.fixture
def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", full)


def test_a_write_that_fails_leaves_the_old_record_and_nothing_else(tmp_path, fill_the_disk):
    assert write_record(tmp_path, result(0)) == tmp_path / "record.json"
    fill_the_disk()
    with pytest.raises(OSError, match="No space left"):
        write_record(tmp_path, {"status": "failed"})
    assert load_record(tmp_path) == result(0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def append_many(directory: Path, writer: int) -> None:
    for number in range(50):
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
    results = [strictly(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = sorted((result["writer"], result["number"]) for result in results if "again" not in result["directory"])
    assert found == [(writer, number) for writer in range(3) for number in range(50)]
    again = sorted((result["writer"], result["number"]) for result in results if "again" in result["directory"])
    assert again == [(writer, 49) for writer in range(3)]  # of each run its last line


def test_a_torn_last_line_is_passed_over_and_repaired(tmp_path):
    assert read_results(tmp_path) == []
    (tmp_path / "results.jsonl").write_text('{"ru')
    append_result(tmp_path, result(1))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"run": 2, "losses": [1.0, 2')
    told = []
    assert read_results(tmp_path, told.append) == [result(1)]
    assert told == []  # the run that was killed there has a record of its own
    append_result(tmp_path, result(3))
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == read_results(tmp_path) == [result(1), result(3)]


def test_a_run_that_was_done_again_has_one_line_and_it_is_the_newest(tmp_path):
    for number in (1, 2, 12):
        append_result(tmp_path, result(number))
    again = result(2) | {"status": "failed", "directory": f"elsewhere/{tmp_path.name}/2"}
    append_result(tmp_path, again)  # also after the sweep was moved
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [result(1), result(12), again]
    assert read_results(tmp_path) == [result(1), result(12), again]
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.jsonl"]


def test_of_two_lines_of_a_run_by_an_earlier_version_the_last_counts(tmp_path):
    again = result(1) | {"status": "failed"}
    lines = (json.dumps(record) + "\n" for record in (result(1), result(2), again))
    (tmp_path / "results.jsonl").write_text("".join(lines))
    assert read_results(tmp_path) == [result(2), again]
    append_result(tmp_path, result(1))
    assert [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()] == [
        result(2), result(1),
    ]  # fmt: skip


def test_a_full_disk_leaves_the_older_line_of_a_run(tmp_path, fill_the_disk):
    append_result(tmp_path, result(1))
    fill_the_disk()
    with pytest.raises(OSError, match="No space left"):
        append_result(tmp_path, result(1) | {"status": "failed"})
    assert read_results(tmp_path) == [result(1)]


def test_a_full_disk_leaves_the_results_as_they_were(tmp_path, monkeypatch):
    append_result(tmp_path, result(1))
    before = (tmp_path / "results.jsonl").read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(OSError, match=r"no room for a result in .*results\.jsonl"):
        append_result(tmp_path, result(2))
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_results_survive_a_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(store.fcntl, "flock", unsupported)
    append_result(tmp_path, result(1))
    assert read_results(tmp_path) == [result(1)]


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
    [
        ("model=gpt_tiny,parallel=ddp", "model-gpt_tiny-parallel-ddp"),
        ("train.betas=[0.9, 0.95]", "train.betas-0.9-0.95"),
        ("a/b", "a-b"),
        ("..", "run"),
        ("", "run"),
        ("x" * 400, "x" * 200),
    ],
)
def test_names_need_no_quoting(tmp_path, name, expected):
    assert claim(tmp_path, name) == tmp_path / expected


def test_a_parent_that_cannot_be_written_is_one_clear_problem(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for parent in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError) as caught:
            claim(parent, "run", option="hydra.sweep.dir")
        (problem,) = caught.value.problems
        assert problem.option == "hydra.sweep.dir"
        assert problem.value == parent
        assert "nothing can be written there" in problem.rule


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
        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(Path, "symlink_to", refuse)
        store.point_latest(tmp_path / "one")
        assert not list(tmp_path.iterdir())
