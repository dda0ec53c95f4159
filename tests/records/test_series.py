"""The series file: whole blocks count, and what was torn off is cut away."""

import io
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptdbench.records import series


def rows(first: int, stop: int, ranks: int = 2) -> np.ndarray:
    """Steps whose numbers tell which step they are of."""
    made = series.unknown(stop - first, ranks)
    for column, name in enumerate(series.NUMBERS):
        made[name] = np.arange(first, stop) + 1000 * column
    made["step_seconds"] = np.arange(first, stop)[:, None] + np.arange(ranks) / 10
    return made


def losses(path) -> list[float]:
    return series.column(series.blocks(path), "loss").tolist()


@pytest.fixture
def path(tmp_path):
    """Three blocks: two steps, three, and one on more ranks."""
    path = tmp_path / series.NAME
    for block in (rows(0, 2), rows(2, 5), rows(5, 6, ranks=3)):
        series.append(path, block)
    return path


def test_what_is_appended_is_read_also_by_numpy_alone(path):
    with path.open("rb") as file:
        assert [len(np.load(file, allow_pickle=False)) for _ in range(3)] == [2, 3, 1]
    assert losses(path) == [0, 1, 2, 3, 4, 5]
    assert series.column(series.blocks(path), "memory_bytes").tolist() == [4000, 4001, 4002, 4003, 4004, 4005]
    times = series.column(series.blocks(path), "step_seconds")
    assert times.shape == (6, 3)
    assert np.isnan(times[:5, 2]).all()
    np.testing.assert_allclose(series.column(series.blocks(path), "slowest_seconds"), [0.1, 1.1, 2.1, 3.1, 4.1, 5.2])


@pytest.mark.parametrize("steps", range(8))
def test_a_file_is_cut_down_to_any_number_of_steps(path, steps):
    assert series.keep(path, steps) == min(steps, 6)
    assert losses(path) == list(range(min(steps, 6)))
    series.append(path, rows(90, 91))
    assert losses(path) == [*range(min(steps, 6)), 90]


def test_a_part_is_copied(path, tmp_path):
    target = tmp_path / "other.npy"
    series.append(target, rows(70, 80))
    assert series.copy(path, target, 4) == 4
    assert losses(target) == [0, 1, 2, 3]
    assert losses(path) == [0, 1, 2, 3, 4, 5]
    assert series.copy(tmp_path / "nowhere.npy", target, 4) == 0


def test_a_file_that_is_missing_has_no_steps(tmp_path):
    assert losses(tmp_path / series.NAME) == []
    assert series.column([], "step_seconds").shape == (0, 0)


def test_a_torn_block_is_none_and_the_next_writer_cuts_it_off(path):
    whole = path.read_bytes()
    series.keep(path, 5)
    ends = path.stat().st_size
    for size in (ends + 1, ends + 60, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert losses(path) == [0, 1, 2, 3, 4]
        assert series.keep(path, 6) == 5
        assert path.stat().st_size == ends


def test_a_block_that_cannot_be_written_leaves_the_file_as_it_was(path, monkeypatch):
    before = path.read_bytes()

    monkeypatch.setattr(series.os, "fsync", Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(OSError, match="no space left"):
        series.append(path, rows(6, 9))
    assert path.read_bytes() == before


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.binary(max_size=400), st.integers(0, 2000), st.sampled_from(["overwritten", "cut", "alone"]))
def test_whatever_stands_in_the_file_is_read_without_an_exception(path, noise, place, how):
    series.write(path, [rows(0, 2), rows(2, 5)])
    content = path.read_bytes()
    place %= len(content)
    changed = {
        "overwritten": content[:place] + noise + content[place + len(noise) :],
        "cut": content[:place],
        "alone": noise,
    }
    path.write_bytes(changed[how])
    for name in (*series.NUMBERS, "step_seconds", "slowest_seconds"):
        assert len(series.column(series.blocks(path), name)) <= 5
    assert series.keep(path, 4) <= 4
    series.append(path, rows(4, 6))
    assert losses(path)[-2:] == [4, 5]


@pytest.mark.parametrize("header", [{"steps": 1, "ranks": 0}, {"steps": 10**15, "ranks": 2}, {"steps": -1, "ranks": 2}])
def test_a_block_that_nobody_can_have_written_ends_the_file(path, header):
    made = io.BytesIO()
    dtype = series.unknown(0, header["ranks"]).dtype
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (header["steps"],)}
    np.lib.format.write_array_header_1_0(made, described)
    with path.open("ab") as file:
        file.write(made.getvalue() + bytes(8 * len(series.NUMBERS)))
    assert losses(path) == [0, 1, 2, 3, 4, 5]
    assert len(series.column(series.blocks(path), "slowest_seconds")) == 6
