"""The tables of the pages, and the stored results that they are drawn from."""

import json
import re
from importlib.util import find_spec

import pytest

from benchmarks import __main__, tables
from benchmarks.parity_matrix import LAYOUTS
from benchmarks.zoo import ZOO
from tests.conftest import ROOT


def test_every_page_shows_what_is_stored():
    """``python -m benchmarks.tables`` rewrites them."""
    for page, text in tables.pages().items():
        assert page.read_text() == text, page


def test_what_a_benchmark_stores_has_a_place_in_the_results():
    stored = json.loads(tables.RESULTS.read_text())
    sources = "".join(path.read_text() for path in tables.FOLDER.glob("*.py"))
    named = set(re.findall(r'keep\("([^"]+)"', sources))
    assert len(named) > 5
    assert named <= {*stored["figures"], *stored["tables"]}


def test_a_result_is_stored_with_its_machine_and_shown(tmp_path, monkeypatch):
    (tmp_path / "results.json").write_text(json.dumps({"figures": {"data": {"result": "1"}}, "tables": {}}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(tables, "rewrite", lambda: None)
    tables.store("data", "2 million")
    tables.store("of nobody", "3")
    (stored,) = json.loads(tables.RESULTS.read_text())["figures"].values()
    assert stored["result"] == "2 million"
    assert "torch" in stored["machine"]


def test_a_table_replaces_the_one_between_its_comments():
    page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb"
    assert tables.inserted(page, "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- end of x -->\nb"
    with pytest.raises(ValueError, match="<!-- y -->"):
        tables.inserted(page, "y", "new")


def test_every_cell_of_the_matrix_of_layouts_is_right_or_refused():
    cells = json.loads((ROOT / LAYOUTS.result).read_text())["cells"]
    assert [*cells] == [*LAYOUTS.rows]
    verdicts = [text for row in cells.values() for text in row.values()]
    assert len(verdicts) == len(LAYOUTS.rows) * len(LAYOUTS.columns)
    assert sum(text.startswith("ok ") for text in verdicts) >= 60
    assert not [text for text in verdicts if not text.startswith(("ok ", "refused: ", "no effect"))]


def test_every_public_architecture_is_equal_or_refused():
    cells = json.loads((ROOT / ZOO.result).read_text())["cells"]
    assert {*cells} == {*ZOO.rows}
    verdicts = [text for row in cells.values() for text in row.values()]
    assert not [text for text in verdicts if not text.startswith(("ok ", "refused: "))]
    equal = {column: sum(row[column].startswith("ok ") for row in cells.values()) for column in ZOO.columns}
    assert equal["pdp"] >= 36
    assert equal["tp"] >= 24


def test_every_target_has_its_programs_and_a_line_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target, (_, programs) in __main__.TARGETS.items():
        assert re.search(rf"^{target}: install.*## .*\n\t\$\(BENCHMARK\)$", makefile, re.MULTILINE), target
        for program in programs.values():
            assert find_spec(f"benchmarks.{program.split()[0]}"), program
