"""Rewrite the tables of the pages from the stored results, as ``python -m benchmarks.tables``.

``results.json`` holds the figures of the README with date and machine, ``gpu/`` the results of ``make gpu-check``,
``parity/`` and ``virtual/`` the matrices of layouts. A benchmark that is started with ``KEEP=1`` stores its figures.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
README, RESULTS = FOLDER / "README.md", FOLDER / "results.json"

#: The device and the parts of ``make gpu-check`` whose speeds the README shows.
SPEEDS = ("NVIDIA-H200", ("large-eager", "large-layers", "small"))


def drawn(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Draw a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def inserted(text: str, name: str, table: str) -> str:
    """Return a page with the table between its comments of this name replaced."""
    before, begin, rest = text.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not (begin and end):
        raise ValueError(f"the page has no comments <!-- {name} --> and <!-- end of {name} -->")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def show(page: Path, name: str, table: str) -> None:
    """Replace the table of this name in a page."""
    page.write_text(inserted(page.read_text(), name, table))


def store(name: str, result: str | Sequence[Sequence[str]]) -> None:
    """Store a figure's result or a table's rows with the date and this machine, and rewrite the pages."""
    from ptdbench.measure.hardware import environment

    machine, results = environment("cpu"), json.loads(RESULTS.read_text())
    kind, content = ("figures", "result") if isinstance(result, str) else ("tables", "rows")
    if name not in results[kind]:
        print(f"results.json has no {name!r} among its {kind}: not stored")
        return
    results[kind][name] |= {
        content: result,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{machine['cores']} cores, {machine['cpu']}, torch {machine['torch']}",
    }
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    rewrite()


def of_readme() -> dict[str, str]:
    """Draw the tables of the README, by name."""
    results = json.loads(RESULTS.read_text())
    fields = ("command", "measures", "required", "result", "date", "machine")
    figures = [[figure[field] for field in fields] for figure in results["figures"].values()]
    tables = {name: drawn(table["columns"], table["rows"]) for name, table in results["tables"].items()}
    speeds = drawn(
        ("model, samples, `compile`", "tokens/s", "MFU", "step ms", "GiB", "virtual"),
        _speeds(results["known without a GPU"]),
    )
    parts = yaml.safe_load((FOLDER / "gpu_check/parts.yaml").read_text())
    covered = [(f"`{name}`", part["covers"], part["rule"]) for name, part in parts.items()]
    return {
        "figures": drawn(fields, figures), "speeds": speeds, "parts": drawn(("part", "covers", "rule"), covered),
        **tables,
    }  # fmt: skip


def of_gpu_check(device: str = "*", parts: Sequence[str] = ()) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield device, torch and figures of each run whose speed ``make gpu-check`` has measured, maybe of some parts."""
    for path in sorted((FOLDER / "gpu").glob(f"{device}.json")):
        results = json.loads(path.read_text())
        for part in (results["parts"][name] for name in parts or results["parts"]):
            for check in part["checks"]:
                if check["name"] != "goal" and "overrides" in check["figures"]:
                    yield results["device"], part["environment"]["torch"], check["figures"]


def _speeds(virtual_gib: dict[str, str]) -> Iterable[list[str]]:
    """Yield the cells of the runs of an H200, each with the memory of the same run on a virtual GPU."""
    for _, _, figures in of_gpu_check(*SPEEDS):
        options = dict(word.split("=", 1) for word in figures["overrides"])
        run = f"{options['model']}, {options['train.global_batch']}, `{options['compile']}`"
        rate, mfu, step = figures["tokens_per_second"], figures["mfu"], figures["step_seconds"]
        measured = f"{rate:,.0f}", f"{100 * mfu:.1f} %", f"{1e3 * step:.1f}"
        yield [run, *measured, f"{figures['peak_memory_bytes'] / 2**30:.2f}", virtual_gib[run]]


def pages() -> dict[Path, str]:
    """Return the pages that have tables, with their text as it should be."""
    from benchmarks.cells import Matrix

    texts = {README: README.read_text()}
    for name, table in of_readme().items():
        texts[README] = inserted(texts[README], name, table)
    for matrix in map(Matrix.load, ("layouts", "experts", "virtual", "zoo")):
        texts[ROOT / matrix.page] = matrix.shown((ROOT / matrix.page).read_text())
    return texts


def rewrite() -> None:
    """Rewrite the pages."""
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    rewrite()
