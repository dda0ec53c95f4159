"""A sweep as its runs leave it, and the report of it in a real browser."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ptdbench.records import series
from tests.report.made import DDP, FSDP, PDP, failed, keep, repeated, run
from tests.report.test_workload_tables import product

#: Throughput of the runs of each configuration, in the blocks of a sweep.
RATES = {"ddp": [2000.0, 2020.0, 1980.0], "fsdp": [1010.0, 990.0, 1000.0], "pdp": [1500.0, 1485.0, 1515.0]}

#: What an error message may hold, and a page must show as it is, and no wider than it is.
EVIL = f"</script><script>document.title = 'taken'</script> & <b>bold</b>{'x' * 900}"

#: What a workload of products has found, of somebody else's class.
PRODUCT = product(2e9, dtype="bf16", shape="2x4x8")
RANK = {"rank": 0, "device": "cpu", "products": [PRODUCT]}
MATMUL = {"ranks": [RANK], "ceilings": []}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three configurations with three runs each, one that failed, one of another model, and two of other workloads."""
    directory = tmp_path_factory.mktemp("results") / "sweep"
    for one in (DDP, FSDP, PDP):
        parallel = one.parallel
        made = repeated(parallel, RATES[parallel])
        for block, (rate, repeat) in enumerate(zip(RATES[parallel], made, strict=True)):
            metrics = one["metrics"] | {"tokens_per_second": rate, "peak_memory_bytes": 2**28 * len(parallel)}
            options = {
                "parallel": {"shard": len(parallel), "name": parallel, "schedule": "1f1b"},
                "optimizer": {"lr": 0.1 if parallel == "pdp" else 0.2},
                "train": {"micro_batch": "auto"},
                "eval": {"micro_batch": 64},
                "note": "-0.5" if parallel == "pdp" else "=1+1",
            }
            record = one | {
                "metrics": metrics,
                "config": repeat.config | options,
                "overrides": [f"parallel={parallel}", "model.name='a b'", f"repeat.block={block}"],
                "steps": 3,
                "environment": {"host": "n1", "torch": "2.15.0", "settings": {"OMP_NUM_THREADS": "1"}},
            }
            path = keep(directory, f"{block}_gpt_tiny_{parallel}", record)
            rows = series.unknown(3, 2)
            rows["loss"] = [3.0, 2.5, 2.25 if parallel != "pdp" else 2.5]
            rows["step_seconds"] = [[0.3, 0.2], [0.1, 0.2], [0.1, 0.1]]
            series.append(path / series.NAME, rows)
    keep(directory, "9_gpt_tiny_tp", failed("tp", EVIL))
    keep(directory, "10_toy_ddp", DDP | {"model": "toy", "metrics": DDP["metrics"] | {"tokens_per_second": 5.0}})
    other = {"model": None, "parallel": None, "config": {"workload": {"_target_": "nothing.of.the.kind"}}}
    keep(directory, "11_matmul", run(workload="matmul", matmul=MATMUL, **other))
    keep(directory, "12_hello", run(workload="y" * 1000, **other))
    return directory


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def watched(browser):
    """What opens a file and waits until all is drawn, and a list of what was said on the console or asked for."""
    complaints, context = [], browser.new_context(viewport={"width": 1300, "height": 1000}, accept_downloads=True)

    def open_it(path):
        page = context.new_page()
        own = path.as_uri()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(("blob:", own)) or complaints.append(asked.url))
        page.goto(own)
        drawn(page)
        return page

    yield open_it, complaints
    context.close()


@pytest.fixture
def show(browser) -> Iterator:
    """Opens a file; at the end nothing may have been said or asked for."""
    with watched(browser) as (open_it, complaints):
        yield open_it
    assert complaints == []


def drawn(page):
    """Waits until the page has drawn what it was last asked for."""
    page.wait_for_selector("body[data-drawn=all]", timeout=60_000)


def traces(page, figure):
    """What a figure shows, as plotly has it: names, and numbers as lists."""
    return page.evaluate(
        """id => document.querySelector(`[data-figure^="${id}"]`).data.map(
            ({name, x, y, error_x, text}) => ({name, x, y, text, array: error_x && error_x.array}))""",
        figure,
    )
