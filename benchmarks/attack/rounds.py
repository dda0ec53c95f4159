"""Rounds on this machine: a command, a moment, processes that are killed, and what has to be true afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import evidence, victims
from .scenarios import TURNS, Reference, Scenario
from .victims import Process, Victim

#: What may be wrong after a round, and the heading of its column.
FAULTS = {
    "left": "processes\nleft",
    "record": "no valid\nrecord",
    "torn": "files\ntorn",
    "lost": "finished\nlost",
    "incomplete": "not\nresumed",
    "unequal": "losses\ndiffer",
    "unknown": "jobs\nunknown",
    "open": "no final\nstate",
}

#: Seconds after which no process may be left.
LEFT = 15.0

#: Before what is seen after a resume.
RESUMED = "after the resume, "

#: What every attack on a birth stays below, in seconds.
BIRTH = 0.05


@dataclass
class Round:
    """One attack, and what came of it."""

    name: str  #: To repeat it: ``--only NAME``.
    scenario: str  #: What was attacked.
    folder: Path  #: Where.
    moment: str = ""  #: When the kill was due.
    family: Sequence[Process] = ()  #: The victim's processes at that moment.
    killed: Sequence[Process] = ()  #: Whom it hit.
    after_birth: float | None = None  #: Seconds after the first rank's birth; ``None`` where that was not watched.
    faults: list[tuple[str, str]] = field(default_factory=list)  #: Kind, one of :data:`FAULTS`, and what was seen.
    notes: list[str] = field(default_factory=list)  #: What is no fault and worth knowing.
    seconds: float = 0.0  #: What the round took.

    @property
    def when(self) -> str:
        """The moment of the kill, for people."""
        if self.after_birth is None or (self.moment != "birth" and not self.at_birth):
            return self.moment
        return f"{1e3 * self.after_birth:.0f} ms after the first birth"

    @property
    def at_birth(self) -> bool:
        """Whether the kill fell within 50 ms of the first birth."""
        return self.after_birth is not None and self.after_birth <= BIRTH

    def fault(self, kind: str, *seen: str) -> None:
        """Note down what is wrong."""
        self.faults += [(kind, one) for one in seen]

    def fault_left(self, there: Sequence[Process], when: str = "") -> None:
        """Note down processes that should have ended."""
        roles = {process.pid: process.role for process in self.family}
        for process in there:
            role = roles.get(process.pid, "process")
            self.fault("left", f"{when}{role} {process.pid}: {process.command[:100]}")


@dataclass(frozen=True)
class Setting:
    """What all rounds of an attack share."""

    tree: Path  #: The checkout that is attacked.
    base: Path  #: A folder for those of the rounds.
    environ: Mapping[str, str]  #: The victims' variables.
    session: str  #: What the marks of all victims begin with.
    seed: int  #: Decides everything that is random.

    def start(self, command: Sequence[str], folder: Path, log: str = "victim.log") -> Victim:
        """Start a command in a folder of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        return Victim(command, folder, self.mark(folder), self.environ, log)

    def mark(self, folder: Path) -> str:
        """The mark of the victims in a folder."""
        return f"{self.session}-{folder.name}."  # with an end, so that round 1 is not taken for round 17


def reference(setting: Setting, scenario: Scenario, patience: float = 300.0) -> Reference:
    """Carry out the command of a scenario undisturbed.

    Raises:
        SystemExit: It fails: there is nothing to compare with.
    """
    folder = setting.base / f"reference-{scenario.name.replace(', ', '-').replace(' ', '-')}"
    for name in (folder, folder.with_name(f"{folder.name}-again")):  # a port may be somebody else's
        victim = setting.start(scenario.command(setting.tree), name)
        victim.await_birth()
        birth = time.monotonic() - victim.started
        if victim.ends_within(patience) and not victim.exit_status:
            return Reference(birth, time.monotonic() - victim.started, losses(name, scenario))
    raise SystemExit(f"{scenario.name} fails without an attack:\n{tail(victim.log, 15)}")


def losses(folder: Path, scenario: Scenario) -> dict[str, Sequence[float]]:
    """Of each run that was ok."""
    found = evidence.finished(folder, bool(scenario.runs))
    return {path.name if scenario.runs else "": evidence.losses(path) for path in found}


def attack(setting: Setting, number: int, scenario: Scenario, known: Reference) -> Round:
    """One round: a fresh command, a kill, all checks."""
    name = str(number)
    rng = random.Random(f"{setting.seed}/{name}")
    began = time.monotonic()
    for attempt in range(5):  # one that has ended before its moment was not attacked
        this_round = Round(name, scenario.name, setting.base / (f"{name}" if not attempt else f"{name}-{attempt + 1}"))
        victim = setting.start(scenario.command(setting.tree, rng.choice((None, "outputs/named"))), this_round.folder)
        # In every other pass through the scenarios, so that each is attacked both ways.
        this_round.moment = "birth" if number // len(TURNS) % 2 == 0 else rng.choice(scenario.moments)
        before = strike(this_round, victim, rng, known, scenario)
        if this_round.killed:
            break
    judge(setting, this_round, victim, known, scenario, before)
    this_round.seconds = time.monotonic() - began
    return this_round


def strike(
    this_round: Round, victim: Victim, rng: random.Random, known: Reference, scenario: Scenario
) -> dict[Path, bytes]:
    """Wait for the round's moment and kill; the records of the runs that had finished by then."""
    born = _await(this_round.moment, victim, rng, known, scenario)
    before = evidence.finished(victim.folder, bool(scenario.runs))
    if family := victim.family():
        this_round.family, this_round.killed = family, victims.choose(family, rng)
        victims.kill(this_round.killed)
        this_round.after_birth = born and victims.now() - born
    return before


