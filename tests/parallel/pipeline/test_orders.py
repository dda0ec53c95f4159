"""Schedules from files: what is read, what is refused, how long ranks idle. What they compute: test_schedules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ptdbench.parallel.pipeline import orders
from ptdbench.parallel.pipeline.schedules import SCHEDULES
from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError

ONE_BY_ONE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def written(folder: Path, text: str) -> str:
    path = folder / "mine.csv"
    path.write_text(text)
    return str(path)


def told(folder: Path, text: str) -> str:
    """What is said of a file, without its name."""
    with pytest.raises(ConfigError) as error:
        orders.read(written(folder, text))
    option, _, rule = str(error.value).partition(": ")
    assert option == f"schedule={folder / 'mine.csv'}"
    return rule


def gpipe(ranks: int, microbatches: int) -> str:
    rows = [[f"{rank}{kind}{number}" for kind in "FB" for number in range(microbatches)] for rank in range(ranks)]
    return "\n".join(map(",".join, rows))


def one_forward_one_backward(ranks: int, microbatches: int) -> str:
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        row = [f"{rank}F{number}" for number in range(ahead)]
        for number in range(microbatches):
            row += [f"{rank}F{number + ahead}"] * (number + ahead < microbatches) + [f"{rank}B{number}"]
        rows.append(row)
    return "\n".join(map(",".join, rows))


class TestReading:
    def test_what_the_file_says(self, tmp_path):
        found = orders.read(
            written(tmp_path, "0F0,,0F1, 3F0,3I0,3F1,3B1,3W0,0B0,0B1\n\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
        )
        assert (found.size, found.stages, found.microbatches) == (2, 2, 2)
        assert found.ranks(2, 2) == [0, 1, 1, 0]
        assert found.splits_backward
        assert list(map(str, found.rows[0])) == ["0F0", "0F1", "3F0", "3I0", "3F1", "3B1", "3W0", "0B0", "0B1"]

    def test_a_backward_pass_in_one(self, tmp_path):
        assert not orders.read(written(tmp_path, ONE_BY_ONE)).splits_backward

    def test_a_table_of_excel(self, tmp_path):
        path = tmp_path / "mine.csv"
        path.write_bytes(b"\xef\xbb\xbf" + ONE_BY_ONE.replace("\n", "\r\n").encode())
        assert orders.read(str(path)).size == 2

    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("", "needs a row for each rank of a pipeline, at least 2, and has 0"),
            ("0F0,0B0", "needs a row for each rank of a pipeline, at least 2, and has 1"),
            ("0F0,0B0\n\n1F0,1X0", "row 3: 1X0 is no pass: write a stage, F, B, I or W, and a micro-batch, such as "
             "0F3"),
            ("0F0,0B0\n0F0,0B0", "has stage 0 in 2 rows; each stage, from 0 on, is on one rank"),
            ("0F0,0B0\n2F0,2B0", "has stage 1 in 0 rows; each stage, from 0 on, is on one rank"),
            ("0F0,0B0\n1F0,2F0,2B0,1B0", "has 1, 2 stages in its rows; all ranks have as many"),
            ("0F0,0B0\n1F0", "micro-batch 0 of stage 1 has F; it needs F, and B or I and W, each once"),
            ("0F0,0B0,0B0\n1F0,1B0", "micro-batch 0 of stage 0 has F B B; it needs F, and B or I and W, each once"),
            ("0F0,0I0\n1F0,1B0", "micro-batch 0 of stage 0 has F I; it needs F, and B or I and W, each once"),
            ("0F1,0B1\n1F1,1B1", "micro-batch 0 of stage 0 has no pass; it needs F, and B or I and W, each once"),
            ("0F0,0B0\n1B0,1F0", "never gets to 0B0: what that needs comes after it, or waits for it"),
            ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "never gets to 0B0: what that needs comes after it, or waits for it"),
            ("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1", "has the forward passes of stage 1, the last one, out of order; they "
             "must be 0, 1, 2, ..."),
        ],
    )  # fmt: skip
    def test_what_is_no_schedule_is_refused(self, tmp_path, text, rule):
        assert told(tmp_path, text) == rule

    def test_what_cannot_be_read(self, tmp_path):
        (tmp_path / "mine.csv").write_bytes(b"\xff\xfe\x00")
        cases = {
            tmp_path / "mine.csv": "codec",
            tmp_path: "directory",
            tmp_path / "no": "No such",
            "~nobody-/a": "home",
        }
        for path, reason in cases.items():
            with pytest.raises(ConfigError, match=reason):
                orders.read(str(path))


def test_the_orders_of_the_documentation(tmp_path):
    page = (Path(__file__).parents[3] / "docs/parallelism.md").read_text()
    found = [orders.read(written(tmp_path, text)) for text in re.findall(r"```text\n(0F0.*?)```", page, re.S)]
    assert [(one.size, one.stages, one.microbatches) for one in found] == [(2, 1, 4), (2, 2, 2)]


class TestBubble:
    @pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 5), (4, 4), (4, 8), (3, 7)])
    @pytest.mark.parametrize(("name", "made"), [("gpipe", gpipe), ("1f1b", one_forward_one_backward)])
    def test_it_is_that_of_the_formula(self, tmp_path, name, made, ranks, microbatches):
        found = orders.read(written(tmp_path, made(ranks, microbatches)))
        expected = SCHEDULES[name].bubble(ranks, 1, microbatches)
        assert found.bubble(ranks, 1, microbatches) == pytest.approx(expected)

    def test_by_hand(self, tmp_path):
        # Rank 0: F0 F1 from 0 to 2, B0 from 4 (after 1B0) to 6, B1 from 7 (after 1B1) to 9: 6 of 9.
        found = orders.read(written(tmp_path, ONE_BY_ONE))
        assert found.bubble(2, 1, 2) == pytest.approx(3 / 9)


class TestOptions:
    def test_a_file_decides_how_many(self, tmp_path):
        strategy = Strategy(replicate="auto", pipeline=2, schedule=written(tmp_path, ONE_BY_ONE))
        layout = strategy.layout(strategy.dims(4), 16, "auto")
        assert (layout.microbatches, layout.micro_batch, layout.accumulation) == (2, 4, 1)
        layout = strategy.layout(strategy.dims(4), 16, 1)
        assert (layout.microbatches, layout.micro_batch, layout.accumulation) == (2, 1, 4)

    def test_its_passes_are_in_the_record(self, tmp_path):
        strategy = Strategy(replicate=2, pipeline=2, schedule=written(tmp_path, " 0F0,,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1"))
        found = strategy.layout(strategy.dims(4), 8, "auto").as_dict()
        assert found["passes"] == ["0F0, 0F1, 0B0, 0B1", "1F0, 1B0, 1F1, 1B1"]
        again = orders.read(written(tmp_path, "\n".join(found["passes"])))
        assert again.rows == strategy.pipelining.schedule.rows
        named = Strategy(replicate=2, pipeline=2, schedule="gpipe")
        assert "passes" not in named.layout(named.dims(4), 8, "auto").as_dict()

    def test_its_ranks_are_those_of_a_pipeline_that_is_not_given(self, tmp_path):
        rows = "\n".join(f"{rank}F0,{rank}B0" for rank in range(4))
        strategy = Strategy(replicate="auto", pipeline="auto", schedule=written(tmp_path, rows))
        assert (strategy.dims(8).replicate, strategy.dims(8).pipeline) == (2, 4)
        assert strategy.ranks(6) == 4

    def test_all_that_is_wrong_is_told(self):
        with pytest.raises(ConfigError) as error:
            Strategy(pipeline=2, schedule="no.csv", prefetch=0)
        assert {problem.option for problem in error.value.problems} == {"prefetch", "schedule"}

    @pytest.mark.parametrize(
        ("options", "batch", "message"),
        [
            ({"pipeline": 4}, 16, "pipeline=4: must be the 2 ranks of {}; try 2"),
            ({"pipeline": 2, "microbatches": 4}, 16, "microbatches=4: must be the 2 of {}; try auto, or "
             "parallel.schedule=gpipe"),
            ({"pipeline": 2}, 3, "microbatches=3: must be the 2 of {}; try a train.global_batch of 2, or "
             "parallel.schedule=gpipe"),
            ({"pipeline": 2, "stages_per_rank": 2}, 16, "stages_per_rank=2: must be 1 under {}; try auto, or "
             "parallel.schedule=interleaved1f1b"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_it_is_refused(self, tmp_path, options, batch, message):
        name = written(tmp_path, ONE_BY_ONE)
        with pytest.raises(ConfigError) as error:
            Strategy(schedule=name, **options).layout(
                Strategy(pipeline=options["pipeline"]).dims(options["pipeline"]), batch, "auto"
            )
        assert str(error.value) == message.format(name)

    def test_a_name_that_is_none(self):
        with pytest.raises(ConfigError) as error:
            Strategy(pipeline=2, schedule="gpip")
        assert str(error.value) == (
            "schedule=gpip: must be gpipe, 1f1b, interleaved1f1b, looped_bfs, interleaved_zero_bubble, zbv, dualpipev, "
            "or the name of a file that ends in .csv; try gpipe"
        )

    def test_the_offered_batch_fits(self, tmp_path):
        strategy = Strategy(pipeline=2, schedule=written(tmp_path, ONE_BY_ONE))
        with pytest.raises(ConfigError, match=r"try a train\.global_batch of 8, or"):
            strategy.layout(strategy.dims(2), 4, 4)
        assert strategy.layout(strategy.dims(2), 8, 4).microbatches == 2
