"""The acceptance run of one GPU, in parts of less than nine minutes each.

    make gpu-check PYTHON=python3 WHEELS=wheels        # a machine that has torch and cannot install
    python -m benchmarks.gpu_check --list              # the parts, and what each shows
    python -m benchmarks.gpu_check --part numbers ceilings
    python -m benchmarks.gpu_check --table             # the stored results of each device

Each part runs in a process of its own; those that time nothing run first, several at once. Every part replaces its
earlier results in ``benchmarks/gpu/<device>.json``. Exit status 0: all checks passed; 1: one failed; 2: no GPU.
``--device cpu`` tests the parts themselves with small models, and stores nothing without ``--results``. A virtual GPU
(``ptdbench virtual``) has no numbers and no times to compare.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from benchmarks.script import ROOT, options

#: What each part covers, its rule, and the function that runs it.
PARTS = Path(__file__).parent / "parts.yaml"

# main() puts ptdbench and its dependencies on the path: whatever imports them is imported after that.


def main() -> int:
    """Run the chosen parts and print their checks."""
    args = options(
        __doc__,
        "gpu_check",
        part=((), "some of the parts; by default all"),
        list=(False, "list the parts and end"),
        table=(False, "show the stored results and end"),
        wheels=(Path, "folder of wheels to put on the path"),
        outputs=(ROOT / "outputs", "folder of the runs"),
        results=(Path, "folder of the results; by default benchmarks/gpu"),
        jobs=(4, "parts run at once; 4 need 80 GB of GPU memory"),
        device=("cuda", "of the runs", ["cuda", "cpu"]),
    )
    with importable(args.wheels):
        import torch
        import yaml

        from . import session

        parts = yaml.safe_load(PARTS.read_text())
        if args.list:
            print("\n".join(f"{name:<27}{part['covers']}: {part['rule']}" for name, part in parts.items()))
            return 0
        if args.table:
            print(session.on_record(args.results or ROOT / "benchmarks/gpu"))
            return 0
        if unknown := sorted({*args.part} - {*parts}):
            print(f"--part {unknown[0]}: there is no such part; try {', '.join(parts)}", file=sys.stderr)
            return 2
        if args.device == "cuda" and not torch.cuda.device_count():
            print(f"gpu-check needs a GPU, and torch {torch.__version__} finds none on this machine", file=sys.stderr)
            return 2
        if len(args.part) == 1:
            return int(not run_part(args.part[0], args))
        names = args.part or list(parts)
        untimed = [name for name in names if parts[name].get("untimed")]
        failed = each(untimed, args, args.jobs) + each([name for name in names if name not in untimed], args, 1)
    print(f"failed: {', '.join(failed)}; see above" if failed else "all checks passed")
    return int(bool(failed))


def run_part(name: str, args: argparse.Namespace) -> bool:
    """Run a part in this process; return whether all checks passed. An error of the part itself is a failed check."""
    import yaml
    from hydra.utils import instantiate

    from .session import Session

    session, part = Session.begin(args.device, args.outputs), instantiate(yaml.safe_load(PARTS.read_text())[name])
    folder = args.results or (ROOT / "benchmarks/gpu" if session.kind == "cuda" else None)
    session.part = name
    session.results = folder and folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', session.device_name).strip('-')}.json"
    print(f"\n{name}: {part['covers']}: {part['rule']}; records in {session.directory}", flush=True)
    session.watched(part["run"])
    return all(check["passed"] for check in session.checks)


def each(names: Sequence[str], args: argparse.Namespace, jobs: int) -> list[str]:
    """Run each part in a process of its own, some at once, and print its output; return those that failed."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", args.device]
    command += ["--outputs", str(args.outputs.resolve())]
    command += ["--results", str(args.results.resolve())] if args.results else []

    def run(name: str) -> subprocess.CompletedProcess[str]:
        words, stdout = [*command, "--part", name], subprocess.PIPE if jobs > 1 else None
        return subprocess.run(words, cwd=ROOT, stdout=stdout, stderr=subprocess.STDOUT, text=True, check=False)

    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for name, done in zip(names, pool.map(run, names), strict=True):
            print(done.stdout or "", end="", flush=True)
            failed += [name] if done.returncode else []
    return failed


@contextmanager
def importable(wheels: Path | None) -> Iterator[None]:
    """Put the checkout and the unpacked wheels on the path; Hydra finds its files only outside of a wheel."""
    with TemporaryDirectory() as site:
        for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
            with ZipFile(wheel) as archive:
                archive.extractall(site)
        folders = [str(ROOT), site]
        sys.path[:0] = folders
        # Also for the processes that this one starts.
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, *inherited]))
        yield


if __name__ == "__main__":
    sys.exit(main())
