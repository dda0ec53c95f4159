"""How often repeats are wrong: what a row says and asks, on a sweep made by hand."""

import json
import random
import re
from types import SimpleNamespace

import pytest

from benchmarks import compare_truth
from benchmarks.compare_truth import SLOWER
from ptdbench.records import store
from tests.report.made import repeated

SLOWNESSES = (*(number / 1e6 for number in range(10)), *SLOWER)


@pytest.fixture
def judge(tmp_path, monkeypatch, capsys):
    """Write a sweep whose runs have this deviation, judge it, and give back the rows and the exit status."""

    def judged(deviation, blocks=60, slownesses=SLOWNESSES, options=()):
        draw, lines = random.Random(3), []
        for slower in slownesses:
            rates = [1000 * (1 - slower) * (1 + draw.gauss(0, deviation)) for _ in range(blocks)]
            for block, one in enumerate(repeated("ddp", rates, name=f"_{slower}")):
                config = {**one.config, "model": {"name": "gpt_tiny", "slower": slower}}
                place = str(tmp_path / f"{block}_{slower}")
                lines.append(json.dumps({**one.written, "config": config, "directory": place}))
        (tmp_path / store.RESULTS).write_text("\n".join(lines) + "\n")
        monkeypatch.setattr("sys.argv", ["compare_truth.py", "--sweep", str(tmp_path), *options])
        monkeypatch.setattr(compare_truth, "TRIES", 20)
        status = compare_truth.main()
        return capsys.readouterr().out.splitlines()[1:], status

    return judged


def test_on_quiet_runs_every_row_is_judged_but_that_which_may_be_called_tied(judge):
    rows, status = judge(0.002)
    assert len(rows) == 6
    (tied,) = [row for row in rows if not re.search("PASS|MISS", row)]
    assert "slower by 2%, repeat=auto" in tied
    assert ["exact" in row for row in rows] == [True, False, False, False, False, False]
    assert ["approximate" in row for row in rows] == [False, True, True, True, True, True]
    assert all("100.0%" in row for row in rows[4:])
    assert status == any(row.endswith("MISS") for row in rows)


def test_without_identical_ones_the_slower_ones_are_judged(judge):
    rows, _ = judge(0.002, slownesses=[0.0, *SLOWER])
    assert [row.split(",")[0].strip() for row in rows] == ["slower by 2%", "slower by 5%"]


def test_more_blocks_find_more(judge):
    (seldom,), (often,) = (
        [row for row in judge(0.05, 80, options=("--max", most, "--blocks", "80"))[0] if "slower by 5%" in row]
        for most in ("5", "60")
    )
    assert seldom.endswith("MISS")
    assert often.endswith("PASS")


def test_what_some_runs_state_is_looked_for_in_others(judge, monkeypatch):
    """Where the stated difference is none, it is seen as seldom as identical configurations are told apart."""
    assert " slower by what 5 runs each state, 5 others each" in judge(0.05)[0][3]
    blind = SimpleNamespace(detectable=0.0, low=0.5, high=2.0)
    monkeypatch.setattr(compare_truth.significance, "compare", lambda *_, **__: blind)
    assert judge(0.05)[0][3].endswith(": MISS")


@pytest.mark.parametrize(
    ("blocks", "slownesses", "said"),
    [
        (3, SLOWNESSES, ": 3 blocks in which all runs are ok; at least 60 are needed"),
        (60, [], ": no results of this benchmark: identical configurations and slower ones"),
        (60, SLOWER, ": no results of this benchmark: identical configurations and slower ones"),
        (60, SLOWNESSES[:-2], ": no results of this benchmark: identical configurations and slower ones"),
    ],
)
def test_a_sweep_with_too_little_is_one_line(judge, tmp_path, blocks, slownesses, said):
    with pytest.raises(SystemExit) as caught:
        judge(0.01, blocks, slownesses)
    assert str(caught.value) == f"{tmp_path}{said}"


def test_a_run_takes_from_its_start_to_the_next(tmp_path):
    for second, one in zip((30, 0, 4, 8), repeated("ddp", [1.0] * 4), strict=True):
        store.append_result(tmp_path, {**one.written, "started": f"2026-01-01T00:00:{second:02d}+00:00"})
    assert compare_truth._seconds_a_run(tmp_path) == 4
