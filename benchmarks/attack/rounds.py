"""Rounds on this machine: a command, a moment, processes to kill, and checks of what is left."""

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

#: Kinds of faults, and the headings of their columns.
FAULTS = {
    "left": "processes left", "record": "no valid record", "torn": "files torn", "lost": "finished lost",
    "incomplete": "not resumed", "unequal": "losses differ", "unknown": "jobs unknown", "open": "no final state",
}  # fmt: skip

#: Seconds in which all processes must end.
LEFT = 15.0

#: Begins the faults that are found after a resume.
RESUMED = "after the resume, "

#: The limit of every attack on a birth, in seconds.
BIRTH = 0.05


@dataclass(frozen=True)
class Setting:
    """What all rounds of an attack share."""

    tree: Path  #: The checkout that is attacked.
    base: Path  #: The parent of the folders of the rounds.
    environ: Mapping[str, str]  #: The victims' variables.
    session: str  #: The prefix of the marks of all victims.
    seed: int  #: Of all random decisions.

    def start(self, command: Sequence[str], folder: Path, log: str = "victim.log") -> Victim:
        """Start a command in a folder of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        return Victim(command, folder, self.mark(folder), self.environ, log)

    def mark(self, folder: Path) -> str:
        """Return the mark of the victims in a folder."""
        return f"{self.session}-{folder.name}."  # the dot tells round 1 from round 17


@dataclass
class Round:
    """One attack, and its outcome."""

    setting: Setting
    name: str  #: As in ``--only NAME``.
    scenario: Scenario  #: The attacked command.
    reference: Reference  #: The command without an attack.
    folder: Path = field(init=False)
    moment: str = ""  #: Of the kill.
    family: Sequence[Process] = ()  #: The victim's processes at that moment.
    killed: Sequence[Process] = ()
    after_birth: float | None = None  #: Seconds after the birth of the first rank, if it was awaited.
    faults: list[tuple[str, str]] = field(default_factory=list)  #: Kind, of :data:`FAULTS`, and description.

    scenario_of: ClassVar = staticmethod(of_round)  #: Returns the scenario of a round by its number.

    def __post_init__(self) -> None:
        self.folder = self.setting.base / self.name

    @property
    def at_birth(self) -> bool:
        """Whether the kill was within 50 ms of the first birth."""
        return self.after_birth is not None and self.after_birth <= BIRTH

    @property
    def when(self) -> str:
        """The moment of the kill, as text."""
        if self.after_birth is None or (self.moment != "birth" and not self.at_birth):
            return self.moment
        return f"{1e3 * self.after_birth:.0f} ms after the first birth"

    def fault(self, kind: str, *descriptions: str) -> None:
        """Record faults of a kind."""
        self.faults += [(kind, description) for description in descriptions]

    def see_none_left(self, victim: Victim, since: float, when: str = "", in_jobs: bool = True) -> None:
        """Record processes of a victim that are left 15 s after ``since``, and kill them."""
        roles = {process.pid: process.role for process in self.family}
        for process in victims.survivors(victim.mark, victim.folder, since + LEFT, in_jobs):
            role = roles.get(process.pid, "process")
            self.fault("left", f"{when}{role} {process.pid}: {process.command[:100]}")

    def attack(self) -> None:
        """Start the command, kill some of its processes, and look for faults."""
        rng, number = random.Random(f"{self.setting.seed}/{self.name}"), int(self.name)
        for attempt in range(5):  # the command may end before the moment
            self.folder = self.setting.base / (f"{self.name}-{attempt + 1}" if attempt else self.name)
            command = self.scenario.command(self.setting.tree, rng.choice((None, "outputs/named")))
            victim = self.setting.start(command, self.folder)
            # In every other pass through the scenarios, so that each is attacked at both moments.
            self.moment = "birth" if number // len(TURNS) % 2 == 0 else rng.choice(self.scenario.moments)
            before = self.strike(victim, rng)
            if self.killed:
                break
        self.judge(victim, before)

    def strike(self, victim: Victim, rng: random.Random) -> dict[Path, bytes]:
        """Wait for the moment and kill; return the records of the runs that had finished by then."""
        born = self._await_moment(victim, rng)
        before = evidence.finished(victim.folder, self.scenario.is_sweep)
        self.kill(victim.family(), rng, born)
        return before

    def kill(self, family: Sequence[Process], rng: random.Random, born: float | None) -> None:
        """Kill some of the processes, if there are any."""
        if family:
            self.family, self.killed = family, victims.choose(family, rng)
            victims.kill(self.killed)
            self.after_birth = born and victims.now() - born

    def _await_moment(self, victim: Victim, rng: random.Random) -> float | None:
        """Sleep until the moment; return the time of the first birth, if it was awaited."""
        chance = rng.random()
        if self.moment == "start":
            victim.ends_within(chance * self.reference.birth)
            return None
        born = victim.await_birth()
        if self.moment == "save":
            count, begun = rng.randint(1, 8), set[Path]()

            def has_begun_to_save() -> bool:
                with suppress(FileNotFoundError):  # of a checkpoint that is deleted or renamed meanwhile
                    begun.update(victim.folder.glob("outputs/**/checkpoints/*.partial"))
                return len(begun) >= count

            victim.awaits(has_begun_to_save)
            victim.ends_within(0.03 * chance)
        elif self.moment == "end":
            count = rng.randint(1, self.scenario.runs or 1)
            victim.awaits(lambda: len(evidence.finished(victim.folder, self.scenario.is_sweep)) >= count)
            victim.ends_within(0.2 * chance)
        else:
            # The rest of the 50 ms is for finding and killing processes.
            after = chance * (0.7 * BIRTH if self.moment == "birth" else self.reference.seconds - self.reference.birth)
            victim.ends_within((born or 0) + after - victims.now())
        return born

    def judge(self, victim: Victim, before: Mapping[Path, bytes]) -> None:
        """Look for faults, resume if the scenario does, and look again."""
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
        """Wait for the processes to end after the kill; those that do not are a fault, and are killed."""
        if victim is None:
            return  # a resume has ended
        struck = time.monotonic()
        hurt = {process.role for process in self.killed}
        goes_on = "train.py" not in hurt  # with another fork server, or until it has reported the failure
        if goes_on and not victim.ends_within(self.reference.patience):
            self.fault("left", f"train.py does not end within {self.reference.patience:.0f} s")
        self.see_none_left(victim, time.monotonic() if goes_on else struck)
        victim.ends_within(LEFT)

    def _inspect(self, before: Mapping[Path, bytes], when: str = "") -> None:
        """Look for faults of records, files, finished runs and losses."""
        invalid = filter(None, map(evidence.invalid, evidence.run_directories(self.folder, self.scenario.is_sweep)))
        self.fault("record", *map(when.__add__, invalid))
        self.fault("torn", *map(when.__add__, evidence.half_written(self.folder)))
        for directory, record in before.items():
            if evidence.changed(directory, record):
                path = directory / evidence.RECORD
                self.fault("lost", f"{when}{path} has changed, and its run had finished before the kill")
        for name, losses in losses_of(self.folder, self.scenario).items():
            if losses != self.reference.losses[name]:
                self.fault("unequal", f"{when}{name or 'the run'} is ok, with other losses than without an attack")

    def _resume(self, directory: Path) -> None:
        """Resume the attacked run or sweep."""
        was_done = bool(not self.scenario.is_sweep and evidence.finished(self.folder, False))
        command = self.scenario.resume(self.setting.tree, directory.relative_to(self.folder))
        victim = self.setting.start(command, self.folder, "resume.log")
        if not victim.ends_within(self.reference.patience):
            self.fault("incomplete", f"the resume does not end within {self.reference.patience:.0f} s")
        elif victim.exit_status and not was_done:
            self.fault("incomplete", f"exit status {victim.exit_status}: {tail(victim.log)}")
        self.see_none_left(victim, time.monotonic(), RESUMED)

    def _see_complete(self) -> None:
        """Require that every run is ok, in its record and in the results."""
        done, runs = losses_of(self.folder, self.scenario), self.scenario.runs or 1
        if len(done) < runs:
            self.fault("incomplete", f"after the resume {len(done)} of {runs} runs are ok")
        if missing := sorted({*done} - evidence.ok_in_results(self.folder)) if self.scenario.is_sweep else []:
            self.fault("incomplete", f"after the resume the results have no line that says ok for {', '.join(missing)}")


def reference(setting: Setting, scenario: Scenario, patience: float = 300.0) -> Reference:
    """Run the command of a scenario without an attack; raise SystemExit if it fails."""
    folder = setting.base / f"reference-{scenario.name.replace(', ', '-').replace(' ', '-')}"
    for place in (folder, folder.with_name(f"{folder.name}-again")):  # a port may be in use
        victim = setting.start(scenario.command(setting.tree), place)
        victim.await_birth()
        birth = time.monotonic() - victim.started
        if victim.ends_within(patience) and not victim.exit_status:
            return Reference(birth, time.monotonic() - victim.started, losses_of(place, scenario))
    raise SystemExit(f"{scenario.name} fails without an attack:\n{tail(victim.log, 15)}")


def losses_of(folder: Path, scenario: Scenario) -> dict[str, Sequence[float]]:
    """Return the losses of each ok run, by the name of its directory, which is empty for a single run."""
    ok = evidence.finished(folder, scenario.is_sweep)
    return {path.name if scenario.is_sweep else "": evidence.losses(path) for path in ok}


def tail(log: Path, lines: int = 1) -> str:
    """Return the last lines of a victim's output."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])
