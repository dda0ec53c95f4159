"""``ptdbench report``: what it writes, what it refuses, and what it says of damage."""

import os

import pytest

from tests.report.made import DDP, FSDP, failed, keep, run


@pytest.fixture
def report(ptdbench):
    """Calls it: exit status, lines of output, lines of errors."""

    def call(*words):
        status, out, err = ptdbench("report", *words)
        return status, out.splitlines(), err

    return call


@pytest.fixture
def sweep(tmp_path):
    """Two runs that are ok, and one that is not."""
    for number, record in enumerate((FSDP, DDP, failed("tp", "no room", "oom"))):
        keep(tmp_path / "sweep", f"{number}_gpt_tiny_{record.parallel}", record)
    return tmp_path / "sweep"


class TestForms:
    def test_html_beside_the_results(self, report, sweep):
        assert report(sweep) == (0, [f"report       {sweep / 'report.html'}"], [])
        text = (sweep / "report.html").read_text()
        assert text.startswith("<!DOCTYPE html>")
        assert "<h1>gpt_tiny: sweep</h1>" in text
        assert '<p class="answer">No layout is shown to be faster than another: one run each; ' in text
        assert "3 runs, 1 oom · made by ptdbench " in text

    def test_markdown_and_latex(self, report, sweep):
        assert report(sweep, "--md", "--latex")[0] == 0
        assert sorted(path.name for path in sweep.glob("report.*")) == ["report.md", "report.tex"]
        answer, title = (sweep / "report.md").read_text().split("\n\n")[:2]
        assert answer.endswith(". No throughput: tp (oom).**")
        assert title == "# gpt\\_tiny: sweep"

    def test_a_report_that_cannot_be_written_is_named(self, report, sweep):
        (sweep / "report.html").mkdir()
        assert report(sweep, "--force") == (1, [], [f"{sweep / 'report.html'}: Is a directory"])

    def test_one_run(self, report, sweep):
        assert report(sweep / "1_gpt_tiny_ddp")[0] == 0
        assert (sweep / "1_gpt_tiny_ddp" / "report.html").exists()

    def test_several_directories_of_which_none_is_reported_twice(self, report, sweep, tmp_path):
        keep(tmp_path / "more", "0_gpt_tiny_ddp", DDP)
        assert report(sweep, tmp_path / "more", sweep, tmp_path, "--md")[0] == 0
        assert "\n4 runs, 1 oom · made by" in (sweep / "report.md").read_text()

    def test_a_title_is_given_or_tells_directories_of_one_name_apart(self, report, sweep, tmp_path):
        for place in ("one/outputs", "two/outputs"):
            keep(tmp_path / place, "0_gpt_tiny_ddp", DDP)
        assert report(tmp_path / "one/outputs", sweep, tmp_path / "two/outputs", "--md")[0] == 0
        assert (tmp_path / "one/outputs/report.md").read_text().split("\n\n")[1] == (
            "# gpt\\_tiny: one/outputs, sweep and two/outputs"
        )
        assert report(sweep, "--latex", "--title", "8 GPUs")[1] == [f"report       {sweep / 'report.tex'}"]
        assert (sweep / "report.tex").read_text().startswith("% 8 GPUs\n")


class TestRefused:
    def test_it_overwrites_nothing_unless_it_is_told_to(self, report, sweep):
        (sweep / "report.md").write_text("mine")
        rule = f"report={sweep / 'report.md'}: already exists"
        assert report(sweep, "--md", "--html") == (
            1, [], [f"{rule}; give --force to overwrite it, or --output with another folder"],
        )  # fmt: skip
        assert (sweep / "report.md").read_text() == "mine"
        assert not (sweep / "report.html").exists()
        assert report(sweep, "--md", "--force")[0] == 0
        assert (sweep / "report.md").read_text() != "mine"

    def test_another_folder(self, report, sweep, tmp_path):
        missing = tmp_path / "no"
        told = f"--output={missing}: there is no such folder; create it, or give another one"
        assert report(sweep, "--output", missing) == (1, [], [told])
        missing.mkdir()
        assert report(sweep, "--output", missing)[0] == 0
        assert (missing / "report.html").exists()

    @pytest.mark.parametrize("others", [0, 1])
    def test_nothing_there(self, report, sweep, tmp_path, others):
        empty = tmp_path / "empty"
        empty.mkdir()
        rule = "no record.json there or below"
        remedy = "give the directory of a run or of a sweep, or a folder of them"
        assert report(*[sweep] * others, empty) == (1, [], [f"{empty}: {rule}; {remedy}"])
        assert not list(tmp_path.rglob("report.*"))

    def test_records_of_a_later_version(self, report, tmp_path):
        path = keep(tmp_path / "sweep", "0", run(schema=3))
        status, out, (line,) = report(path)
        assert (status, out) == (1, [])
        assert line.endswith("of a later version of ptdbench than this one, which reads 2; update ptdbench")

    @pytest.mark.skipif(os.geteuid() == 0, reason="no permissions: root may write everywhere")
    def test_a_folder_that_cannot_be_written(self, report, sweep):
        sweep.chmod(0o500)
        status, out, (line,) = report(sweep)
        assert (status, out, line.endswith("Permission denied")) == (1, [], True)
