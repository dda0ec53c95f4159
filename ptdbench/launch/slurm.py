"""SLURM's own commands: partitions, the state of jobs, and whether a job would be accepted.

Each function runs one command, without a shell. Whatever keeps a command from answering is a :class:`SlurmError`
in SLURM's own words.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ptdbench.launch import hostlist, lifetime
from ptdbench.launch.world import World

#: Seconds that a command may take. A busy controller answers late; one that is down makes some commands wait for ever.
PATIENCE = 30

#: States that a job does not leave by itself (a requeued one reads PENDING again); after squeue(1), "JOB STATE CODES".
OVER = frozenset([
    "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "CANCELLED", "PREEMPTED", "REVOKED", "NODE_FAIL",
    "BOOT_FAIL",
])  # fmt: skip

#: How variables begin that describe another job, or are a person's defaults, which could hide partitions and jobs or
#: take the place of what was asked for: sbatch heeds its variables before the lines of a script.
_FOREIGN = ("SLURM", "SRUN_", "SBATCH_", "SALLOC_", "SACCT_", "SINFO_", "SQUEUE_", "SCANCEL_", "SUBMITIT_")
#: What a rank is told, which a job is not.
_OF_RANKS = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})
#: Which cluster, who asks, and a label for accounting; none changes what a job is given.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SBATCH_WCKEY")


#: What is asked of jobs: that which :func:`_states` reads. A name, which may hold anything, comes last.
_SQUEUE = ("squeue", "--all", "--array", "--states=all", "--noheader", "--format=%i|%T|%M|%N|%r|%j")
_SACCT = (
    "sacct", "--allocations", "--noheader", "--parsable2",
    "--format=JobID,State,Elapsed,NodeList,Reason,JobName%200",
)  # fmt: skip


#: How the file is called, ahead of the job's id, by which ranks in a container have its script requeue the job: images
#: have no commands of SLURM.
REQUEUE = ".requeue-"


class SlurmError(RuntimeError):
    """SLURM could not be asked, or said no."""


@dataclass(frozen=True)
class Partition:
    """Nodes that jobs are submitted to."""

    name: str  #: As in ``cluster.partition``.
    is_default: bool  #: Whether it is taken where none is named.
    nodes: int  #: How many it has, in whatever state.
    minutes: int | None  #: Its time limit, or ``None`` where it has none.
    gpus: tuple[int, ...]  #: GPUs of a node: the distinct numbers over its nodes, ascending.
    cpus: int  #: CPUs of its largest node, as SLURM counts them.


@dataclass(frozen=True)
class JobState:
    """The state of a job."""

    id: str  #: ``123``, or ``123_0`` for an element of an array.
    state: str  #: SLURM's word, for example ``PENDING``.
    elapsed: int | None  #: Seconds that it has run, or ``None`` where SLURM does not say.
    nodes: str  #: Its host list as SLURM abbreviates it, ``gpu[01-03]``; empty before it has any.
    reason: str  #: Why it waits or why it failed, in SLURM's word; empty where there is none.

    @property
    def is_over(self) -> bool:
        """True if it has ended, well or not."""
        return self.state in OVER


def available() -> bool:
    """Return whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def partitions() -> list[Partition]:
    """Return all partitions, the hidden ones too: jobs may be submitted to them; raises SlurmError."""
    # --exact: one line for each kind of node, instead of one with "2+" CPUs.
    lines = _output("sinfo", "--all", "--exact", "--noconvert", "--noheader", "--format=%P|%l|%D|%c|%G").splitlines()
    found: dict[str, Partition] = {}
    for line in lines:
        name, limit, nodes, cpus, gres = line.split("|", 4)
        key = name.removesuffix("*")
        seconds = _seconds(limit)
        known = found.get(key) or Partition(
            key, name.endswith("*"), 0, None if seconds is None else seconds // 60, gpus=(), cpus=0
        )
        gpus = {*known.gpus, *([gpu_count(gres)] if int(nodes) else [])}
        found[key] = replace(
            known, nodes=known.nodes + int(nodes), gpus=tuple(sorted(gpus)), cpus=max(known.cpus, int(cpus))
        )
    return list(found.values())


