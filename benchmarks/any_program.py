"""Run programs of other libraries on virtual GPUs: the table of docs/any-program.md.

    make any-program
    make any-program ARGS="--only deepspeed --environments /tmp/venvs"
    make any-program ARGS="--sources FOLDER"

Each row is started as a person would type it, on small made data through the program's own options, by ``ptdbench
virtual``. Libraries come from the package index into an environment of their own, which shares this one's torch.
Programs that no index has are taken from ``--sources``, a folder with their checkouts: without it their rows are left
out, and count as not working. At least four of five rows must work, and memory that the authors of a program have
published for the same command must be within 3 % of what it reserves here.
"""

import json
import os
import random
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from benchmarks import tables
from benchmarks.script import ROOT, judged, options

#: The share of the rows that must work, and how far published memory may be off.
REQUIRED, TOLERANCE = 0.8, 0.03

#: Seconds that a row may take.
MOST_SECONDS = 1800

PROGRAMS = Path(__file__).parent / "programs"


def _tokens(folder: Path) -> None:
    """Write random characters as nanoGPT's own preparation of data would."""
    (folder / "data/made").mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        np.random.default_rng(1).integers(0, 65, 200_000).astype(np.uint16).tofile(folder / f"data/made/{part}.bin")


def _texts(folder: Path) -> None:
    """Write random words where torchtitan looks for its test data, and a tokenizer of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"word{number}" for number in range(2000)]
    for name in ("c4_test", "tokenizer"):
        (folder / "tests/assets" / name).mkdir(parents=True, exist_ok=True)
    drawn = random.Random(1)
    lines = (json.dumps({"text": " ".join(drawn.choices(words, k=400))}) for _ in range(2000))
    (folder / "tests/assets/c4_test/data.json").write_text("\n".join(lines))
    vocabulary = {word: number for number, word in enumerate(["<begin>", "<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.save(str(folder / "tests/assets/tokenizer/tokenizer.json"))
    names = {"bos_token": "<begin>", "eos_token": "<end>"}
    (folder / "tests/assets/tokenizer/tokenizer_config.json").write_text(json.dumps(names))


@dataclass(frozen=True)
class Row:
    """A program."""

    name: str
    package: str  #: Of the package index, maybe with its version; of a row with sources, the folder of its checkout.
    command: str  #: What follows ``python``; ``PROGRAMS`` is this folder's.
    prepare: str = ""  #: Of :data:`PREPARE`: what writes made data into the current folder.
    of_sources: bool = False  #: Whether it is run in its checkout.
    needs: str = ""  #: What its output must have.
    gpus: str = "h100x2"  #: What stands before the ``--``.
    published: float | None = None  #: GiB that its authors have seen reserved, with segments of fixed size.


#: The functions by which rows prepare made data.
PREPARE = {"texts": _texts, "tokens": _tokens}

ROWS = [Row(name, **fields) for name, fields in yaml.safe_load((PROGRAMS / "rows.yaml").read_text()).items()]

HEADS = ["program", "version", "`ptdbench virtual`", "outcome", "reserved GiB", "published", "messages of a step"]


def environment(folder: Path, package: str) -> tuple[Path, str]:
    """Install a package into an environment of its own, which shares the packages of this one, unless it is there.

    Returns the environment's interpreter, and the version of the package.
    """
    python = folder / package / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / package], check=True)
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.check_output([python, "-c", purelib], text=True)
        Path(site.strip(), "shared.pth").write_text(sysconfig.get_path("purelib"))
    name = package.partition("==")[0]
    version = [str(python), "-c", f"from importlib.metadata import version; print(version('{name}'))"]
    if subprocess.run(version, capture_output=True, check=False).returncode:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", package]
        subprocess.run([*pip, *({"torchtitan": ["tyro"]}.get(name, []))], check=True)
    return python, subprocess.check_output(version, text=True).strip()


def outcome(row: Row, environments: Path, sources: Path | None) -> list[str]:
    """Run a row; return its cells, in the order of ``HEADS``."""
    command = row.command.replace("PROGRAMS/", "benchmarks/programs/")
    cells = [row.name, "-", f"`{row.gpus} -- python {command}`"]
    checkout = sources and sources / row.package
    if row.of_sources and not (checkout and checkout.is_dir()):
        return [*cells, f"left out: no {row.package} in --sources", "", "", ""]
    try:
        python, version = environment(environments, "none" if row.of_sources else row.package)
    except subprocess.CalledProcessError as error:
        return [*cells, f"left out: {row.package} cannot be installed ({error.returncode})", "", "", ""]
    with TemporaryDirectory() as scratch:
        folder = checkout if row.of_sources and checkout else Path(scratch)
        if row.prepare:
            PREPARE[row.prepare](folder)
        status, record, output = _executed(row, [str(python), *row.command.split()], folder)
    works = status == 0 and record.get("steps", 0) >= 3 and row.needs in output
    figures = record.get("virtual") or {}
    reserved = figures["reserved_bytes"][0] / 2**30 if figures.get("reserved_bytes") else None
    off = f"{row.published:.1f} ({reserved / row.published - 1:+.2%})" if row.published and reserved else ""
    sent = ", ".join(f"{name} {kind['bytes'] / 1e6:,.1f} MB" for name, kind in (figures.get("messages") or {}).items())
    why = "ok" if works else f"fails: {(record.get('error') or {}).get('message') or output.strip()[-200:]}"
    return [row.name, version, cells[2], why, f"{reserved:.2f}" if reserved else "", off, sent]


def _executed(row: Row, words: list[str], folder: Path) -> tuple[int, dict[str, Any], str]:
    """Run a row's command on its virtual GPUs in a folder; return its status, its record and its output."""
    words = [word.replace("PROGRAMS", str(PROGRAMS)) for word in words]
    command = [sys.executable, "-m", "ptdbench", "virtual", *row.gpus.split(), "--json", "--", *words]
    fixed = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"} if row.published else {}
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=MOST_SECONDS,
            env={**os.environ, **fixed},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, {}, f"took more than {MOST_SECONDS} s"
    record = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return done.returncode, record, done.stderr


def main() -> int:
    """Print the rows, and rewrite the page if these are all; 1 if too few work, or memory is off."""
    args = options(
        __doc__, only=((), "rows whose names begin so"), sources=(Path, "of checkouts: nanoGPT"),
        environments=(Path("outputs/any-program-environments"), "a folder of those of the libraries"),
    )  # fmt: skip
    rows = []
    for row in ROWS:
        if not args.only or any(row.name.lower().startswith(word.lower()) for word in args.only):
            rows.append(outcome(row, args.environments.resolve(), args.sources and args.sources.resolve()))
            print(*rows[-1], sep=" | ", flush=True)
    working = sum(row[3] == "ok" for row in rows)
    table = f"{tables.drawn(HEADS, rows)}\n\n*{working} of {len(rows)} work.*"
    if not args.only:
        tables.show(ROOT / "docs/any-program.md", "programs", table)
    required = ceil(REQUIRED * len(rows))
    good = judged(f"{working} of {len(rows)} programs work", f"at least {required}", working >= required)
    off = [abs(float(row[5].partition("(")[2].rstrip("%)"))) / 100 for row in rows if row[5]]
    if off:
        good &= judged(f"published memory: off by at most {max(off):.2%}", f"{TOLERANCE:.0%}", max(off) <= TOLERANCE)
    return int(not good)
