"""TensorBoard in a real browser: its HPARAMS are the options that were swept, and its scalars those of the records."""

import json
import math
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import ptdbench
from tests.newcomer.test_commands import call
from tests.ports import free_port
from tests.programs import until

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

#: The options of the sweep, how HPARAMS calls them, and what it shows for each value.
SWEPT = {
    "parallel.schedule": ("schedule", {"gpipe": "gpipe", "1f1b": "1f1b"}),
    "optimizer.lr": ("lr", {"0.001": "0.0010000", "1e+30": "1.0000e+30"}),
    "train.micro_batch": ("micro_batch", {"4": "4.0000", "8": "8.0000"}),
}


@pytest.fixture(scope="module")
def sweep(shell, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    options = " ".join(f"{option}={','.join(values)}" for option, (_, values) in SWEPT.items())
    line = (
        "ptdbench train -m model=gpt_tiny parallel=pdp device=cpu train.steps=6 train.clip_norm=1 hydra.sweep.dir=sweep"
    )
    done = call(f"{line} eval.every=3 data.held_out=0.02 {options}", folder, shell)
    assert done.returncode == 1, done.stdout + done.stderr  # with the second learning rate they diverge
    return folder / "sweep"


@pytest.fixture(scope="module")
def tensorboard(sweep, programs) -> Iterator[str]:
    """The address of a TensorBoard of the sweep."""
    port = free_port()
    server = subprocess.Popen(
        [programs / "tensorboard", "--logdir", sweep, "--port", str(port)], stderr=subprocess.DEVNULL
    )
    address = f"http://localhost:{port}"
    runs = {folder.name for folder in sweep.iterdir() if folder.is_dir() and list(folder.glob("events*"))}
    try:
        until(lambda: _read_runs(address) >= runs, 120)
        yield address
    finally:
        server.terminate()
        server.wait()


def _read_runs(address: str) -> set[str]:
    try:
        return set(fetch(address, "data/runs"))
    except OSError:
        return set()


def fetch(address: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{address}/{path}?{urlencode(query)}", timeout=30) as answer:
        return json.load(answer)


def test_hparams_has_a_column_for_each_option_that_was_swept(sweep, tensorboard, chromium, tmp_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 3000, "height": 1200})
        page.goto(tensorboard)
        page.get_by_role("tab", name="HPARAMS").click(timeout=60_000)
        cells = page.locator("vaadin-grid-cell-content")
        cells.filter(has_text="0_").first.wait_for(timeout=60_000)
        page.screenshot(path=tmp_path / "hparams.png")
        texts = [text.strip() for text in cells.all_inner_texts()]
        for label, choice in (("Sort by", "summary/throughput"), ("Direction", "Descending")):
            box = page.locator(f"paper-dropdown-menu[label='{label}']")
            box.click()
            box.locator("paper-item").filter(has_text=choice).click()
            page.wait_for_timeout(3000)
        ordered = [text.strip() for text in cells.all_inner_texts()]
        browser.close()
    runs = {run.directory.name: run for run in ptdbench.load(sweep)}
    shown = rows(texts, list(runs))
    assert shown.keys() == runs.keys()
    for name, run in runs.items():
        words = dict(override.split("=") for override in run["overrides"])
        for option, (called, values) in SWEPT.items():
            assert shown[name][called] == values[words[option]], (name, option)
        throughput = run["metrics"]["tokens_per_second"] if run["status"] == "ok" else None
        assert float(shown[name]["summary/throughput"] or "nan") == pytest.approx(
            throughput or math.nan, 1e-3, nan_ok=True
        )
    fastest = sorted(runs, key=lambda name: -runs[name]["metrics"]["tokens_per_second"])
    ok = [name for name in fastest if runs[name]["status"] == "ok"]
    assert [text for text in ordered if text in runs][: len(ok)] == ok


def rows(texts: list[str], names: list[str]) -> dict[str, dict[str, str]]:
    """The table's left columns from the texts of its cells: run → heading → text."""
    start = texts.index("Trial ID")
    heading = texts[start : texts.index("summary/throughput") + 1]
    return {name: dict(zip(heading, texts[texts.index(name) :], strict=False)) for name in names}
