"""The acceptance run of one GPU, in parts of less than nine minutes each.

    make gpu-check PYTHON=python3 WHEELS=wheels        # a machine that has torch and cannot install
    python -m benchmarks.gpu_check --list              # the parts, and what each shows
    python -m benchmarks.gpu_check --part numbers ceilings
    python -m benchmarks.gpu_check --table             # what is on record of each device

Parts that time nothing run first, several at once, each in a process of its own. Every part adds what it found to
``benchmarks/gpu/<device>.json``, in place of what it found there before. Exit status 0: all checks passed; 1: one
failed; 2: there is no GPU here. ``--device cpu`` tries the parts themselves with small models; it shows nothing about a
GPU and records nothing unless ``--results`` says where. Nor is anything recorded of a GPU that is not there
(``benchmarks/on_virtual.py``), which has no numbers and no times to compare.

The wheels (``benchmarks/README.md`` lists them) are made elsewhere by ``pip wheel``. They are unpacked and not
installed; what they hold comes before what the machine has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from benchmarks.script import ROOT, parser_of

# Only main() puts ptdbench and what it needs on the path, so that what imports them is imported after that.


def main() -> int:
    """Carry out the parts that were asked for and print what came out."""
    options = _parse()
    with importable(options.wheels):
        from . import parts, results

        if options.list:
            print("\n".join(f"{name:<27}{part.__doc__}" for name, part in parts.PARTS.items()))
            return 0
        if options.table:
            print(results.tables(options.results or results.FOLDER))
            return 0
        unknown = sorted(set(options.part or ()) - set(parts.PARTS))
        if unknown:
            print(f"--part {unknown[0]}: there is no such part; try {', '.join(parts.PARTS)}", file=sys.stderr)
            return 2
        return _check(options)


def _check(options: argparse.Namespace) -> int:
    import torch

    from . import parts

    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.device == "cuda" and not gpus:
        print(f"gpu-check needs a GPU, and torch {torch.__version__} finds none on this machine", file=sys.stderr)
        return 2
    asked = options.part or list(parts.PARTS)
    beside = [name for name in asked if name in parts.UNTIMED] if options.jobs > 1 and len(asked) > 1 else []
    alone = [name for name in asked if name not in beside]
    failed = _beside_each_other(beside, options) + (_one_by_one(alone, options) if alone else [])
    print(f"{len(failed)} checks failed: {'; '.join(failed)}" if failed else "all checks passed")
    return int(bool(failed))


def _one_by_one(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Carry out the parts in this process, one after the other; the checks that failed."""
    from . import parts, results
    from .session import Session

    failed = []
    session = Session.begin(options)
    folder = options.results or (results.FOLDER if session.kind == "cuda" else None)
    for name in names:
        print(f"\n{name}: {parts.PARTS[name].__doc__}", flush=True)
        keep = partial(results.keep, folder, session.device_name, name) if folder else (lambda _: None)
        session.carry_out(name, parts.PARTS[name], keep)
        failed += [f"{name}: {check.name}" for check in session.checks if not check.passed]
    print(f"\nrecords in {session.directory}")
    return failed


def _beside_each_other(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Carry out each part in a process of its own, and print what it prints when it is done; the parts that failed."""
    options_of_all = ["--device", options.device, "--outputs", str(options.outputs.resolve())]
    if options.results:
        options_of_all += ["--results", str(options.results.resolve())]

    def carried_out(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.gpu_check", *options_of_all, "--part", name]
        return subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )

    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, done in zip(names, pool.map(carried_out, names), strict=True):
            print(done.stdout, end="", flush=True)
            failed += [f"{name}: see above"] if done.returncode else []
    return failed


@contextmanager
def importable(wheels: Path | None) -> Iterator[None]:
    """Put the checkout on the path, and what the wheels hold; Hydra finds its files only outside of a wheel."""
    with TemporaryDirectory() as site:
        for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
            with ZipFile(wheel) as archive:
                archive.extractall(site)
        folders = [str(ROOT), site]
        sys.path[:0] = folders
        # Also for the processes that this one starts: the fork server, and torch's compilers.
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, *inherited]))
        yield


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "gpu_check")
    parser.add_argument("--part", nargs="+", metavar="NAME", help="default: all parts")
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    parser.add_argument("--table", action="store_true", help="show what is on record and end")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to put on the path")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs", help="default: %(default)s")
    parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/gpu)")
    parser.add_argument(
        "--jobs", type=int, default=4, help="parts run at once; 4 need 80 GB of GPU memory (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
