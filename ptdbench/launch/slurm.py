"""SLURM's own commands, and its lists of hosts: partitions, the state of jobs, and whether a job would be accepted.

A function of a command runs it without a shell. If the command fails, it raises :class:`SlurmError` with SLURM's own
message.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

#: Timeout of a command in seconds. A busy controller answers late; one that is down makes some commands wait forever.
PATIENCE = 30

#: Final states of a job (a requeued job is PENDING again); from squeue(1), "JOB STATE CODES".
OVER = frozenset([
    "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "CANCELLED", "PREEMPTED", "REVOKED", "NODE_FAIL",
    "BOOT_FAIL",
])  # fmt: skip

#: Prefixes of variables that describe another job or a user's defaults. The defaults could hide partitions and jobs, or
#: override the requested options: sbatch prefers its variables to the lines of a script.
_FOREIGN = ("SLURM", "SRUN_", "SBATCH_", "SALLOC_", "SACCT_", "SINFO_", "SQUEUE_", "SCANCEL_", "SUBMITIT_")
#: Variables of a rank, which a job must not inherit.
_OF_RANKS = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})
#: The cluster, the credentials, and a label for accounting; none affects a job's resources.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SBATCH_WCKEY")

#: Queries of jobs, in the format that :func:`_states` parses. A job's name, which may contain anything, comes last.
_SQUEUE = ("squeue", "--all", "--array", "--states=all", "--noheader", "--format=%i|%T|%N|%r|%j")
_SACCT = ("sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID,State,NodeList,Reason,JobName%200")

#: Prefix, ahead of the job's id, of the file by which ranks in a container ask the job's script to requeue it: images
#: lack SLURM's commands.
REQUEUE = ".requeue-"


class SlurmError(RuntimeError):
    """SLURM could not be reached, or refused."""


@dataclass(frozen=True)
class Partition:
    """Nodes that jobs are submitted to."""

    name: str  #: As in ``cluster.partition``.
    is_default: bool  #: Whether it is used if none is named.
    gpus: tuple[int, ...]  #: The distinct numbers of GPUs per node, ascending.


@dataclass(frozen=True)
class JobState:
    """The state of a job."""

    id: str  #: ``123``, or ``123_0`` for an element of an array.
    state: str  #: SLURM's name of the state, for example ``PENDING``.
    nodes: str  #: Its host list as SLURM abbreviates it, ``gpu[01-03]``; empty before it has nodes.
    reason: str  #: SLURM's reason why it waits or failed; empty if there is none.

    @property
    def is_over(self) -> bool:
        """True if it has ended, successfully or not."""
        return self.state in OVER


def available() -> bool:
    """Return whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def partitions() -> list[Partition]:
    """Return all partitions, including hidden ones, to which jobs may be submitted too; raises SlurmError."""
    lines = _output("sinfo", "--all", "--noheader", "--format=%P|%D|%G").splitlines()  # one for each kind of node
    counts: dict[str, set[int]] = {}
    for marked, nodes, gres in (line.split("|", 2) for line in lines):
        counts.setdefault(marked, set()).update([gpu_count(gres)] if nodes != "0" else [])
    return [Partition(name.removesuffix("*"), name.endswith("*"), (*sorted(gpus),)) for name, gpus in counts.items()]


