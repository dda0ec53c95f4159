"""SIGKILL to random processes of real commands at random times: nothing of a user's may be lost.

    make attack ARGS="--rounds 20 --slurm 0 --seed 7"
    make attack ARGS="--seed 7 --only 17 s3"

What is killed, when, and what is a fault is in the README. Good is none.
"""

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
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.script import ROOT, judged, keep, options
from benchmarks.tables import drawn

from . import on_slurm, rounds, victims
from .rounds import FAULTS, Round, Setting


def main() -> int:
    """Print the table; return 1 if anything was lost."""
    args = options(
        __doc__,
        rounds=(200, "on this machine"),
        slurm=(50, "on a SLURM of two nodes here"),
        seed=(random.SystemRandom().randrange(10**6), "another each time"),
        only=((), "repeat these rounds, such as 17, or s3 for one on SLURM"),
        minutes=(90.0, "begin no round after that"),
        jobs=(2, "rounds at a time on this machine"),
        tree=(ROOT, "attack that checkout"),
    )
    everything = [*map(str, range(1, args.rounds + 1)), *(f"s{number}" for number in range(1, args.slurm + 1))]
    names, tree = [*dict.fromkeys(args.only)] or everything, args.tree.resolve()
    print(f"seed {args.seed}, attacking {tree}", flush=True)
    base, ended = Path(mkdtemp(prefix="ptdbench-attack-")), list[Round]()
    setting = Setting(tree, base, environ(tree), base.name, args.seed)
    until = time.monotonic() + 60 * args.minutes
    try:
        with _nothing_left(setting):
            # Extended round by round, so that an interrupted attack shows those that have ended.
            if here := [name for name in names if not name.startswith("s")]:
                ended.extend(_attacked(_prepared(setting, here, Round), until, args.jobs))
            if there := [name for name in names if name not in here]:
                with on_slurm.cluster() as variables:
                    setting = replace(setting, environ={**setting.environ, **variables})
                    ended.extend(_attacked(_prepared(setting, there, on_slurm.SlurmRound), until, 1))
    finally:
        if ended:
            _show(ended, len(names), args)
        is_faulty = any(attacked.faults for attacked in ended)
        if not is_faulty:
            shutil.rmtree(base, ignore_errors=True)
    return int(is_faulty)


def environ(tree: Path) -> dict[str, str]:
    """Return a user's variables: modules come from the attacked tree, and then from this one."""
    return {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}


def _prepared(setting: Setting, names: Sequence[str], kind: type[Round]) -> list[Round]:
    """Return rounds by their names, after runs of their commands without an attack."""
    chosen = {name: kind.scenario_of(int(name.lstrip("s"))) for name in names}
    references = {scenario: rounds.reference(setting, scenario) for scenario in dict.fromkeys(chosen.values())}
    return [kind(setting, name, scenario, references[scenario]) for name, scenario in chosen.items()]


def _attacked(prepared: Sequence[Round], until: float, jobs: int) -> Iterator[Round]:
    """Run ``jobs`` rounds at a time, and yield them as they end; none begins after ``until``."""

    def attacked(chosen: Round) -> Round | None:
        if time.monotonic() > until:
            return None
        chosen.attack()
        return chosen

    with ThreadPoolExecutor(jobs, initializer=victims.hurry) as pool:
        waiting: list[Future[Round | None]] = [pool.submit(attacked, chosen) for chosen in prepared]
        try:
            for done in as_completed(waiting):
                if ended := done.result():
                    _report(ended)
                    yield ended
        except BaseException:
            victims.STOPPED.set()
            while not all(future.cancel() or future.done() for future in waiting):
                victims.sweep_away(prepared[0].setting.session)  # whoever waits for a victim sees it end
                time.sleep(0.1)
            raise


def _report(ended: Round) -> None:
    """Print the outcome of a round, and delete its folder unless it had a fault."""
    whom = ", ".join(map(str, ended.killed)) or "nobody"
    verdict = "FAULT" if ended.faults else "ok"
    print(f"{ended.name:>4} {ended.scenario.name}: {whom} killed, {ended.when}: {verdict}", file=sys.stderr, flush=True)
    for kind, seen in ended.faults:
        print(f"     {kind}: {seen}", file=sys.stderr, flush=True)
    if ended.faults:
        (ended.folder / "attack.json").write_text(json.dumps(vars(ended), indent=1, default=str) + "\n")
    else:
        shutil.rmtree(ended.folder, ignore_errors=True)


@contextmanager
def _nothing_left(setting: Setting) -> Iterator[None]:
    """Kill all victims when the attack ends, for whatever reason."""

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


def _show(ended: Sequence[Round], chosen: int, args: argparse.Namespace) -> None:
    """Print the numbers of rounds, kills, kills at a birth and each kind of fault, by scenario and in total."""
    rows = []
    for name in (*dict.fromkeys(attacked.scenario.name for attacked in ended), "all"):
        of_row = [attacked for attacked in ended if name in (attacked.scenario.name, "all")]
        faults = [sum(kind in dict(attacked.faults) for attacked in of_row) for kind in FAULTS]
        kills, births = sum(bool(each.killed) for each in of_row), sum(each.at_birth for each in of_row)
        rows.append([name, len(of_row), kills, births, *faults])
    print(drawn(["scenario", "rounds", "kills", "50 ms of a birth", *FAULTS.values()], rows))
    failed = [attacked for attacked in ended if attacked.faults]
    for attacked in failed:
        print(f"{attacked.name}: {', '.join(dict(attacked.faults))}: {attacked.folder}")
    if left_out := chosen - len(ended):
        print(f"{left_out} of {chosen} rounds were left out: interrupted, or --minutes {args.minutes:g} over")
    judged(f"seed {args.seed}: {len(failed)} of {len(ended)} rounds with a fault", "0", not failed)
    keep("attack", f"{len(failed)} faults in {len(ended)} rounds (seed {args.seed})")
