"""Rounds on a SLURM cluster of two nodes: the submitter is killed, a rank, or a job's batch step."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

from benchmarks.script import ROOT

from . import evidence, rounds, victims
from .rounds import Round
from .scenarios import SCENARIOS
from .victims import Process, Victim

SUBMISSION, JOBS = SCENARIOS["slurm, submission"], SCENARIOS["slurm, jobs"]

#: Seconds in which the queue must become empty; the jobs of a round need a few.
_QUEUE = 180.0


@contextmanager
def cluster() -> Iterator[Mapping[str, str]]:
    """Start a cluster for as long as this is open; yield the variables by which SLURM's commands find it."""
    folder = Path(mkdtemp(prefix="ptdbench-slurm-", dir="/tmp"))  # sockets in it need a short path
    command = [sys.executable, "-m", "tests.slurm_cluster"]
    try:
        subprocess.run([*command, "up", str(folder)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([*command, "down", str(folder)], cwd=ROOT, check=False)


@dataclass
class SlurmRound(Round):
    """One attack on a sweep of jobs, which has the queue for itself."""

    scenario_of: ClassVar = staticmethod(lambda number: (SUBMISSION, JOBS)[number % 2])

    def attack(self) -> None:
        """Start a sweep, kill processes, and look for faults."""
        rng = random.Random(f"{self.setting.seed}/{self.name}")
        is_submission = self.scenario is SUBMISSION
        try:
            with self._busy() if is_submission else nullcontext("") as other:
                victim = self.setting.start(self.scenario.command(self.setting.tree), self.folder)
                before = self._strike_submitter(victim, rng) if is_submission else self._strike_job(victim, rng)
                self._see_jobs_known(other)
            self.judge(victim, before)
            self.see_none_left(victim, time.monotonic())
        finally:
            for job in self._jobs():
                self._ask("scancel", job)
            self._empties()
            victims.sweep_away(self.setting.mark(self.folder))

    def _ask(self, *command: str, mark: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM's or the product's."""
        environ = {**self.setting.environ, **({victims.MARK: mark} if mark else {})}
        return subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, timeout=120, check=check)

    def _jobs(self) -> set[str]:
        """Return the jobs that wait or run."""
        return set(self._ask("squeue", "--noheader", "--array", "--format=%i").stdout.split())

    def _empties(self) -> bool:
        """Return whether all jobs end in time."""
        end = time.monotonic() + _QUEUE
        while (there := self._jobs()) and time.monotonic() < end and not victims.STOPPED.is_set():
            time.sleep(0.5)
        return not there

    @contextmanager
    def _busy(self) -> Iterator[str]:
        """Hold both nodes by a job of somebody else's, so that others wait; yield its id."""
        command = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000"]
        job = self._ask(*command, mark=self.setting.mark(self.folder)).stdout.strip()
        try:
            while self._ask("squeue", "--noheader", "--format=%T", f"--jobs={job}").stdout.strip() != "RUNNING":
                time.sleep(0.1)
            yield job
        finally:
            self._ask("scancel", job, check=False)

    def _strike_submitter(self, victim: Victim, rng: random.Random) -> dict[Path, bytes]:
        """Kill train.py during its submissions, or soon after."""
        during = rng.random() < 0.75
        self.moment = "submission" if during else "following"
        victim.awaits(lambda: any(_submits(process) for process in victim.family()))
        if not during:
            victim.awaits(lambda: "submitted " in victim.log.read_text())
        victim.ends_within(rng.random() * (0.5 if during else 3.0))
        if there := victim.family():
            self.family, self.killed = there, there[:1] if rng.random() < 0.75 else there
            victims.kill(self.killed)
        self.see_none_left(victim, time.monotonic(), in_jobs=False)
        return {}

    def _strike_job(self, victim: Victim, rng: random.Random) -> dict[Path, bytes]:
        """Kill processes of the jobs, in half of the rounds at the birth of the first rank."""
        at_birth, born = int(self.name[1:]) // 2 % 2 == 0, list[float]()
        self.moment = "birth" if at_birth else "run"

        def is_born() -> bool:
            born.extend(victims.births(in_jobs(victim.mark)))
            return bool(born)

        first = min(born) if victim.awaits(is_born, lambda: victims.IDLE) else None
        after = rng.random() * (0.5 * rounds.BIRTH if at_birth else self.reference.seconds - self.reference.birth)
        time.sleep(max(0.0, (first or 0) + after - victims.now()))
        before = evidence.finished(victim.folder, is_sweep=True)
        self.kill(in_jobs(victim.mark), rng, first)
        return before

    def _see_jobs_known(self, other: str) -> None:
        """Require that ``status`` lists every job but ``other`` within 15 s."""
        end, unknown = time.monotonic() + rounds.LEFT, set[str]()
        while True:
            shown = "".join(self._status(sweep).stdout for sweep in evidence.directories(self.folder))
            unknown = self._jobs() - {other} - set(shown.split())
            if not unknown or time.monotonic() > end:
                break
            time.sleep(2)
        self.fault("unknown", *(f"job {job} is in the queue, and status does not know it" for job in sorted(unknown)))

    def _status(self, sweep: Path) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "ptdbench", "status", str(sweep))
        return self._ask(*command, mark=self.setting.mark(self.folder), check=False)

    def settle(self, victim: Victim | None, when: str = "") -> None:
        """Wait for the jobs, and for train.py if it follows them; then require an end of every run that had a job."""
        if not self._empties():
            self.fault("left", f"{when}after {_QUEUE:.0f} s there are jobs: {' '.join(sorted(self._jobs()))}")
        if victim is None:
            return
        if not victim.ends_within(self.reference.patience):
            self.fault("left", "train.py still follows, and no job is in the queue")
        for sweep in evidence.directories(self.folder):
            status = self._status(sweep)
            if status.returncode not in (0, 1) or "Traceback" in status.stderr:
                self.fault("open", f"status ends with {status.returncode}: {status.stderr.strip()[-300:]}")
            for run in evidence.run_directories(self.folder, is_sweep=True):
                error = evidence.record_of(run).get("error") or {}
                if error.get("type") == "Unfinished" and _had_job(sweep, run):
                    self.fault("open", f"{run}: its job has ended, and its record has not")


def _submits(process: Process) -> bool:
    return "sbatch" in process.command.split()[:1] and "--test-only" not in process.command


def in_jobs(mark: str) -> list[Process]:
    """Return a victim's processes in SLURM's jobs: ranks, batch scripts, the srun in them."""
    processes = []
    for process in victims.left(mark):
        path = Path("/proc", str(process.pid))
        with suppress(OSError, IndexError):
            name, parent = _name_and_parent(path)
            if b"SLURM_JOB_ID=" not in (path / "environ").read_bytes():
                continue
            of_slurm = _name_and_parent(Path("/proc", parent))[0].startswith("slurmstepd")
            role = "srun" if name == "srun" else "helper"
            if of_slurm:
                role = "rank" if name.startswith("python") else "batch step"
            processes.append(Process(process.pid, role, process.command))
    return processes


def _name_and_parent(path: Path) -> tuple[str, str]:
    name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
    return name, rest.split()[1]


def _had_job(sweep: Path, run: Path) -> bool:
    """Return whether SLURM accepted a job for the run: a job without an id was only planned."""
    with suppress(OSError, ValueError):
        jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
        return any(job["id"] and job["directory"] == run.name for job in jobs)
    return False
