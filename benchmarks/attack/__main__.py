"""SIGKILL to random processes of real commands at random times: nothing of a user's may be lost.

    python -m benchmarks.attack
    python -m benchmarks.attack --rounds 20 --slurm 0 --seed 7
    python -m benchmarks.attack --seed 7 --only 17 s3

Starts commands as a person would, each in a folder of its own, and kills one or several of the processes that come of
it: train.py, the fork server, a rank, the resource tracker, a data worker; half of the time within 50 ms of the first
rank's birth, else anywhere, during a save and at the end too. Then it looks whether a process is left after 15 s, a
directory has no valid record, a finished run has changed, and whether what is resumed becomes complete and has the
losses, bit for bit, of a command that was not attacked. With SLURM it kills who submits, a rank, or a job's batch step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.script import ROOT, judged, parser_of

from . import on_slurm, rounds, scenarios, victims
from .rounds import FAULTS, Round, Setting


def main() -> int:
    """Print the table; 1 if anything was lost."""
    options = _parse()
    print(f"seed {options.seed}, attacking {options.tree}", flush=True)
    base = Path(mkdtemp(prefix="ptdbench-attack-"))
    setting = Setting(options.tree, base, _environ(options.tree), base.name, options.seed)
    ended: list[Round] = []
    try:
        with _nothing_left(setting):
            ended.extend(_all_rounds(setting, options))  # one by one: those that have ended are shown in any case
    finally:
        if ended:
            _show(ended, options)
        if not any(one.faults for one in ended):
            shutil.rmtree(base, ignore_errors=True)
    return int(any(one.faults for one in ended))


def _all_rounds(setting: Setting, options: argparse.Namespace) -> Iterator[Round]:
    """Those of this machine, some at a time, then those of SLURM, which have its two nodes for themselves."""
    until = time.monotonic() + 60 * options.minutes
    here, on_cluster = _chosen(options)
    yield from _local(setting, here, until, options.jobs)
    if on_cluster:
        with on_slurm.cluster(ROOT) as conf:
            yield from on_slurm.all_rounds(setting, conf, on_cluster, until, _told)


def _chosen(options: argparse.Namespace) -> tuple[list[int], list[int]]:
    """The numbers of the rounds on this machine, and of those on SLURM."""
    if not options.only:
        return list(range(1, options.rounds + 1)), list(range(1, options.slurm + 1))
    names = sorted(set(options.only))
    return (
        [int(name) for name in names if not name.startswith("s")],
        [int(name[1:]) for name in names if name.startswith("s")],
    )


def _local(setting: Setting, chosen: Sequence[int], until: float, jobs: int) -> Iterator[Round]:
    wanted = {scenarios.of_round(number).name for number in chosen}
    known = {one.name: rounds.reference(setting, one) for one in scenarios.SCENARIOS if one.name in wanted}

    def one(number: int) -> Round | None:
        scenario = scenarios.of_round(number)
        return None if time.monotonic() > until else rounds.attack(setting, number, scenario, known[scenario.name])

    with ThreadPoolExecutor(jobs, initializer=victims.hurry) as pool:
        waiting: list[Future[Round | None]] = [pool.submit(one, number) for number in chosen]
        try:
            for done in as_completed(waiting):
                if ended := done.result():
                    yield _told(ended)
        except BaseException:
            victims.STOPPED.set()
            while not all(future.cancel() or future.done() for future in waiting):
                victims.sweep_away(setting.session)  # whoever waits for a victim sees it end
                time.sleep(0.1)
            raise


def _told(ended: Round) -> Round:
    """Say how a round went; keep its folder only if that is worth a look."""
    whom = ", ".join(map(str, ended.killed)) or "nobody"
    verdict = "FAULT" if ended.faults else "ok"
    print(f"{ended.name:>4} {ended.scenario}: {whom} killed, {ended.when}: {verdict}", file=sys.stderr, flush=True)
    for kind, seen in [*ended.faults, *(("note", note) for note in ended.notes)]:
        print(f"     {kind}: {seen}", file=sys.stderr, flush=True)
    if ended.faults:
        (ended.folder / "attack.json").write_text(json.dumps(vars(ended), indent=1, default=str) + "\n")
    else:
        shutil.rmtree(ended.folder, ignore_errors=True)
    return ended


@contextmanager
def _nothing_left(setting: Setting) -> Iterator[None]:
    """However the attack ends, its victims end with it."""

    def stop(number: int, _: Any) -> None:
        victims.STOPPED.set()
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        yield
    finally:
        victims.STOPPED.set()
        victims.sweep_away(setting.session)


def _show(ended: Sequence[Round], options: argparse.Namespace) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("scenario", no_wrap=True)
    for heading in ("rounds", "kills", "50 ms of\na birth", *FAULTS.values()):
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(one.scenario for one in sorted(ended, key=_order)):
        table.add_row(name, *_counts([one for one in ended if one.scenario == name]))
    table.add_section()
    table.add_row("all", *_counts(ended))
    Console(width=max(120, shutil.get_terminal_size().columns)).print(table)
    for one in ended:
        if one.faults:
            print(f"{one.name}: {', '.join(dict.fromkeys(kind for kind, _ in one.faults))}: {one.folder}")
    if notes := sum(bool(one.notes) for one in ended):
        print(f"{notes} rounds left temporary files behind, or something else of note")
    asked = sum(map(len, _chosen(options)))
    if len(ended) < asked:
        why = f"interrupted, or --minutes {options.minutes:g} over"
        print(f"{asked - len(ended)} of {asked} rounds were left out: {why}")
    failed = sum(bool(one.faults) for one in ended)
    judged(f"seed {options.seed}: {failed} of {len(ended)} rounds with a fault", "0", not failed)


def _counts(ended: Sequence[Round]) -> list[str]:
    """Rounds, kills, those at a birth, and the rounds with each kind of fault."""
    kinds = [sum(kind in {found for found, _ in one.faults} for one in ended) for kind in FAULTS]
    kills = sum(bool(one.killed) for one in ended)
    return [str(number) for number in (len(ended), kills, sum(one.at_birth for one in ended), *kinds)]


def _order(one: Round) -> tuple[bool, int]:
    return one.name.startswith("s"), int(one.name.lstrip("s"))


def _environ(tree: Path) -> dict[str, str]:
    """A person's variables; modules come from the tree, and what only the attack has from here."""
    return {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}


def _round(word: str) -> str:
    """The name of a round: 17, or s3 for one on SLURM."""
    if not word.removeprefix("s").isdecimal():
        raise argparse.ArgumentTypeError(f"{word} is no round; give numbers such as 17, or s3 for one on SLURM")
    return word


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "python -m benchmarks.attack")
    parser.add_argument("--rounds", type=int, default=200, help="on this machine (default: %(default)s)")
    parser.add_argument("--slurm", type=int, default=50, help="on a SLURM of two nodes here (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: another each time"
    )
    parser.add_argument("--only", nargs="+", type=_round, metavar="ROUND", help="repeat these, such as 17 or s3")
    parser.add_argument("--minutes", type=float, default=90, help="begin no round after that (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="rounds at a time on this machine (default: %(default)s)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="attack that checkout (default: this one)")
    options = parser.parse_args()
    options.tree = options.tree.resolve()
    return options


if __name__ == "__main__":
    sys.exit(main())
