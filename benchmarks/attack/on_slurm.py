"""Rounds on a SLURM of two nodes: who submits is killed, or a rank, or a job's batch step."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

from . import evidence, rounds, victims
from .rounds import Round, Setting
from .scenarios import Reference, Scenario
from .victims import Process, Victim

_TOY = ("cluster=slurm", "model=toy", "device=cpu", "parallel=ddp", "train.global_batch=8", "checkpoint.every_steps=5")

#: Four shapes are four submissions, and time between them.
SUBMISSION = Scenario(
    "slurm, submission", (*_TOY, "train.steps=20", "cluster.ranks_per_node=1", "cluster.time_minutes=5,6,7,8"),
    ("submission",), runs=4, resumes=True,
)  # fmt: skip
JOBS = Scenario(
    "slurm, jobs", (*_TOY, "train.steps=60", "cluster.nodes=2", "cluster.ranks_per_node=1", "seed=0,1"),
    ("run",), runs=2, resumes=True,
)  # fmt: skip

#: Seconds that the queue may take to empty itself; the jobs of a round need a few.
_QUEUE = 180.0


@contextmanager
def cluster(root: Path) -> Iterator[Path]:
    """The slurm.conf of a cluster that lives as long as this is open."""
    folder = Path(mkdtemp(prefix="ptdbench-slurm-", dir="/tmp"))  # sockets in it need a short path
    command = [sys.executable, "-m", "tests.slurm_cluster"]
    try:
        subprocess.run([*command, "up", str(folder)], cwd=root, check=True, stdout=subprocess.DEVNULL)
        yield folder / "slurm.conf"
    finally:
        subprocess.run([*command, "down", str(folder)], cwd=root, check=False)


def all_rounds(
    setting: Setting, conf: Path, chosen: Sequence[int], until: float, told: Callable[[Round], Round]
) -> Iterator[Round]:
    """The chosen rounds, one after the other: each takes the whole queue for its own."""
    queue = Queue({**setting.environ, "SLURM_CONF": str(conf)})
    setting = replace(setting, environ=queue.environ)
    known: dict[str, Reference] = {}
    victims.hurry()  # not before: the daemons, and with them all jobs, would inherit it
    for number in chosen:
        scenario = (SUBMISSION, JOBS)[number % 2]
        if time.monotonic() > until:
            return
        if scenario.name not in known:
            known[scenario.name] = rounds.reference(setting, scenario)
        yield told(attack(setting, queue, number, scenario, known[scenario.name]))


@dataclass(frozen=True)
class Queue:
    """What SLURM's commands say."""

    environ: Mapping[str, str]  #: Variables for them.

    def ask(self, *command: str) -> str:
        """What a command prints."""
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()

    def jobs(self) -> set[str]:
        """The jobs that wait or run."""
        return set(self.ask("squeue", "--noheader", "--array", "--format=%i").split())

    def empties(self) -> bool:
        """Whether all jobs end in time."""
        end = time.monotonic() + _QUEUE
        while (there := self.jobs()) and time.monotonic() < end and not victims.STOPPED.is_set():
            time.sleep(0.5)
        return not there

    @contextmanager
    def busy(self, mark: str) -> Iterator[str]:
        """Somebody else's job holds both nodes, so that what is submitted waits; its id."""
        environ = {**self.environ, victims.MARK: mark}
        command = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000"]
        done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, check=True)
        job = done.stdout.strip()
        try:
            while self.ask("squeue", "--noheader", "--format=%T", f"--jobs={job}") != "RUNNING":
                time.sleep(0.1)
            yield job
        finally:
            with suppress(subprocess.CalledProcessError):
                self.ask("scancel", job)


def attack(setting: Setting, queue: Queue, number: int, scenario: Scenario, known: Reference) -> Round:
    """One round: a fresh sweep, a kill, all checks."""
    name = f"s{number}"
    rng = random.Random(f"{setting.seed}/{name}")
    began = time.monotonic()
    this_round = Round(name, scenario.name, setting.base / name)
    mark = setting.mark(this_round.folder)
    try:
        if scenario is SUBMISSION:
            with queue.busy(mark) as other:
                victim = setting.start(scenario.command(setting.tree), this_round.folder)
                before = _strike_submitter(this_round, victim, rng)
                _see_jobs_known(setting, queue, this_round, other)
        else:
            victim = setting.start(scenario.command(setting.tree), this_round.folder)
            before = _strike_job(this_round, victim, number, rng, known)
            _see_jobs_known(setting, queue, this_round)
        _judge(setting, queue, this_round, victim, scenario, known, before)
    finally:
        for job in queue.jobs():
            queue.ask("scancel", job)
        queue.empties()
        victims.sweep_away(mark)
    this_round.seconds = time.monotonic() - began
    return this_round


