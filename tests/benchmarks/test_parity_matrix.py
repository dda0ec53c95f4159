"""The table of layouts and levers: what it says of a cell, and that the page is the stored result."""

import json

import pytest

from benchmarks import cells
from benchmarks import parity_matrix as matrix
from tests.parallel.splitting import REFUSED

LEARNT = [5.0, 4.5, 4.0]


@pytest.mark.parametrize(
    ("losses", "reference", "most", "said"),
    [
        (LEARNT, LEARNT, 1e-5, "ok 0e+00"),
        ([5.0, 4.5, 4.00002], LEARNT, 1e-5, "ok 5e-06"),
        ([5.0, 4.5, 4.0002], LEARNT, 1e-5, "wrong: off by 5.0e-05"),
        ([5.0, 4.5, 4.0002], LEARNT, 2e-2, "ok 5e-05"),
        (LEARNT, LEARNT, 2e-2, "no effect"),
        ([5.0, 4.5, 4.2], LEARNT, 2e-2, "wrong: off by 5.0e-02"),
        ("rank 1 died", LEARNT, 1e-5, "wrong: rank 1 died"),
        ([5.0, 5.0], [5.0, 5.0], 1e-5, "wrong: the reference does not learn, and equal losses prove nothing"),
    ],
)
def test_a_cell_is_told_by_its_losses(losses, reference, most, said):
    assert matrix.verdict(losses, reference, most) == said


def test_what_is_refused_is_not_run_and_each_stored_reason_is_still_given():
    without = {row for row in matrix.ROWS if matrix.refused(matrix.asked(row, "plain"))}
    assert without == set(REFUSED)  # by this torch, whatever the lever
    stored = json.loads(matrix.RESULT.read_text())["cells"]
    rows = {row: of_row for row, of_row in stored.items() if row not in without}
    cells = {said: (row, lever) for row, of_row in rows.items() for lever, said in of_row.items()}  # one for each
    refused = {said: cell for said, cell in cells.items() if said.startswith("refused: ")}
    assert len(refused) >= 5
    assert [matrix.refused(matrix.asked(*cell)) for cell in refused.values()] == [*refused]


def test_the_page_is_the_stored_result():
    stored = json.loads(matrix.RESULT.read_text())
    assert matrix.page(stored["cells"], stored["torch"]) == matrix.PAGE.read_text()
    assert list(stored["cells"]) == list(matrix.ROWS)
    said = [cell for cells in stored["cells"].values() for cell in cells.values()]
    assert len(said) == len(matrix.ROWS) * len(matrix.COLUMNS)
    assert sum(cell.startswith("ok ") for cell in said) >= 60
    assert not [cell for cell in said if not cell.startswith(("ok ", "refused: ", "no effect"))]


def test_a_row_that_is_not_there_is_refused_before_anything_runs(capsys):
    parser = cells.parser_of_cells(None, rows=["ddp", "fsdp"], columns=["plain"])
    assert parser.parse_args(["--rows", "fsdp"]).rows == ["fsdp"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--rows", "ddp,fspd"])
    assert "there is no 'fspd'; try ddp,fsdp" in capsys.readouterr().err