class _Saves:
    """Whether so many checkpoints have been begun below a folder."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count
        self._seen: set[str] = set()

    def __call__(self) -> bool:
        with suppress(FileNotFoundError):  # a checkpoint is deleted, or gets its name, while the folder is read
            self._seen.update(map(str, self._folder.glob("outputs/**/checkpoints/*.partial")))
        return len(self._seen) >= self._count


def _await(moment: str, victim: Victim, rng: random.Random, known: Reference, scenario: Scenario) -> float | None:
    """Sleep until the moment; when the first rank was born, where that was watched."""
    chance = rng.random()
    if moment == "start":
        victim.ends_within(chance * known.birth)
        return None
    born = victim.await_birth()
    if moment == "save":
        count = rng.randint(1, 8)
        victim.awaits(_Saves(victim.folder, count))
        victim.ends_within(0.03 * chance)
        return born
    if moment == "end":
        count = rng.randint(1, scenario.runs or 1)
        victim.awaits(lambda: len(evidence.finished(victim.folder, bool(scenario.runs))) >= count)
        victim.ends_within(0.2 * chance)
        return born
    # The rest of the 50 ms is for looking and killing.
    after = chance * (0.7 * BIRTH if moment == "birth" else known.seconds - known.birth)
    victim.ends_within((born or 0) + after - victims.now())
    return born


def judge(
    setting: Setting, this_round: Round, victim: Victim, known: Reference, scenario: Scenario,
    before: Mapping[Path, bytes], settle: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """Look for everything that may be wrong, resume where the scenario does, and look again.

    ``settle`` awaits what has to end before each look; by default the victim, before the first one.
    """
    lines = results(this_round.folder, scenario)
    if settle:
        settle("")
    else:
        _see_it_end(this_round, victim, known)
    inspect(this_round, scenario, known, before)
    this_round.notes += [f"{name} was left" for name in evidence.leftovers(this_round.folder)]
    if scenario.resumes:
        for directory in evidence.directories(this_round.folder):
            resume(setting, this_round, scenario, known, directory)
            if settle:
                settle(RESUMED)
            inspect(this_round, scenario, known, before, RESUMED)
            complete(this_round, scenario)
    for name in sorted(lines - results(this_round.folder, scenario)):
        this_round.fault("lost", f"{name}: its line of the results is gone")


def _see_it_end(this_round: Round, victim: Victim, known: Reference) -> None:
    """Wait for what has to end; what is left after that is a fault, and killed."""
    struck = time.monotonic()
    hurt = {process.role for process in this_round.killed}
    goes_on = "train.py" not in hurt  # and starts another fork server, or ends by itself when it has said what failed
    if goes_on and not victim.ends_within(known.patience):
        this_round.fault("left", f"train.py does not end within {known.patience:.0f} s")
    ended = time.monotonic() if goes_on else struck
    there = victims.survivors(victim.mark, victim.folder, ended + LEFT)
    this_round.fault_left(there)
    victim.ends_within(LEFT)


def inspect(
    this_round: Round, scenario: Scenario, known: Reference, before: Mapping[Path, bytes], when: str = ""
) -> None:
    """Records, files, finished runs, losses."""
    folder, is_sweep = this_round.folder, bool(scenario.runs)
    invalid = filter(None, map(evidence.invalid, evidence.run_directories(folder, is_sweep)))
    this_round.fault("record", *(when + one for one in invalid))
    this_round.fault("torn", *(when + one for one in evidence.half_written(folder)))
    for directory, record in before.items():
        if evidence.changed(directory, record):
            path = directory / evidence.RECORD
            this_round.fault("lost", f"{when}{path} has changed, and its run had finished before the kill")
    for name, found in losses(folder, scenario).items():
        if found != known.losses[name]:
            this_round.fault("unequal", f"{when}{name or 'the run'} is ok, with other losses than without an attack")


def resume(setting: Setting, this_round: Round, scenario: Scenario, known: Reference, directory: Path) -> None:
    """Go on with what was attacked."""
    was_done = bool(not scenario.runs and evidence.finished(this_round.folder, False))
    place = directory.relative_to(this_round.folder)
    victim = setting.start(scenario.resume(setting.tree, place), this_round.folder, "resume.log")
    if not victim.ends_within(known.patience):
        this_round.fault("incomplete", f"the resume does not end within {known.patience:.0f} s")
    elif victim.exit_status and not was_done:
        this_round.fault("incomplete", f"exit status {victim.exit_status}: {tail(victim.log)}")
    there = victims.survivors(victim.mark, victim.folder, time.monotonic() + LEFT)
    this_round.fault_left(there, RESUMED)


def complete(this_round: Round, scenario: Scenario) -> None:
    """Every run has to be ok now, in its record and among the results."""
    done = losses(this_round.folder, scenario)
    if len(done) < (scenario.runs or 1):
        this_round.fault("incomplete", f"after the resume {len(done)} of {scenario.runs or 1} runs are ok")
    if missing := sorted(set(done) - results(this_round.folder, scenario)) if scenario.runs else []:
        this_round.fault(
            "incomplete", f"after the resume the results have no line that says ok for {', '.join(missing)}"
        )


def results(folder: Path, scenario: Scenario) -> set[str]:
    """The runs of a sweep whose last line of results says that they were ok."""
    if not scenario.runs:
        return set()
    lines: dict[str, dict[str, Any]] = {}
    for directory in evidence.directories(folder):
        lines |= evidence.results(directory)
    return {name for name, record in lines.items() if record.get("status") == "ok"}


def tail(log: Path, lines: int = 1) -> str:
    """The end of what a victim printed."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])