def _strike_submitter(this_round: Round, victim: Victim, rng: random.Random) -> dict[Path, bytes]:
    """Kill train.py, during its submissions or soon after."""
    during = rng.random() < 0.75
    this_round.moment = "submission" if during else "following"
    victim.awaits(lambda: any(_submits(process) for process in victim.family()))
    if not during:
        victim.awaits(lambda: "submitted " in victim.log.read_text())
    victim.ends_within(rng.random() * (0.5 if during else 3.0))
    if there := victim.family():
        this_round.family, this_round.killed = there, there[:1] if rng.random() < 0.75 else there
        victims.kill(this_round.killed)
    there = victims.survivors(victim.mark, victim.folder, time.monotonic() + rounds.LEFT, in_jobs=False)
    this_round.fault_left(there)
    return {}


def _submits(process: Process) -> bool:
    return "sbatch" in process.command.split()[:1] and "--test-only" not in process.command


def _strike_job(
    this_round: Round, victim: Victim, number: int, rng: random.Random, known: Reference
) -> dict[Path, bytes]:
    """Kill processes of one of the jobs; half of the time at the birth of the first rank."""
    at_birth = number // 2 % 2 == 0
    this_round.moment = "birth" if at_birth else "run"
    born = None
    while victim.is_awaited and not (born := victims.birth(in_jobs(victim.mark))):
        time.sleep(victims.IDLE)
    after = rng.random() * (0.5 * rounds.BIRTH if at_birth else known.seconds - known.birth)
    time.sleep(max(0.0, (born or 0) + after - victims.now()))
    before = evidence.finished(victim.folder, is_sweep=True)
    if there := in_jobs(victim.mark):
        this_round.family, this_round.killed = there, victims.choose(there, rng)
        victims.kill(this_round.killed)
        this_round.after_birth = born and victims.now() - born
    return before


def in_jobs(mark: str) -> list[Process]:
    """A victim's processes in SLURM's jobs: ranks, batch scripts, the srun in them."""
    found = []
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
            found.append(Process(process.pid, role, process.command))
    return found


def _name_and_parent(path: Path) -> tuple[str, str]:
    name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
    return name, rest.split()[1]


def _see_jobs_known(setting: Setting, queue: Queue, this_round: Round, other: str = "") -> None:
    """After 15 s at most ``status`` knows every job that is in the queue."""
    end = time.monotonic() + rounds.LEFT
    while (unknown := _unknown(setting, queue, this_round, other)) and time.monotonic() < end:
        time.sleep(2)
    this_round.fault("unknown", *(f"job {job} is in the queue, and status does not know it" for job in sorted(unknown)))


def _unknown(setting: Setting, queue: Queue, this_round: Round, other: str) -> set[str]:
    told = "".join(
        _status(setting, this_round, directory).stdout for directory in evidence.directories(this_round.folder)
    )
    return queue.jobs() - {other} - set(told.split())


def _status(setting: Setting, this_round: Round, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ptdbench", "status", str(directory.relative_to(this_round.folder))]
    environ = {**setting.environ, victims.MARK: setting.mark(this_round.folder)}
    return subprocess.run(
        command, cwd=this_round.folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def _judge(
    setting: Setting, queue: Queue, this_round: Round, victim: Victim, scenario: Scenario, known: Reference,
    before: Mapping[Path, bytes],
) -> None:  # fmt: skip
    """When the jobs have ended: states, records, then the resume."""

    def settle(when: str) -> None:
        if not queue.empties():
            this_round.fault("left", f"{when}after {_QUEUE:.0f} s there are jobs: {' '.join(sorted(queue.jobs()))}")
        if not when:
            if not victim.ends_within(known.patience):
                this_round.fault("left", "train.py still follows, and no job is in the queue")
            _see_ends(setting, this_round)

    rounds.judge(setting, this_round, victim, known, scenario, before, settle)
    there = victims.survivors(victim.mark, victim.folder, time.monotonic() + rounds.LEFT)
    this_round.fault_left(there)


def _see_ends(setting: Setting, this_round: Round) -> None:
    """``status`` works, and every run that had a job has an end; one that was never submitted cannot have one."""
    for directory in evidence.directories(this_round.folder):
        told = _status(setting, this_round, directory)
        if told.returncode not in (0, 1) or "Traceback" in told.stderr:
            this_round.fault("open", f"status ends with {told.returncode}: {told.stderr.strip()[-300:]}")
        for run in evidence.run_directories(this_round.folder, is_sweep=True):
            if evidence.is_open(evidence.record_of(run)):
                if _had_job(directory, run):
                    this_round.fault("open", f"{run}: its job has ended, and its record has not")
                else:
                    this_round.notes.append(f"{run.name} was not submitted")


def _had_job(sweep: Path, run: Path) -> bool:
    """Whether SLURM took a job for the run; without an id it was noted down, and never came to be one."""
    with suppress(OSError, ValueError):
        jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
        return any(job["id"] and job["directory"] == run.name for job in jobs)
    return False
