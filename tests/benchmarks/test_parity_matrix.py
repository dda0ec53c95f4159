"""The matrix of layouts and levers: what it says of a cell, and what is carried out."""

import json

import pytest

from benchmarks import cells
from benchmarks import parity_matrix as matrix
from benchmarks.script import read
from ptdbench.launch.local import RankDied
from tests.conftest import ROOT
from tests.parallel.splitting import REFUSED

LEARNT = [5.0, 4.5, 4.0]


@pytest.mark.parametrize(("losses", "reference", "most", "verdict"), [
    (LEARNT, LEARNT, 1e-5, "ok 0e+00"),
    ([5.0, 4.5, 4.00002], LEARNT, 1e-5, "ok 5e-06"),
    ([5.0, 4.5, 4.0002], LEARNT, 1e-5, "wrong: off by 5e-05"),
    ([5.0, 4.5, 4.0002], LEARNT, 2e-2, "ok 5e-05"),
    (LEARNT, LEARNT, 2e-2, "no effect"),
    ([5.0, 4.5, 4.2], LEARNT, 2e-2, "wrong: off by 5e-02"),
    (matrix.DEATH, LEARNT, 1e-5, "wrong: a rank has died"),
    ([5.0, 5.0], [5.0, 5.0], 1e-5, "wrong: the reference does not learn, and equal losses prove nothing"),
])  # fmt: skip
def test_a_cell_is_told_by_its_losses(losses, reference, most, verdict):
    assert matrix.verdict(losses, reference, most) == verdict


def test_of_experts_the_norms_count_too():
    losses = [5.0, *[4.0] * (matrix.STEPS - 1)]
    assert matrix.verdict([*losses, 1.0], [*losses, 1.0], 1e-5, with_norms=True) == "ok 0e+00 0e+00"
    assert matrix.verdict([*losses, 1.1], [*losses, 1.0], 1e-5, with_norms=True) == "wrong: off by 0e+00 1e-01"


def test_cells_after_a_death_run_in_new_ranks(monkeypatch):
    def on_ranks(_, body, configs, path):
        for place, lines in enumerate(configs):
            for line in (matrix.DEATH, *lines):
                matrix._write(path, place, line)
            if lines[-1:] != [LEARNT]:
                raise RankDied({0: 1})

    monkeypatch.setattr(matrix, "on_ranks", on_ranks)
    cells = {"runs": [LEARNT], "kills": [], "raises": ["wrong: its error", "wrong: a peer's"], "runs too": [LEARNT]}
    expected = {"runs": LEARNT, "kills": matrix.DEATH, "raises": "wrong: its error", "runs too": LEARNT}
    assert matrix.numbers_of(cells) == expected


def refusal(row, column):
    return cells.refusal(read(*matrix.LAYOUTS.words(row, column)))


def test_what_is_refused_is_not_run_and_each_stored_reason_is_still_given():
    without = {row for row in matrix.LAYOUTS.rows if refusal(row, "plain")}
    assert without == set(REFUSED)  # by this torch, whatever the lever
    stored = json.loads((ROOT / matrix.LAYOUTS.result).read_text())["cells"]
    rows = {row: of_row for row, of_row in stored.items() if row not in without}
    places = {text: (row, lever) for row, of_row in rows.items() for lever, text in of_row.items()}  # one for each
    refused = {text: place for text, place in places.items() if text.startswith("refused: ")}
    assert len(refused) >= 5
    assert [refusal(*place) for place in refused.values()] == [*refused]
