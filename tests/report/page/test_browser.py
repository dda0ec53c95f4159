"""The report in a real Chromium: what it shows are the figures of the records, and it answers."""

import csv
import io
import sys

import pytest
from axe_playwright_python.sync_playwright import Axe
from scipy import stats

import ptdbench
from ptdbench import __main__ as command
from ptdbench.comparison import significance
from ptdbench.comparison.significance import Pool
from ptdbench.profiling.phases import PHASES
from ptdbench.report.columns import COLUMNS
from ptdbench.units import three_digits
from tests.report.made import keep, run
from tests.report.page.conftest import EVIL, RATES, drawn, traces, watched

#: What tests change: the filter, sorting, and columns and rows that are shown.
LOOKS = """() => JSON.stringify([document.getElementById("filter").value, state.sort, state.down,
    ...report.models.map(({ open, shown }) => [[...open], [...shown]])])"""

#: Sorting and columns as they are at first; the filter is typed.
RESET = """() => {
    Object.assign(state, { sort: null, down: false });
    for (const model of report.models) model.open.clear();
    for (const model of report.models) model.shown = new Set(usualColumns(model).map((column) => column.name));
}"""


def made(directory):
    """The report of the runs in a directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ptdbench", "report", str(directory)])
        assert command.main() == 0
    return directory / "report.html"


@pytest.fixture(scope="module")
def opened(sweep, browser):
    """The report of the sweep, and what it complains of."""
    with watched(browser) as (open_it, complaints):
        yield open_it(made(sweep)), complaints


def downloaded(page, button):
    """The file that a button gives."""
    with page.expect_download() as download:
        page.click(button)
    return download.value


@pytest.fixture(scope="module")
def at_first(opened):
    return opened[0].evaluate(LOOKS)


@pytest.fixture
def report(opened, at_first):
    """The same for each test as it was opened."""
    page, complaints = opened
    if page.evaluate(LOOKS) != at_first:  # drawing all of it once more takes a second
        page.evaluate(RESET)
        fill(page, "")
    assert page.evaluate(LOOKS) == at_first
    yield page
    assert complaints == []


def rows(page, model=0):
    """The cells of a table by their headings, row by row."""
    texts = page.evaluate(
        """place => [...document.querySelectorAll(`[data-model="${place}"] .table tr:not(.detail)`)].map(
            row => [...row.children].map(cell => cell.textContent))""",
        model,
    )
    return [dict(zip(texts[0], row, strict=True)) for row in texts[1:]]


#: By how much the legend of a figure hangs into the plot below it, in pixels.
HANGS = """figure => {
  const box = (name) => document.querySelector(`[data-figure^="${figure}"] ${name}`).getBoundingClientRect();
  return box(".legend").bottom - box(".nsewdrag").top;
}"""

#: How many lines each word of a heading takes.
LINES = """text => {
  const [one, heading] = ["x", text].map((words) => element("h1", {}, words));
  document.getElementById("main").append(one, heading);
  keepWordsWhole(heading);
  return [...heading.children].map((word) => word.offsetHeight / one.offsetHeight);
}"""

#: Puts one text after the other into the filter, as a user who types faster than the page follows.
TYPED = """(texts) => {
  const filter = document.getElementById("filter");
  for (const text of texts) {
    filter.value = text;
    filter.dispatchEvent(new Event("input"));
  }
}"""


def labels(page, model=0):
    return [row["configuration"] for row in rows(page, model)]


def redrawn(page, action):
    """Waits until the page has drawn what an action asks for: an earlier drawing may still be under way."""
    before = page.evaluate("() => latest")
    action()
    for _ in range(3000):
        if page.evaluate("() => latest") > before:
            break
        page.wait_for_timeout(20)
    else:
        raise AssertionError("the page was not drawn again in a minute")
    drawn(page)


def fill(page, text):
    """Sets the filter; the same as before is drawn once more too, where typing would be no change."""
    set_it = "text => (document.getElementById('filter').value = text, readAndUpdate())"
    redrawn(page, lambda: page.evaluate(set_it, text))


class TestFigures:
    def test_they_are_those_of_the_records(self, report, sweep):
        runs = {run.directory.name: run for run in ptdbench.load(sweep)}
        (bars,) = traces(report, "throughput")
        assert bars["x"] == pytest.approx([stats.gmean(RATES[parallel]) for parallel in ("ddp", "pdp", "fsdp")])
        samples = [dict(enumerate(rates)) for rates in RATES.values()]
        margin = significance.margin(Pool(samples), samples[0])
        assert bars["array"][0] / bars["x"][0] == pytest.approx(margin)
        assert report.evaluate("() => Object.keys(PHASES)") == [*PHASES]  # each has its color
        shown = {trace["name"]: trace["x"] for trace in traces(report, "phases")}
        for name, phase in PHASES.items():
            of_ranks = [runs[f"0_gpt_tiny_{one}"]["phases"]["ranks"][name] for one in ("ddp", "pdp", "fsdp")]
            if name != "other":  # it is what the others leave of the step
                assert shown.get(phase, [0.0] * 3) == pytest.approx([1e3 * sum(one) / 2 for one in of_ranks])
        points = [trace for trace in traces(report, "memory") if trace["name"] in RATES]
        assert {trace["name"]: trace["x"] for trace in points} == {p: [len(p) / 4] for p in RATES}
        steps = {trace["name"]: (trace["x"], trace["y"]) for trace in traces(report, "steps")}
        assert steps["ddp"] == ([1, 2, 3], pytest.approx([300, 200, 100]))
        losses = {trace["name"]: trace["y"] for trace in traces(report, "losses")}
        assert losses["pdp 1x2 1f1b"] == [3.0, 2.5, 2.5]

    def test_the_table_is_that_of_the_terminal(self, report):
        first, second, _, last = found = rows(report)
        assert [row["#"] for row in found] == ["1", "2", "3", "-"]
        assert (first["configuration"], first["runs"], first["tokens/s"][:5]) == ("ddp", "3", "2,000")
        assert [*first][:4] == ["#", "configuration", "tokens/s", "vs best"]
        assert (first["tokens/s/rank"], last["tokens/s/rank"]) == ("1,000", "-")
        assert (second["vs best"][:5], last["status"]) == ("0.75x", "failed")
        assert first["loss"] == "2.513"
        assert labels(report, 1) == ["ddp"]  # of the other model, which is not compared with these
        assert rows(report, 1)[0]["tokens/s"] == "5.00"

    def test_red_is_what_is_not_ok_and_no_virtual_run(self, report):
        bad = """() => report.models[0].rows.map((row) => ({ ...row, status: `virtual ${row.status}` })).map(
            (row) => tableRow(report.models[0], row, report.models[0].columns)[0].querySelector(".bad")?.textContent)"""
        assert report.evaluate(bad) == [None, None, None, "failed"]

    def test_the_pareto_front_has_what_nothing_beats(self, report):
        (front,) = [trace for trace in traces(report, "memory") if trace["name"] == "Pareto front"]
        assert front["y"] == pytest.approx([stats.gmean(RATES["ddp"])])  # the fastest takes the least memory

    def test_lines_below_the_table(self, report):
        text = report.inner_text("[data-model='0']")
        assert "fsdp +44 ms vs ddp: " in text

    def test_the_messages_of_records_are_shown_as_they_are_and_make_no_page_wider(self, report):
        report.get_by_role("button", name="tp", exact=True).first.click()
        assert EVIL in report.inner_text("#failed")
        assert EVIL in report.inner_text("tr.detail")
        assert report.title() == "gpt_tiny and toy: sweep"
        assert report.evaluate("() => document.documentElement.scrollWidth") <= 1300

    def test_a_narrow_window_has_room_for_legends(self, opened, show, sweep):
        page = show(sweep / "report.html")
        page.set_viewport_size({"width": 480, "height": 900})
        page.reload()
        drawn(page)
        assert [name for name in ("phases", "memory", "steps") if page.evaluate(HANGS, name) > 0] == []
        scrollbar = page.locator("[data-figure=phases-gpt_tiny] .scrollbar")
        assert scrollbar.evaluate("bar => bar.getBoundingClientRect().height") == 0
        assert "more" in page.get_attribute("[data-model='0'] .table", "class")  # the table goes on to the right
        head = [cell.bounding_box() for cell in page.locator("[data-model='0'] th").all()[:4]]
        assert head[3]["x"] + head[3]["width"] <= 480  # rank, name, throughput and vs best are in sight
        assert page.evaluate(LINES, "2026-11-26_23-54-54_sweep, " * 5 + "last") == [1.0] * 6

    def test_what_other_workloads_found(self, report):
        assert "bf16   2x4x8  0.0018" in report.inner_text("[data-other='0']")

    def test_scaling_begins_where_the_filter_does(self, opened):
        curve = {"kind": "strong", "name": "ddp, batch 16", "rows": [0, 1, 2], "efficiency": [2.0, 1.0, 0.75]}
        rows = [{"number": number, "ranks": number, "rate": 50 + 50 * number, "high": None} for number in (1, 2)]
        draw = "([curve, rows]) => drawScaling({ unit: 'tokens', scaling: [curve] }, rows)"
        figure = opened[0].evaluate(draw, [curve, rows])
        assert [trace["y"] for trace in figure["traces"]] == [[100, 150], [100, 200], [100, 75]]
        assert figure["layout"]["xaxis"]["tickvals"] == [1, 2]
        assert [row[:4] + row[6:] for row in figure["rows"]] == [
            ["strong", "ddp, batch 16", 1, 100, 1.0], ["strong", "ddp, batch 16", 2, 150, 0.75],
        ]  # fmt: skip

    @pytest.mark.parametrize(("values", "labels"), [
        ([480, 5100], "100 200 500 1k 2k 5k 10k 20k 50k"), ([0.04, 7], "0.01 0.02 0.05 0.1 0.2 0.5 1 2 5 10 20 50"),
        ([8, 2e6], "1 10 100 1k 10k 100k 1M 10M"), ([2.1e9, 2.35e9], "2.1G 2.2G 2.3G 2.4G"), ([7], "7"),
    ])  # fmt: skip
    def test_a_logarithmic_axis_has_whole_labels(self, opened, values, labels):
        assert opened[0].evaluate("values => logAxis('', values).ticktext", values) == labels.split()

    def test_figures_have_the_digits_of_the_terminal(self, opened):
        figures = [0, 0.00012, 0.00456, 0.0456, 0.09994, 0.1234, 0.9994, 0.9996, 9.994, 9.996, 99.94, 99.96, 12345.6]
        assert opened[0].evaluate("figures => figures.map(digits)", figures) == [*map(three_digits, figures)]

    def test_a_schedule_has_a_lane_for_each_rank(self, opened):
        boxes = [(0, 0, "F", 0, 0.0, 1e-3), (0, 2, "F", 0, 2e-3, 1e-3), (1, 1, "B", 0, 3e-3, 2e-3)]
        fields = ("rank", "stage", "kind", "microbatch", "start", "seconds")
        passes = [dict(zip(fields, box, strict=True)) for box in boxes]
        draw = "passes => drawSchedules({ schedules: [{ number: 0, passes }] }, [{ number: 0, name: 'pdp' }])"
        figure = opened[0].evaluate(draw, passes)
        idle, forward, backward = figure["traces"]
        assert idle["x"] == [5, 5]
        drawn = [[trace[name] for name in ("base", "x", "text", "y")] for trace in (forward, backward)]
        assert drawn == [[[0, 2], [1, 1], ["0:0", "2:0"], [0, 0]], [[3], [2], ["0"], [1]]]
        assert figure["layout"]["yaxis"]["ticktext"] == ["rank 0", "rank 1"]
        assert figure["rows"][2] == ["pdp", 1, 1, "backward", 0, 3, 2]

    def test_the_answer_is_on_top_and_links_lead_to_tables_and_figures(self, report):
        answers = [line.inner_text() for line in report.locator(".answer").all()]
        assert answers[0].startswith("gpt_tiny: ddp is fastest: 1.33x pdp 1x2 1f1b (95%: 1.")
        assert answers[0].endswith("). No throughput: tp (failed).")
        assert answers[1].startswith("toy: ddp: 5.00 tokens/s")
        targets = report.evaluate("() => [...document.querySelectorAll('header a:not([hidden])')].map((a) => a.hash)")
        assert {"#table-gpt_tiny", "#throughput-gpt_tiny", "#table-toy", "#failed", "#other-1", "#repeat"} <= {*targets}
        assert "#scaling-gpt_tiny" not in targets
        assert report.evaluate("hashes => hashes.every((hash) => document.querySelector(hash))", targets)

    def test_memory_is_stacked_by_kind(self, opened):
        row = {"name": "ddp", "kinds": [2**21, 2**20, 0, 0, 2**22, 0]}
        figure = opened[0].evaluate("row => drawKinds(null, [row, { name: 'unknown' }])", row)
        assert {trace["name"]: trace["x"] for trace in figure["traces"]} == {
            "weights": [2], "gradients": [1], "communication buffers": [4],
        }  # fmt: skip
        assert figure["rows"] == [["ddp", 2, 1, 0, 0, 4, 0]]


class TestControls:
    @pytest.mark.parametrize(("typed", "expected"), [
        ("parallel=fsdp", ["fsdp"]), ("parallel=fsdp,ddp", ["ddp", "fsdp"]),
        ("parallel!=fsdp status=ok", ["ddp", "pdp 1x2 1f1b"]), ("optimizer.lr<0.15", ["pdp 1x2 1f1b"]),
        ("lr>=0.2", ["ddp", "fsdp"]), ("throughput>1400", ["ddp", "pdp 1x2 1f1b"]),
        ("precision=fp32 1f1b", ["pdp 1x2 1f1b"]), ("precision=bf16", []),
        ("memory<800 tokens/s>1", ["ddp", "pdp 1x2 1f1b"]), ("mfu>40 loss>2", ["ddp", "pdp 1x2 1f1b", "fsdp"]),
        ('"configuration=pdp 1x2 1f1b"', ["pdp 1x2 1f1b"]), ("", ["ddp", "pdp 1x2 1f1b", "fsdp", "tp"]),
    ])  # fmt: skip
    def test_filter(self, opened, typed, expected):
        passing = "text => report.models[0].rows.filter(readFilter(text)).map((row) => row.name)"
        assert opened[0].evaluate(passing, typed) == expected

    def test_table_and_figures_follow_what_is_typed(self, report):
        redrawn(report, lambda: report.locator("#filter").press_sequentially("parallel=fsdp"))
        assert labels(report) == ["fsdp"]
        assert report.inner_text("#found") == "1 of 5 configurations"
        (bars,) = traces(report, "throughput")
        assert bars["x"] == pytest.approx([stats.gmean(RATES["fsdp"])])
        fill(report, "parallel=tp")
        assert report.is_hidden("#throughput-gpt_tiny")
        fill(report, "")
        assert len(traces(report, "throughput")[0]["x"]) == 3

    def test_a_filter_that_means_nothing_is_told_and_stays_while_an_earlier_one_waits(self, report):
        for typed, said in (
            (
                "paralel=ddp",
                "paralel: no such option; did you mean parallel or parallel.shard or parallel.schedule? (still shown: ",
            ),
            ("batchsize=1", "batchsize: no such option; did you mean batch? (still"),
            ("xyz=1", "xyz: no such option; the field lists all of them (still shown: 5 of 5 conf"),
            ("rank<many", "rank<many: many is not a number"),
            ("status>1", "status>1: status is not a number; try status="),
            ("micro_batch=1", "micro_batch: several options end in it: train.micro_batch or eval.micro_batch"),
        ):
            report.evaluate(TYPED, ["parallel=ddp", typed])  # at once, however busy the machine is
            assert report.inner_text("#found").startswith(said)
        report.wait_for_timeout(400)
        assert report.inner_text("#found").startswith(said)
        caption = "() => getComputedStyle(document.querySelector('.rows'), '::before').content"
        assert "rows of the last valid" in report.evaluate(caption)
        assert len(labels(report)) == 4

    def test_sort(self, report):
        by_rank = ["ddp", "pdp 1x2 1f1b", "fsdp", "tp"]
        button = report.get_by_role("button", name="memory", exact=True).first
        for expected in (by_rank, ["fsdp", "ddp", "pdp 1x2 1f1b", "tp"], by_rank):  # what is not known comes last
            button.click()
            assert labels(report) == expected
        button = report.get_by_role("button", name="tokens/s", exact=True).first
        for expected, order in (("ddp", "descending"), ("fsdp", "ascending")):  # the fastest at the first click
            button.click()
            assert (labels(report)[0], report.get_attribute("th[aria-sort]", "aria-sort")) == (expected, order)

    def test_any_option_is_a_column_that_sorts(self, report):
        report.evaluate("() => (document.querySelector('.columns').open = true)")
        assert not {"parallel", "parallel.shard"} & rows(report)[0].keys()  # the name of a row says it
        report.locator("[data-model='0'] .columns").get_by_label("parallel", exact=True).check()
        assert [row["parallel"] for row in rows(report)] == ["ddp", "pdp", "fsdp", "tp"]
        report.get_by_role("button", name="parallel", exact=True).click()
        assert [row["parallel"] for row in rows(report)] == ["ddp", "fsdp", "pdp", "tp"]

    def test_a_click_on_a_value_filters(self, report):
        redrawn(report, report.locator("[data-model='0'] td .value", has_text="0.1").first.click)
        assert report.input_value("#filter") == "optimizer.lr=0.1"
        assert labels(report) == ["pdp 1x2 1f1b"]

    def test_a_value_with_quotes_filters_too(self, report):
        value = 'say "a\\b"'
        click = "value => (report.options['optimizer.lr'][0] = value, narrow('optimizer.lr', value))"
        redrawn(report, lambda: report.evaluate(click, value))
        found = labels(report)
        report.evaluate("() => (report.options['optimizer.lr'][0] = '0.2')")
        assert found == ["ddp"]

    def test_sorting_keeps_the_focus_and_what_is_open(self, report):
        report.get_by_role("button", name="fsdp", exact=True).first.click()
        report.get_by_role("button", name="loss", exact=True).first.click()
        assert report.evaluate("() => document.activeElement.textContent") == "loss"
        assert report.locator("tr.detail").count() == 1

    def test_intervals_are_drawn_where_they_are_known(self, report):
        visible = "place => intervals(report.models[place].rows).visible"
        assert [report.evaluate(visible, place) for place in (0, 1)] == [True, False]
        beside = "() => intervals([{ rate: 2, low: 1, high: 4 }, { rate: 1, low: null, high: null }])"
        assert report.evaluate(f"{beside}.array.map(Number.isNaN)") == [False, True]  # plotly draws null as 0

    def test_a_click_on_a_configuration_shows_its_runs_and_what_to_type(self, report, sweep):
        report.get_by_role("button", name="fsdp", exact=True).first.click()
        text = report.inner_text("tr.detail")
        assert "ptdbench train parallel=fsdp 'model.name='\"'\"'a b'\"'\"''" in text
        assert all(str(sweep / f"{block}_gpt_tiny_fsdp") in text for block in range(3))
        assert [line.split("\t")[5] for line in text.splitlines() if "\tok\t" in line] == ["1"] * 3  # environments
        report.get_by_role("button", name="fsdp", exact=True).first.click()
        assert report.locator("tr.detail").count() == 0

    def test_of_many_rows_some_are_shown_first(self, show, tmp_path):
        for number in range(105):
            config = {"optimizer": {"lr": number / 1000}}
            keep(tmp_path, f"{number}", run(tokens_per_second=1000.0 + number, config=config, workload="train"))
        page = show(made(tmp_path))
        assert len(rows(page)) == 100
        assert "the first 40 of 105 rows in the table's order" in page.inner_text("#throughput-gpt_tiny")
        page.get_by_role("button", name="show 5 of 5 more rows").click()
        assert len(rows(page)) == 105


class TestDownloads:
    def table(self, download):
        return list(csv.DictReader(io.StringIO(download.path().read_text())))

    def test_the_table_as_csv_has_no_formula(self, report):
        found = self.table(downloaded(report, "[data-model='0'] .below button:has-text('CSV')"))
        assert [row["note"] for row in found] == ["'=1+1", "-0.5", "'=1+1", ""]
        assert [row["name"] for row in found] == ["ddp", "pdp 1x2 1f1b", "fsdp", "tp"]
        ranks = [(row["best_rank"], row["worst_rank"], row["runs"]) for row in found]
        assert ranks == [("1", "1", "3"), ("2", "2", "3"), ("3", "3", "3"), ("", "", "1")]
        assert {one.field or one.name for one in COLUMNS} - {"rank", "label", "count"} <= found[0].keys()

    def test_the_table_as_csv_says_which_figure_of_an_evaluation_it_has(self, show, tmp_path):
        looked = {"step": 3, "samples": 8, "loss": 1, "top1": 0.375, "top5": 0.5, "bits_per_byte": None, "seconds": 1}
        keep(tmp_path, "0", run(evaluations=[looked]))
        (row,) = self.table(downloaded(show(made(tmp_path)), "[data-model='0'] .below button:has-text('CSV')"))
        assert (row["held_out"], row["val"]) == ("0.375", "37.5%")

    def test_data_as_csv(self, report):
        download = downloaded(report, "#throughput-gpt_tiny button:has-text('CSV')")
        found = self.table(download)
        assert [row["configuration"] for row in found] == ["ddp", "pdp 1x2 1f1b", "fsdp"]
        assert float(found[0]["tokens/s"]) == pytest.approx(stats.gmean(RATES["ddp"]))
        assert download.suggested_filename == "throughput-gpt_tiny.csv"

    @pytest.mark.parametrize(("form", "begin"), [("SVG", b"<svg"), ("PNG", b"\x89PNG")])
    def test_figures_as_images(self, report, form, begin):
        assert downloaded(report, f"#phases-gpt_tiny button:has-text('{form}')").path().read_bytes().startswith(begin)

    def test_the_numbers_of_a_figure_as_a_table(self, report):
        report.click("#losses-gpt_tiny details summary")
        report.wait_for_selector("#losses-gpt_tiny details table")
        assert "ddp\t1\t3" in report.inner_text("#losses-gpt_tiny details")


def test_dark_and_light(report):
    background = "() => getComputedStyle(document.body).backgroundColor"
    name = "() => getComputedStyle(document.querySelector('#throughput-gpt_tiny text')).fill"
    assert (report.evaluate(background), report.evaluate(name)) == ("rgb(255, 255, 255)", "rgb(31, 35, 40)")
    for _ in range(2):
        report.click("#theme")
    assert (report.evaluate(background), report.evaluate(name)) == ("rgb(20, 24, 29)", "rgb(227, 231, 235)")
    report.emulate_media(media="print")  # as it is on paper
    assert (report.evaluate(background), report.evaluate(name)) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
    assert report.is_hidden("#controls")
    report.emulate_media(media="screen")


@pytest.mark.parametrize("width", [400, 1100])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessible_in_both_themes_and_on_a_phone(report, theme, width):
    report.set_viewport_size({"width": width, "height": 900})
    report.emulate_media(color_scheme=theme)
    drawn(report)
    try:
        violations = Axe().run(report).response["violations"]
    finally:
        report.set_viewport_size({"width": 1300, "height": 1000})
        report.emulate_media(color_scheme="light")
    assert {rule["id"]: [node["html"][:200] for node in rule["nodes"]] for rule in violations} == {}
