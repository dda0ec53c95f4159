"""Tables that have to fit."""

from operator import itemgetter

import pytest
from rich.cells import cell_len

from ptdbench.report.text import Column, table, wrap

COLUMNS = (
    Column("#", itemgetter(0)),
    Column("what it is", itemgetter(1), is_text=True, min_width=0),
    Column("rate", itemgetter(2), drop_order=1),
    Column("note", itemgetter(3), is_text=True, drop_order=0),
)
ROWS = [("1", "two words", "12.5", "fine"), ("10", "word", "7", "")]


@pytest.mark.parametrize(("width", "left_out", "drawn"), [
    (None, [], ["1  two words   12.5  fine", "10  word           7"]),
    (24, [], ["1  two       12.5  fine", "words", "10  word         7"]),
    (20, ["note"], ["1  two words   12.5", "10  word           7"]),
    (14, ["rate", "note"], ["1  two words", "10  word"]),
    (9, ["rate", "note"], ["1  two", "words", "10  word"]),
])  # fmt: skip
def test_words_fold_before_columns_are_left_out_in_their_order(width, left_out, drawn):
    lines, gone = table(COLUMNS, ROWS, width)
    assert gone == left_out
    assert [line.strip() for line in lines[-len(drawn) :]] == drawn
    assert set(lines[-len(drawn) - 1]) == {"─"}
    assert max(map(len, lines)) <= (width or 99)


def test_what_does_not_fold_is_cut():
    narrow = [Column("what it is", itemgetter(1), is_text=True, min_width=5)]
    assert table(narrow, ROWS, 6, folds=False) == (["what …", "──────", "two w…", "word"], [])


NAMES = ["模型并行 流水线并行 张量并行", "数据并行" * 6, "ascii only"]


def test_wide_characters_take_two_columns_and_spaces_are_kept():
    lines, _ = table([Column("name", str, is_text=True, min_width=4), Column("#", lambda _: "1")], NAMES, 20)
    assert max(map(cell_len, lines)) == 20
    assert [cell_len(line) for line in lines if line.endswith("1")] == [20] * 3  # figures stay below each other
    assert cell_len(max(wrap(f"{NAMES[0]} {NAMES[0]}", 20).splitlines(), key=cell_len)) <= 20
    assert wrap("it is in /tmp/a  b,\nas the record", 22) == "it is in /tmp/a  b, as\n  the record"
