"""Do programs of other libraries run on virtual GPUs, and what do they need: the table of docs/any-program.md.

    make any-program
    make any-program ARGS="--only deepspeed --environment /tmp/venv"
    make any-program ARGS="--sources FOLDER"

Each row is started as a person would type it, on small made data through the program's own options, by ``ptdbench
virtual``. Libraries come from the package index into an environment of their own, which shares this one's torch.
Programs that no index has are taken from ``--sources``, a folder with their checkouts: without it their rows are left
out, and count as not working. At least eight of the ten must work.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.script import ROOT, judged, options

#: How many of the rows must work.
REQUIRED = 8

#: Seconds that a row may take.
MOST_SECONDS = 1800

PROGRAMS = Path(__file__).parent / "programs"
TORCHRUN = "-m torch.distributed.run --nproc-per-node=2"


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
    package: str  #: Of the package index; of a row with sources, the folder of its checkout.
    command: str  #: What follows ``python``; ``PROGRAMS`` is this folder's.
    prepare: Callable[[Path], None] | None = None  #: Writes made data into the current folder.
    of_sources: bool = False  #: Whether it is run in its checkout.
    needs: str = ""  #: What its output must have.


_TITAN = "-m torchtitan.train --module llama3 --config llama3_debugmodel --training.steps 4"
_NANO = "--dataset=made --n_layer=6 --n_head=6 --n_embd=384 --block_size=256 --eval_iters=1 --max_iters=4"
_ACCELERATE = "-m accelerate.commands.launch --num_processes 2 --mixed_precision bf16"
_FSDP2 = "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"

ROWS = [
    Row("torchtitan, FSDP", "torchtitan", f"{TORCHRUN} {_TITAN}", _texts),
    Row("torchtitan, TP", "torchtitan", f"{TORCHRUN} {_TITAN} --parallelism.tensor_parallel_degree 2", _texts),
    Row(
        "nanoGPT, DDP", "nanoGPT", f"{TORCHRUN} train.py {_NANO} --compile=False --gradient_accumulation_steps=4",
        _tokens, of_sources=True,
    ),
    Row("transformers' Trainer, DDP", "accelerate", f"{_ACCELERATE} --multi_gpu PROGRAMS/transformers_trainer.py"),
    Row("transformers' Trainer, FSDP2", "accelerate", f"{_ACCELERATE} {_FSDP2} PROGRAMS/transformers_trainer.py"),
    Row("Lightning, FSDP", "lightning", "PROGRAMS/lightning_trainer.py fsdp"),
    Row("Lightning, ModelParallel", "lightning", "PROGRAMS/lightning_trainer.py model_parallel"),
    Row("DeepSpeed, ZeRO-2", "deepspeed", f"{TORCHRUN} PROGRAMS/deepspeed_zero.py 2", needs="skipped 0 steps"),
    Row("DeepSpeed, ZeRO-3", "deepspeed", f"{TORCHRUN} PROGRAMS/deepspeed_zero.py 3", needs="skipped 0 steps"),
    Row("Megatron-Core, TP", "megatron-core", f"{TORCHRUN} PROGRAMS/megatron_gpt.py", needs="stepped True"),
]  # fmt: skip


def environment(folder: Path) -> Path:
    """Create a Python environment that shares the packages of this one, unless it exists; return its interpreter."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.check_output([python, "-c", asked], text=True)
        Path(site.strip(), "shared.pth").write_text(sysconfig.get_path("purelib"))
    return python


def install(python: Path, package: str) -> str:
    """Install a package unless it is there; return its version."""
    asked = [str(python), "-c", f"from importlib.metadata import version; print(version('{package}'))"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", package]
        subprocess.run([*pip, *({"torchtitan": ["tyro"]}.get(package, []))], check=True)
    return subprocess.check_output(asked, text=True).strip()


def outcome(row: Row, python: Path, sources: Path | None) -> list[str]:
    """Run a row; return its cells: name, version, command, outcome, reserved GiB of the first rank, and messages."""
    command = row.command.replace("PROGRAMS/", "benchmarks/programs/")
    checkout = sources and sources / row.package
    if row.of_sources and not (checkout and checkout.is_dir()):
        return [row.name, "-", command, f"left out: no {row.package} in --sources", "", ""]
    try:
        version = "checkout" if row.of_sources else install(python, row.package)
    except subprocess.CalledProcessError as error:
        return [row.name, "-", command, f"left out: {row.package} cannot be installed ({error.returncode})", "", ""]
    with TemporaryDirectory() as scratch:
        folder = checkout if row.of_sources and checkout else Path(scratch)
        if row.prepare:
            row.prepare(folder)
        status, record, said = _carried_out([str(python), *row.command.split()], folder)
    works = status == 0 and record.get("steps", 0) >= 3 and row.needs in said
    figures = record.get("virtual") or {}
    reserved = f"{figures['reserved_bytes'][0] / 2**30:.2f}" if figures.get("reserved_bytes") else ""
    sent = ", ".join(f"{name} {kind['bytes'] / 1e6:,.1f} MB" for name, kind in (figures.get("messages") or {}).items())
    why = "ok" if works else f"fails: {(record.get('error') or {}).get('message') or said.strip()[-200:]}"
    return [row.name, version, command, why, reserved, sent]


def _carried_out(words: list[str], folder: Path) -> tuple[int, dict[str, Any], str]:
    """Run a command on two virtual GPUs in a folder; return its status, its record and its output."""
    words = [word.replace("PROGRAMS", str(PROGRAMS)) for word in words]
    command = [sys.executable, "-m", "ptdbench", "virtual", "h100x2", "--json", "--", *words]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False,
            timeout=MOST_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, {}, f"took more than {MOST_SECONDS} s"
    record = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return done.returncode, record, done.stderr


def main() -> int:
    """Print the rows, and rewrite the page unless only some were asked for; 1 if too few work."""
    given = options(
        __doc__, "make any-program", only=((), "rows whose names begin so"), sources=(Path, "of checkouts: nanoGPT"),
        environment=(Path("outputs/any-program-environment"), "of the libraries; made where it is missing"),
    )  # fmt: skip
    python = environment(given.environment.resolve())
    rows = []
    for row in ROWS:
        if not given.only or any(row.name.lower().startswith(word.lower()) for word in given.only):
            rows.append(outcome(row, python, given.sources and given.sources.resolve()))
            print(*rows[-1], sep=" | ", flush=True)
    working = sum(row[3] == "ok" for row in rows)
    heads = ["program", "version", "command, after `python`", "outcome", "reserved GiB", "messages of a step"]
    cells = [[*row[:2], f"`{row[2]}`", *row[3:]] for row in rows]
    table = f"{tables.drawn(heads, cells)}\n\n*{working} of {len(rows)} work, on two virtual H100.*"
    if not given.only:
        page = ROOT / "docs/any-program.md"
        page.write_text(tables.inserted(page.read_text(), "programs", table))
    required = min(REQUIRED, len(rows))
    return int(not judged(f"{working} of {len(rows)} programs work", f"at least {required}", working >= required))


if __name__ == "__main__":
    sys.exit(main())