def queue(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Return the states of jobs, by id; those that SLURM no longer knows are absent.

    ``123_0`` is an element of an array, ``123`` a job or all elements of an array.

    Raises:
        SlurmError: The queue cannot be read, or the accounting of jobs that have left it, so their end is unknown.
    """
    ids = set(job_ids)
    if not ids:
        return {}
    states: dict[str, JobState] = {}
    try:
        states = _by_id(_SQUEUE, ids)
    except SlurmError as error:
        if "Invalid job id specified" not in str(error):  # raised only if no other job was asked for
            raise
    missing = ids - states.keys() - {_job(identity) for identity in states}
    return states | _by_id(_SACCT, missing) if missing and _keeps_accounts() else states


def named(names: Iterable[str], *, ended: bool = True) -> dict[str, dict[int | None, JobState]]:
    """Return the jobs with these names: by name, then by index in the array (``None`` for a single job), their states.

    This finds a job whose submitter died before it learned the job's id. If ``ended`` is false, jobs that have left the
    queue are not looked up. Raises SlurmError.
    """
    if not (wanted := sorted(set(names))):
        return {}
    flag = f"--name={','.join(wanted)}"
    listed = [*_states(*_SQUEUE, flag)]
    if ended and _keeps_accounts():
        listed = [*_states(*_SACCT, "--starttime=now-7days", flag), *listed]
    jobs: dict[str, dict[int | None, JobState]] = {}
    for name, state in listed:
        element = state.id.partition("_")[2]
        if name in wanted and "..." not in element:  # "...": more elements than SLURM lists
            jobs.setdefault(name, {})[int(element) if element else None] = state
    return jobs


def test(script: str) -> str:
    """Ask SLURM whether it would accept a job with this script; nothing is submitted. Raises SlurmError if not.

    Returns:
        SLURM's answer: ``Job 5 to start at 2026-11-21T03:42:21 using 2 processors on nodes n[1-2] in partition gpu``.
    """
    return _words(_run("sbatch", "--test-only", stdin=script).stderr)


def submit(script: str) -> str:
    """Submit a job or an array of jobs; return its id.

    Raises:
        SlurmError: SLURM refuses it, or does not answer, in which case the job may exist (see :func:`named`).
    """
    answer = _run("sbatch", "--parsable", stdin=script).stdout
    # The cluster's name may follow, and a site's plugins may have printed something before.
    if not (ids := re.findall(r"^(\d+)(?:;.*)?$", answer.rstrip(), re.MULTILINE)):
        raise SlurmError(f"sbatch did not say the id of the job: {_words(answer)}")
    return str(ids[-1])


@cache
def clusters() -> list[str]:
    """Return the names of the clusters that SLURM's commands address; raises SlurmError."""
    if chosen := os.environ.get("SLURM_CLUSTERS"):
        return chosen.split(",")
    return re.findall(r"^ClusterName\s*=\s*(\S+)", _output("scontrol", "show", "config"), re.MULTILINE)


@cache
def srun_help() -> str:
    """Return what ``srun --help`` prints, which includes plugins' flags; raises SlurmError."""
    return _output("srun", "--help")


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs in any state; those that have ended are unaffected. Raises SlurmError."""
    if ids := list(job_ids):
        _run("scancel", "--quiet", *ids)


def cancel_named(names: Iterable[str]) -> list[str]:
    """Cancel the jobs with these names; return the ids of those that had not ended. Raises SlurmError."""
    # Not by scancel --name, which leaves an array that never began without elements (22.05).
    arrays = named(names, ended=False).values()
    states = [state for elements in arrays for state in elements.values() if not state.is_over]
    cancel(sorted({_job(state.id) for state in states}))
    return [state.id for state in states]


def ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the user's sbatch variables that submissions ignore, as ``NAME=value``."""
    return [f"{name}={environ[name]}" for name in sorted(environ) if name.startswith("SBATCH_") and name not in _KEPT]


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often the job of this process was requeued."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def requeue(job: str) -> None:
    """Requeue a job, or an array element as squeue prints it, which ends it here; raises SlurmError."""
    _run("scontrol", "requeue", job)


def end_step(environ: Mapping[str, str], after: float) -> None:
    """Cancel the SLURM step of this process ``after`` some seconds, with all its tasks; returns at once.

    srun itself lets the other tasks wait for one that has failed. If SLURM cannot be reached, they will run into the
    timeouts of their collectives.
    """
    step = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    command = ["sh", "-c", f"sleep {after:g}; exec scancel --quiet {step}"]
    with suppress(OSError):
        quiet = subprocess.DEVNULL  # srun would wait for every process that holds its output open
        subprocess.Popen(command, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)


def options(flags: Mapping[str, str | int | bool]) -> list[str]:
    """Return flags as command-line words of sbatch: ``{"ntasks_per_node": 2, "exclusive": True}`` becomes two."""
    spelled = {name.replace("_", "-"): value for name, value in flags.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in spelled.items()]


def gpu_count(gres: str) -> int:
    """Count GPUs among generic resources: ``gpu:2``, ``gpu:a100:4(S:0-1)``, ``gpu:v100:2,gpu:k80:4``, ``(null)``."""
    entries = [re.split("[:=]", entry) for entry in re.sub(r"\(.*?\)", "", gres).split(",")]
    counts = [fields[-1] for fields in entries if fields[0].strip() in ("gpu", "gres/gpu")]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


def expand_hosts(text: str) -> list[str]:
    """Return the names that ``gpu[01-03,7]-ib,login`` stands for, in order; of several brackets the last is fastest.

    By submitit, as ``scontrol show hostnames`` is one more process for every rank, and often missing in a job's
    container. Raises ValueError if it is malformed.
    """
    from submitit.slurm.slurm import SlurmParseException, _parse_node_list  # only some ranks need it

    try:
        return [host for host in _parse_node_list(text) if host]
    except SlurmParseException:
        raise ValueError(f"{text!r} is not a list of hosts such as gpu[01-03,7],login") from None


@cache
def _keeps_accounts() -> bool:
    """Return whether sacct works here, as it does not without slurmdbd; raises SlurmError if it fails otherwise."""
    if shutil.which("sacct") is None:
        return False
    try:
        _output(*_SACCT, "--jobs=1")
    except SlurmError as error:
        if "accounting storage is disabled" not in str(error):
            raise
        return False
    return True


def _by_id(command: Sequence[str], ids: set[str]) -> dict[str, JobState]:
    """Return the states that a command lists, by id; queries whole jobs, as an array may have many elements."""
    jobs = f"--jobs={','.join(sorted({*map(_job, ids)}))}"
    return {state.id: state for _, state in _states(*command, jobs) if {state.id, _job(state.id)} & ids}


def _states(*command: str) -> Iterator[tuple[str, JobState]]:
    """Yield the name and the state of each job, or element of an array, that a command lists."""
    for line in _output(*command).splitlines():
        listed, state, nodes, reason, name = line.split("|", 4)
        # ``7_[0-2,5%4]``, elements of an array that never began, stands for ``7_0``, ``7_1``, ``7_2`` and ``7_5``.
        several = "[" in listed and "..." not in listed
        for identity in expand_hosts(re.sub(r"%\d+", "", listed)) if several else [listed]:
            state = state.split()[0]  # sacct prints "CANCELLED by 1000"
            nodes = "" if nodes in ("None assigned", "(null)") else nodes
            yield name, JobState(identity, state, nodes, "" if reason == "None" else reason)


def _job(identity: str) -> str:
    """Return the job id of an array element: ``123_0`` belongs to ``123``."""
    return identity.partition("_")[0]


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
            # Ctrl-C is for this process only, which decides what to do with a submission in flight.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as late:
        output = _words((late.stderr or b"").decode(errors="replace"))
        raise SlurmError(f"{command[0]} did not answer in {PATIENCE} s\n{output}".strip()) from None
    except OSError as error:
        reason = "is not on PATH" if isinstance(error, FileNotFoundError) else f"cannot be started: {error.strerror}"
        raise SlurmError(f"{command[0]} {reason}") from None
    if done.returncode:
        raise SlurmError(_words(done.stderr) or f"{command[0]} ended with exit status {done.returncode}")
    return done


def _words(output: str) -> str:
    """Return a command's messages, without its name and the severity at the start of each line."""
    lines = [re.sub(r"^(s\w+: )?((error|fatal): )?", "", line).strip() for line in output.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith('Try "'))
