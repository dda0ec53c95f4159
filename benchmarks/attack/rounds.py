"""Rounds on this machine: a command, a moment, processes that are killed, and what has to be true afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from . import evidence, victims
from .scenarios import TURNS, Reference, Scenario, of_round
from .victims import Process, Victim

#: What may be wrong after a round, and the heading of its column.
FAULTS = {
    "left": "processes left", "record": "no valid record", "torn": "files torn", "lost": "finished lost",
    "incomplete": "not resumed", "unequal": "losses differ", "unknown": "jobs unknown", "open": "no final state",
}  # fmt: skip

#: Seconds after which no process may be left.
LEFT = 15.0

#: Before what is seen after a resume.
RESUMED = "after the resume, "

#: What every attack on a birth stays below, in seconds.
BIRTH = 0.05


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


@dataclass
class Round:
    """One attack, and what came of it."""

    setting: Setting  #: What it shares with others.
    name: str  #: To repeat it: ``--only NAME``.
    scenario: Scenario  #: What is attacked.
    known: Reference  #: The same undisturbed.
    folder: Path = field(init=False)  #: Where.
    moment: str = ""  #: When the kill is due.
    family: Sequence[Process] = ()  #: The victim's processes at that moment.
    killed: Sequence[Process] = ()  #: Whom it hit.
    after_birth: float | None = None  #: Seconds after the first rank's birth; ``None`` where that was not watched.
    faults: list[tuple[str, str]] = field(default_factory=list)  #: Kind, one of :data:`FAULTS`, and what was seen.

    scenario_of: ClassVar = staticmethod(of_round)  #: The scenario of a round by its number.

    def __post_init__(self) -> None:
        self.folder = self.setting.base / self.name

    @property
    def at_birth(self) -> bool:
        """Whether the kill fell within 50 ms of the first birth."""
        return self.after_birth is not None and self.after_birth <= BIRTH

    @property
    def when(self) -> str:
        """The moment of the kill, for people."""
        if self.after_birth is None or (self.moment != "birth" and not self.at_birth):
            return self.moment
        return f"{1e3 * self.after_birth:.0f} ms after the first birth"

    def fault(self, kind: str, *seen: str) -> None:
        """Note down what is wrong."""
        self.faults += [(kind, one) for one in seen]

    def see_none_left(self, victim: Victim, since: float, when: str = "", in_jobs: bool = True) -> None:
        """Note down processes of a victim that are still there 15 s after it should have ended, and kill them."""
        roles = {process.pid: process.role for process in self.family}
        for process in victims.survivors(victim.mark, victim.folder, since + LEFT, in_jobs):
            role = roles.get(process.pid, "process")
            self.fault("left", f"{when}{role} {process.pid}: {process.command[:100]}")

    def attack(self) -> None:
        """Start a fresh command, kill, and look for everything that may be wrong."""
        rng, number = random.Random(f"{self.setting.seed}/{self.name}"), int(self.name)
        for attempt in range(5):  # one that has ended before its moment was not attacked
            self.folder = self.setting.base / (f"{self.name}-{attempt + 1}" if attempt else self.name)
            command = self.scenario.command(self.setting.tree, rng.choice((None, "outputs/named")))
            victim = self.setting.start(command, self.folder)
            # In every other pass through the scenarios, so that each is attacked both ways.
            self.moment = "birth" if number // len(TURNS) % 2 == 0 else rng.choice(self.scenario.moments)
            before = self.strike(victim, rng)
            if self.killed:
                break
        self.judge(victim, before)

    def strike(self, victim: Victim, rng: random.Random) -> dict[Path, bytes]:
        """Wait for the round's moment and kill; the records of the runs that had finished by then."""
        born = self._await_moment(victim, rng)
        before = evidence.finished(victim.folder, self.scenario.is_sweep)
        self.kill(victim.family(), rng, born)
        return before

    def kill(self, family: Sequence[Process], rng: random.Random, born: float | None) -> None:
        """Kill some of a victim's processes, if there are any."""
        if family:
            self.family, self.killed = family, victims.choose(family, rng)
            victims.kill(self.killed)
            self.after_birth = born and victims.now() - born

    def _await_moment(self, victim: Victim, rng: random.Random) -> float | None:
        """Sleep until the moment; when the first rank was born, where that was watched."""
        chance = rng.random()
        if self.moment == "start":
            victim.ends_within(chance * self.known.birth)
            return None
        born = victim.await_birth()
        if self.moment == "save":
            count, seen = rng.randint(1, 8), set[Path]()

            def has_begun_to_save() -> bool:
                with suppress(FileNotFoundError):  # a checkpoint is deleted, or gets its name, while the folder is read
                    seen.update(victim.folder.glob("outputs/**/checkpoints/*.partial"))
                return len(seen) >= count

            victim.awaits(has_begun_to_save)
            victim.ends_within(0.03 * chance)
        elif self.moment == "end":
            count = rng.randint(1, self.scenario.runs or 1)
            victim.awaits(lambda: len(evidence.finished(victim.folder, self.scenario.is_sweep)) >= count)
            victim.ends_within(0.2 * chance)
        else:
            # The rest of the 50 ms is for looking and killing.
            after = chance * (0.7 * BIRTH if self.moment == "birth" else self.known.seconds - self.known.birth)
            victim.ends_within((born or 0) + after - victims.now())
        return born

    def judge(self, victim: Victim, before: Mapping[Path, bytes]) -> None:
        """Look for everything that may be wrong, resume where the scenario does, and look again."""
        lines = evidence.ok_in_results(self.folder)
        self.settle(victim)
        self._inspect(before)
        for directory in evidence.directories(self.folder) if self.scenario.resumes else ():
            self._resume(directory)
            self.settle(None, RESUMED)
            self._inspect(before, RESUMED)
            self._see_complete()
        for name in sorted(lines - evidence.ok_in_results(self.folder)):
            self.fault("lost", f"{name}: its line of the results is gone")

    def settle(self, victim: Victim | None, when: str = "") -> None:
        """Wait for what has to end after the kill; what is left then is a fault, and killed."""
        if victim is None:
            return  # a resume has ended
        struck = time.monotonic()
        hurt = {process.role for process in self.killed}
        goes_on = "train.py" not in hurt  # and starts another fork server, or ends when it has said what failed
        if goes_on and not victim.ends_within(self.known.patience):
            self.fault("left", f"train.py does not end within {self.known.patience:.0f} s")
        self.see_none_left(victim, time.monotonic() if goes_on else struck)
        victim.ends_within(LEFT)

    def _inspect(self, before: Mapping[Path, bytes], when: str = "") -> None:
        """Records, files, finished runs, losses."""
        invalid = filter(None, map(evidence.invalid, evidence.run_directories(self.folder, self.scenario.is_sweep)))
        self.fault("record", *(when + one for one in invalid))
        self.fault("torn", *(when + one for one in evidence.half_written(self.folder)))
        for directory, record in before.items():
            if evidence.changed(directory, record):
                path = directory / evidence.RECORD
                self.fault("lost", f"{when}{path} has changed, and its run had finished before the kill")
        for name, losses in losses_of(self.folder, self.scenario).items():
            if losses != self.known.losses[name]:
                self.fault("unequal", f"{when}{name or 'the run'} is ok, with other losses than without an attack")

    def _resume(self, directory: Path) -> None:
        """Go on with what was attacked."""
        was_done = bool(not self.scenario.is_sweep and evidence.finished(self.folder, False))
        command = self.scenario.resume(self.setting.tree, directory.relative_to(self.folder))
        victim = self.setting.start(command, self.folder, "resume.log")
        if not victim.ends_within(self.known.patience):
            self.fault("incomplete", f"the resume does not end within {self.known.patience:.0f} s")
        elif victim.exit_status and not was_done:
            self.fault("incomplete", f"exit status {victim.exit_status}: {tail(victim.log)}")
        self.see_none_left(victim, time.monotonic(), RESUMED)

    def _see_complete(self) -> None:
        """Every run has to be ok now, in its record and among the results."""
        done, every = losses_of(self.folder, self.scenario), self.scenario.runs or 1
        if len(done) < every:
            self.fault("incomplete", f"after the resume {len(done)} of {every} runs are ok")
        if missing := sorted({*done} - evidence.ok_in_results(self.folder)) if self.scenario.is_sweep else []:
            self.fault("incomplete", f"after the resume the results have no line that says ok for {', '.join(missing)}")


def reference(setting: Setting, scenario: Scenario, patience: float = 300.0) -> Reference:
    """Carry out the command of a scenario undisturbed.

    Raises:
        SystemExit: It fails: there is nothing to compare with.
    """
    folder = setting.base / f"reference-{scenario.name.replace(', ', '-').replace(' ', '-')}"
    for place in (folder, folder.with_name(f"{folder.name}-again")):  # a port may be somebody else's
        victim = setting.start(scenario.command(setting.tree), place)
        victim.await_birth()
        birth = time.monotonic() - victim.started
        if victim.ends_within(patience) and not victim.exit_status:
            return Reference(birth, time.monotonic() - victim.started, losses_of(place, scenario))
    raise SystemExit(f"{scenario.name} fails without an attack:\n{tail(victim.log, 15)}")


def losses_of(folder: Path, scenario: Scenario) -> dict[str, Sequence[float]]:
    """The losses of each run that was ok, by the name of its directory; of a single one by no name."""
    ok = evidence.finished(folder, scenario.is_sweep)
    return {path.name if scenario.is_sweep else "": evidence.losses(path) for path in ok}


def tail(log: Path, lines: int = 1) -> str:
    """The end of what a victim printed."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])