def queue(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Return the states of jobs, by id; those that SLURM no longer knows are absent.

    ``123_0`` asks for an element of an array, ``123`` for a job or all elements of one.

    Raises:
        SlurmError: The queue cannot be read, or the accounts of jobs that have left it: nobody knows how they ended.
    """
    asked = set(job_ids)
    if not asked:
        return {}
    found: dict[str, JobState] = {}
    try:
        found = _by_id(_SQUEUE, asked)
    except SlurmError as error:
        if "Invalid job id specified" not in str(error):  # said only where no other job was asked for
            raise
    missing = asked - found.keys() - {_job(identity) for identity in found}
    return found | _by_id(_SACCT, missing) if missing and _keeps_accounts() else found


def named(names: Iterable[str], *, ended: bool = True) -> dict[str, dict[int | None, JobState]]:
    """Return the jobs that bear these names: name, then number in the array (``None`` for a job by itself), then state.

    A job that was submitted by a process that did not live to learn its id is found so; where ``ended`` is false, only
    if SLURM has not forgotten it. Raises SlurmError.
    """
    if not (asked := sorted(set(names))):
        return {}
    wanted = f"--name={','.join(asked)}"
    listed = [*_states(*_SQUEUE, wanted)]
    if ended and _keeps_accounts():
        listed = [*_states(*_SACCT, "--starttime=now-7days", wanted), *listed]
    found: dict[str, dict[int | None, JobState]] = {}
    for name, state in listed:
        element = state.id.partition("_")[2]
        if name in asked and "..." not in element:  # more elements than SLURM names
            found.setdefault(name, {})[int(element) if element else None] = state
    return found


def test(script: str) -> str:
    """Ask whether a job with this script would be accepted; nothing is submitted.

    Returns:
        SLURM's sentence: ``Job 5 to start at 2026-11-21T03:42:21 using 2 processors on nodes n[1-2] in partition gpu``.

    Raises:
        SlurmError: It would not.
    """
    return _words(_run("sbatch", "--test-only", stdin=script).stderr)


def submit(script: str) -> str:
    """Submit a job or an array of jobs; returns its id.

    Raises:
        SlurmError: SLURM does not take it, or does not answer: then it may have taken it (see :func:`named`).
    """
    answer = _run("sbatch", "--parsable", stdin=script).stdout
    # The cluster's name may follow, and plugins of a site may have said something before.
    ids = re.findall(r"^(\d+)(?:;.*)?$", answer.rstrip(), re.MULTILINE)
    if not ids:
        raise SlurmError(f"sbatch did not say the id of the job: {_words(answer)}")
    return str(ids[-1])


@cache
def clusters() -> list[str]:
    """Return the names of the clusters that commands here ask; raises SlurmError."""
    if chosen := os.environ.get("SLURM_CLUSTERS"):
        return chosen.split(",")
    return re.findall(r"^ClusterName\s*=\s*(\S+)", _output("scontrol", "show", "config"), re.MULTILINE)


@cache
def srun_says(flag: str) -> str:
    """Return what srun prints with ``--version`` or ``--help``: its flags and those of plugins; raises SlurmError."""
    return _output("srun", flag)


def cancel(job_ids: Iterable[str]) -> None:
    """End jobs, wherever they stand; those that have ended stay as they are. Raises SlurmError."""
    if ids := list(job_ids):
        _run("scancel", "--quiet", *ids)


def cancel_named(names: Iterable[str]) -> list[str]:
    """End the jobs that bear these names; returns the ids of those that had not ended. Raises SlurmError."""
    # Not by scancel's --name: it leaves an array that never began without elements (22.05).
    states = [
        state for elements in named(names, ended=False).values() for state in elements.values() if not state.is_over
    ]
    cancel(sorted({_job(state.id) for state in states}))
    return [state.id for state in states]


def ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a person's variables for sbatch that submissions ignore, as ``NAME=value``."""
    return [f"{name}={environ[name]}" for name in sorted(environ) if name.startswith("SBATCH_") and name not in _KEPT]


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often the job of this process was requeued."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def requeue(job: str) -> None:
    """Put a job, or an element of an array by the form of squeue, back into the queue, which ends it here.

    Raises:
        SlurmError: SLURM refuses, or does not answer.
    """
    _run("scontrol", "requeue", job)


def end_step(environ: Mapping[str, str], after: float) -> None:
    """End all tasks of the SLURM step that this process is one of, ``after`` some seconds; returns at once.

    srun by itself lets the others wait for a task that has failed. Where this process cannot tell SLURM, they will
    run into the limits of their collectives.
    """
    step = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    command = ["sh", "-c", f"sleep {after:g}; exec scancel --quiet {step}"]
    with suppress(OSError):
        quiet = subprocess.DEVNULL  # srun would wait for whoever holds its output
        subprocess.Popen(command, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)


def options(flags: Mapping[str, str | int | bool]) -> list[str]:
    """Return flags as sbatch reads them: ``{"ntasks_per_node": 2, "exclusive": True}`` is two words."""
    spelled = {name.replace("_", "-"): value for name, value in flags.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in spelled.items()]


def gpu_count(gres: str) -> int:
    """Count GPUs among generic resources: ``gpu:2``, ``gpu:a100:4(S:0-1)``, ``gpu:v100:2,gpu:k80:4``, ``(null)``."""
    entries = [re.split("[:=]", entry) for entry in re.sub(r"\(.*?\)", "", gres).split(",")]
    counts = [fields[-1] for fields in entries if fields[0].strip() in ("gpu", "gres/gpu")]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


@cache
def _keeps_accounts() -> bool:
    """Return whether sacct can be asked here: on a cluster without slurmdbd it would fail each time.

    Raises:
        SlurmError: It fails this time.
    """
    if shutil.which("sacct") is None:
        return False
    try:
        _output(*_SACCT, "--jobs=1")
    except SlurmError as error:
        if "accounting storage is disabled" not in str(error):
            raise
        return False
    return True


def _by_id(command: Sequence[str], asked: set[str]) -> dict[str, JobState]:
    """Return what a command says of jobs; it is asked of whole jobs, as a thousand elements of one array are one id."""
    jobs = f"--jobs={','.join(sorted({_job(identity) for identity in asked}))}"
    return {state.id: state for _, state in _states(*command, jobs) if {state.id, _job(state.id)} & asked}


def _states(*command: str) -> Iterator[tuple[str, JobState]]:
    """Yield the name and the state of each job, or element of an array, that a command lists."""
    for line in _output(*command).splitlines():
        listed, state, elapsed, nodes, reason, name = line.split("|", 5)
        # ``7_[0-2,5%4]``, elements of an array that never began, are ``7_0``, ``7_1``, ``7_2`` and ``7_5``.
        several = "[" in listed and "..." not in listed
        for identity in hostlist.expand(re.sub(r"%\d+", "", listed)) if several else [listed]:
            state = state.split()[0]  # sacct says "CANCELLED by 1000"
            nodes = "" if nodes in ("None assigned", "(null)") else nodes
            yield name, JobState(identity, state, _seconds(elapsed), nodes, "" if reason == "None" else reason)


def _job(identity: str) -> str:
    """Return the job of an array's element: ``123_0`` belongs to ``123``."""
    return identity.partition("_")[0]


def _seconds(text: str) -> int | None:
    """Parse a time of SLURM: ``5:00``, ``1:00:00`` or ``2-00:00:00``; ``None`` for ``infinite`` and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _output(*command: str) -> str:
    return _run(*command).stdout


def _run(*command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    foreign = {name for name in os.environ if name.startswith(_FOREIGN)} - set(_KEPT)
    # A job inherits the environment of the command.
    environ = {name: value for name, value in os.environ.items() if name not in foreign | _OF_RANKS}
    try:
        done = subprocess.run(
            command,
            check=False,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            env=environ,
            # Ctrl-C is for this process, which decides what becomes of a submission under way.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace")
        raise SlurmError(f"{command[0]} did not answer in {PATIENCE} s\n{_words(said)}".strip()) from None
    except OSError as error:
        reason = "is not on PATH" if isinstance(error, FileNotFoundError) else f"cannot be started: {error.strerror}"
        raise SlurmError(f"{command[0]} {reason}") from None
    if done.returncode:
        raise SlurmError(_words(done.stderr) or f"{command[0]} ended with exit status {done.returncode}")
    return done


def _words(said: str) -> str:
    """Return what a command said, without its own name and the rank of the message before every line."""
    lines = [re.sub(r"^(s\w+: )?((error|fatal): )?", "", line).strip() for line in said.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith('Try "'))


@dataclass(frozen=True)
class JobSteps:
    """How the script of a job starts its ranks."""

    world: World  #: The ranks, as the first of them will see them.
    gpus: int  #: GPUs of a node.
    command: Sequence[str]  #: What starts them all; the directory of their run is appended.

    def start(self, directory: Path) -> int:
        """Have the ranks carry out the run of a directory, and wait for them; the exit status of srun."""
        step = subprocess.Popen([*self.command, str(directory)])
        try:
            return lifetime.wait_for(step)
        except BaseException:
            step.terminate()  # srun ends its tasks
            step.wait()
            raise
