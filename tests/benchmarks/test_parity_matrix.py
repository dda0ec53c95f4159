"""The matrix of layouts and levers: what it says of a cell, and what is carried out."""

import json

import pytest

from benchmarks import cells
from benchmarks import parity_matrix as matrix
from benchmarks.script import read
from tests.conftest import ROOT
from tests.parallel.splitting import REFUSED

LEARNT = [5.0, 4.5, 4.0]


@pytest.mark.parametrize(
    ("losses", "reference", "most", "said"),
    [
        (LEARNT, LEARNT, 1e-5, "ok 0e+00"),
        ([5.0, 4.5, 4.00002], LEARNT, 1e-5, "ok 5e-06"),
        ([5.0, 4.5, 4.0002], LEARNT, 1e-5, "wrong: off by 5e-05"),
        ([5.0, 4.5, 4.0002], LEARNT, 2e-2, "ok 5e-05"),
        (LEARNT, LEARNT, 2e-2, "no effect"),
        ([5.0, 4.5, 4.2], LEARNT, 2e-2, "wrong: off by 5e-02"),
        ("rank 1 died", LEARNT, 1e-5, "wrong: rank 1 died"),
        ([5.0, 5.0], [5.0, 5.0], 1e-5, "wrong: the reference does not learn, and equal losses prove nothing"),
    ],
)
def test_a_cell_is_told_by_its_losses(losses, reference, most, said):
    assert matrix.verdict(losses, reference, most) == said


def test_of_experts_the_norms_count_too():
    losses = [5.0, *[4.0] * (matrix.STEPS - 1)]
    assert matrix.verdict([*losses, 1.0], [*losses, 1.0], 1e-5, with_norms=True) == "ok 0e+00 0e+00"
    assert matrix.verdict([*losses, 1.1], [*losses, 1.0], 1e-5, with_norms=True) == "wrong: off by 0e+00 1e-01"


def refusal(row, column):
    return cells.refusal(read(*matrix.LAYOUTS.words(row, column)))


def test_what_is_refused_is_not_run_and_each_stored_reason_is_still_given():
    without = {row for row in matrix.LAYOUTS.rows if refusal(row, "plain")}
    assert without == set(REFUSED)  # by this torch, whatever the lever
    stored = json.loads((ROOT / matrix.LAYOUTS.result).read_text())["cells"]
    rows = {row: of_row for row, of_row in stored.items() if row not in without}
    places = {said: (row, lever) for row, of_row in rows.items() for lever, said in of_row.items()}  # one for each
    refused = {said: place for said, place in places.items() if said.startswith("refused: ")}
    assert len(refused) >= 5
    assert [refusal(*place) for place in refused.values()] == [*refused]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Two rows of a matrix of its own, and what the command line chooses of it."""
    (tmp_path / "page.md").write_text("<!-- cells -->\n\n<!-- end of cells -->")
    rows, columns = {"ddp": (2, "parallel=ddp"), "fsdp": (2, "parallel=fsdp")}, {"plain": "", "muon": "optimizer=muon"}
    monkeypatch.setattr(cells, "ROOT", tmp_path)
    common = matrix.LAYOUTS.common
    made = cells.Matrix(common, rows, columns, "page.md", "cells.json", "{ok} of {run} of {all}")

    def fill(*words, said="ok 1"):
        monkeypatch.setattr("sys.argv", ["matrix", *words])
        carried_out = []

        def carry_out(row, cells):
            carried_out.extend((row, column) for column in cells)
            return [(column, said) for column in cells]

        return made.fill(None, carry_out), carried_out, (tmp_path / made.page).read_text()

    return fill


def test_a_matrix_that_was_interrupted_goes_on_with_what_is_missing_or_wrong(small):
    _, carried_out, page = small("--rows", "ddp")
    assert carried_out == [("ddp", "plain"), ("ddp", "muon")]
    assert "| ddp |" not in page  # a part of one that no torch has filled
    assert small(said="wrong: off")[0] == 1
    small("--rows", "fsdp", "--columns", "muon")
    status, carried_out, page = small("--resume", said="ok 2")
    assert (status, carried_out) == (0, [("ddp", "plain"), ("ddp", "muon"), ("fsdp", "plain")])
    assert "4 of 4 of 4" in page
    assert "| fsdp | ok 2 | ok 1 |" in page


def test_a_row_that_is_not_there_is_refused_before_anything_runs(small, capsys):
    with pytest.raises(SystemExit):
        small("--rows", "ddp", "fspd")
    assert "invalid choice: 'fspd'" in capsys.readouterr().err
