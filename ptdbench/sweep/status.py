"""Status of a sweep's runs, from its files and the queue alone: any shell can ask, at any time."""

from __future__ import annotations

import errno
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import convert

from ptdbench.launch import slurm
from ptdbench.launch.slurm import JobState, SlurmError
from ptdbench.records import ledger, schema, store
from ptdbench.records.failure import Failure, of_launcher, read_failures, root_cause, write_traceback
from ptdbench.records.ownership import Attempt, Progress, read_progress
from ptdbench.records.record import failed, is_open, option
from ptdbench.records.schema import Record, Written
from ptdbench.report.remarks import OUTPUT

#: A sweep of somebody else's, or on a file system that is mounted for reading.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

#: Bytes at the end of a file that are looked at.
_LOOKED_AT = 65536

#: How SLURM says that a job used too much memory. With OverMemoryKill (slurm.conf, JobAcctGatherParams) it says so here
#: only, and that the job has FAILED.
_OUT_OF_MEMORY = re.compile(
    r"(slurm\w+[\w.-]*|srun): error: .*(exceeded (job )?memory limit|oom[-_]kill|out of memory)", re.IGNORECASE
)

#: What a run's status is where SLURM ended its job; every other end is a failure.
STATUS_OF = {"TIMEOUT": "timeout", "DEADLINE": "timeout", "OUT_OF_MEMORY": "oom", "PREEMPTED": "preempted"}

#: The signal that SLURM sends to a job ahead of its time limit.
WARNING = "SIGUSR2"

#: The status of a run whose record cannot be read; no record says so of itself.
DAMAGED = "damaged"

#: How long what a job wrote last may take to be seen from here, in seconds: network file systems remember what was.
GRACE = 3.0


@dataclass(frozen=True)
class Run:
    """One run of a sweep, as far as it has come."""

    directory: str  #: The run's directory, as its record names it.
    job: ledger.Job | None  #: Its job, or ``None`` where it was not submitted.
    queue: JobState | None  #: What SLURM says of the job; ``None`` where it says nothing any more.
    record: Written  #: What the run has written so far.
    is_over: bool  #: Whether it has ended and its result is among the sweep's.
    progress: Progress | None = None  #: How far a run that is going on has come.
    sweep: str = ""  #: Its sweep, where those of several are looked at; empty for a single run.

    @cached_property
    def typed(self) -> Record:
        """The record, with an attribute for each field."""
        return convert(self.record, Record)


@dataclass(frozen=True)
class Sweep:
    """A sweep, run by run."""

    runs: Sequence[Run]  #: In the order of their numbers.
    silence: str = ""  #: Why SLURM could not be asked; empty where it could, or need not be.
    damage: Sequence[str] = ()  #: A sentence for each line of its results that is damaged, and for its list of jobs.
    goes_on: bool = False  #: Whether a process carries it out here: it may begin more runs.

    @property
    def is_over(self) -> bool:
        """Tell whether every run has ended."""
        return not self.goes_on and all(run.is_over for run in self.runs)


def look(directory: Path) -> Sweep:
    """Look where the runs of a sweep stand, a single run, or the runs of a folder of these.

    A run whose job has ended without a word gets its record here, with SLURM's state for a reason: whoever looks first
    writes it down. A run whose record is damaged or gone stands among the others, as :data:`DAMAGED`.

    Raises:
        FileNotFoundError: There is no run.
    """
    if store.is_sweep(directory) or not (sweeps := store.holding(directory, *store.OF_SWEEPS)):
        return _one(directory)
    return _together(directory, [directory, *sorted(sweeps, key=_in_turn)])


def _in_turn(sweep: Path) -> tuple[Path, int, bool]:
    """For the order: the blocks of a comparison whose sides took turns lie in a folder for each side."""
    if sweep.name.isdecimal():
        return sweep.parent.parent, int(sweep.name), sweep.parent.name == "after"
    return sweep, 0, False


def _one(directory: Path) -> Sweep:
    """A sweep, or the single runs of a folder."""
    damage: list[str] = []
    jobs = _jobs(directory, damage.append)
    results = _results(directory, damage.append)
    doubtful = [job for job in jobs if not _is_final(results.get(job.directory))]
    try:
        found, queue = _ask(doubtful)
        silence = ""
    except SlurmError as error:
        found, queue, silence = {}, {}, str(error)
    jobs = [found.get(job.directory, job) for job in jobs]
    gone = [job for job in found.values() if job.id and _is_gone(queue.get(job.id))]
    if gone:
        try:
            _settle(directory, gone, queue)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            damage.append(f"{error.filename or directory}: {error.strerror}; how jobs ended is not written down")
        results = _results(directory)
    ended = {job.directory for job in gone}
    runs = [
        _submitted(directory, job, queue.get(job.id or ""), results.pop(job.directory, None), job.directory in ended)
        for job in jobs
    ]
    runs += _of_this_machine(directory, results, {run.directory for run in runs})
    if not runs:
        raise FileNotFoundError(directory)
    return Sweep(sorted(runs, key=_number), silence, damage, store.is_locked(directory))


def _of_this_machine(directory: Path, results: Mapping[str, Written], submitted: Collection[str]) -> Iterator[Run]:
    """The runs that have no job; of one that is done once more its record knows more than its result, which is open."""
    paths = store.holding(directory, store.RECORD) if store.is_sweep(directory) else [directory, *directory.glob("*")]
    found, places = dict(results), {}
    for path in (one for one in paths if (one / store.RECORD).exists()):
        name = path.name if path == directory else str(path.relative_to(directory))
        if name not in submitted:
            places[name] = path
            if name not in found or is_open(found[name]):
                found[name] = written(path)
    for name, told in found.items():
        yield Run(name, None, None, told, not is_open(told), read_progress(places.get(name, directory / name)))


def _together(directory: Path, sweeps: Sequence[Path]) -> Sweep:
    """Several sweeps as one, whose runs have directories below its own; beside them may be single runs."""
    runs: list[Run] = []
    damage: list[str] = []
    silence = ""
    for path in sweeps:
        with suppress(FileNotFoundError):  # it has just begun
            sweep, name = _one(path), path.relative_to(directory)
            runs += [
                replace(run, directory=str(name / run.directory), sweep=name.name and str(name)) for run in sweep.runs
            ]
            damage += sweep.damage
            silence = silence or sweep.silence
    if not runs:
        raise FileNotFoundError(directory)
    return Sweep(runs, silence, damage, any(map(store.is_locked, sweeps)))


def _jobs(directory: Path, tell: Callable[[str], object]) -> list[ledger.Job]:
    """The jobs of a sweep, without those of runs elsewhere, which somebody else's list of jobs may not reach."""
    try:
        found = ledger.read(directory).jobs
    except store.Damaged as damaged:
        tell(f"{damaged}; what SLURM says of its jobs is not shown")
        return []
    if elsewhere := ", ".join(str(job.number) for job in found if not _is_below(job)):
        tell(f"{directory / ledger.LEDGER}: not below the sweep, and left out: the runs of jobs {elsewhere}")
    return [job for job in found if _is_below(job)]


def _is_below(job: ledger.Job) -> bool:
    """Tell whether a run's directory lies in its sweep's, where the end of its job will be written down."""
    path = Path(job.directory)
    return all(map(schema.is_path, (job.directory, job.log))) and not (path.is_absolute() or ".." in path.parts)


def written(directory: Path) -> Written:
    """The record of a run; where there is none that can be read, one of status :data:`DAMAGED` that says so."""
    try:
        return store.load_record(directory)
    except store.Damaged as damage:
        why = str(damage)
    except FileNotFoundError:
        why = f"{directory / store.RECORD} is gone"
    error = {"rank": -1, "type": "Damaged", "message": why, "traceback": ""}
    return {"status": DAMAGED, "workload": "-", "fingerprint": "", "directory": str(directory), "error": error}


def _ask(jobs: Sequence[ledger.Job]) -> tuple[dict[str, ledger.Job], dict[str, JobState]]:
    """The jobs by their runs' directories, and what SLURM says of them by their ids; raises SlurmError.

    A job whose id nobody wrote down, because the process that submitted it was killed, is found by its array's name.
    """
    named = {job.cluster for job in jobs if job.cluster}
    if named and (others := named - {*slurm.clusters()}):  # there the same ids are other jobs, or none
        raise SlurmError(f"its jobs are on cluster {', '.join(others)}, and this is {', '.join(slurm.clusters())}")
    known = [job for job in jobs if job.id]
    queue = slurm.queue(job.id for job in known if job.id)
    by_name = slurm.named(job.name for job in jobs if not job.id)
    for job in jobs:
        state = None if job.id else by_name.get(job.name, {}).get(job.element)
        if state:
            known.append(ledger.with_id(job, state.id))
            queue[state.id] = state
    found = {job.directory: job for job in jobs}
    return found | {job.directory: job for job in known}, queue


def conclude(sweep: Path, subdirectory: str, cause: Failure, status: str | None = None) -> dict[str, Any]:
    """Write down the end of a run that could not do so itself, and return its record; ``None``: status by the cause."""
    written = failed(store.load_record(sweep / subdirectory), cause)
    done = {**written, "status": status or written["status"]}
    store.write_record(sweep / subdirectory, done)
    store.append_result(sweep, done)
    return done


def _results(directory: Path, tell: Callable[[str], object] = lambda _: None) -> dict[str, Written]:
    """The results of a sweep, by the runs' directories as they are below it; it may have been moved since."""
    return {store.below(directory, record["directory"]): record for record in store.read_results(directory, tell)}


def _submitted(
    directory: Path, job: ledger.Job, state: JobState | None, result: Written | None, has_ended: bool
) -> Run:
    """A run that was submitted; one that is in the queue goes on, whatever it has said before.

    Unless its job has others, for which it is in the queue: such a job is not requeued.
    """
    is_done = job.step is not None and _is_final(result)
    if result and (_is_gone(state) or is_done):
        return Run(job.directory, job, None, result, is_over=True)
    path = directory / job.directory
    return Run(job.directory, job, state, written(path), has_ended, read_progress(path))


def _settle(directory: Path, gone: Sequence[ledger.Job], queue: Mapping[str, JobState]) -> None:
    """Write down how jobs ended that could not do so themselves, or only noted a signal."""
    if any(is_open(written(directory / job.directory)) for job in gone):
        time.sleep(GRACE)
    results = _results(directory)
    for job in gone:
        state, result = queue.get(job.id or ""), results.get(job.directory)
        if result is not None and is_open(result):  # begun once more, and not ended by itself
            result = None
        known = result or written(directory / job.directory)
        owner = known["owner"]["job"] if known.get("owner") else None
        if known["status"] == DAMAGED or (is_open(known) and owner not in (None, job.id)):
            continue  # nobody can say more; or another job has the run, and this one was refused it
        crash = _crash(directory / job.directory, known) if is_open(known) and not _says_more(state) else None
        if crash:
            write_traceback(directory / job.directory, crash)
            conclude(directory, job.directory, crash)
        elif is_open(known) or (_was_signaled(known) and _says_more(state)):
            kind, message = _end(job, state, begun=owner is not None)
            cause = of_launcher(kind, message + _saved(known))
            conclude(directory, job.directory, cause, STATUS_OF.get(kind, "failed"))
        elif _was_signaled(known) and _reached_its_limit(known, state):
            limit = f"job {job.id} was about to reach its limit, cluster.time_minutes={_time_minutes(known)}"
            cause = of_launcher("TIMEOUT", f"{limit}{OUTPUT}{job.log}{_saved(known)}")
            conclude(directory, job.directory, cause, "timeout")
        elif result is None:
            store.append_result(directory, known)  # the job was killed between its record and the sweep's results


def _crash(directory: Path, known: Written) -> Failure | None:
    """Conclude from what ranks left that native code ended all at once, so that none could do so itself."""
    owner = known.get("owner")
    reports = read_failures(Attempt(directory, owner["launch"]).failures) if owner else []
    return root_cause(reports, known.get("world_size") or 1) if reports else None


def _is_gone(state: JobState | None) -> bool:
    """Tell whether a job has ended: SLURM says so, or knows it no more."""
    return state is None or state.is_over


def _is_final(result: Written | None) -> bool:
    """Tell whether there is nothing that SLURM could add to a result."""
    return result is not None and not is_open(result) and not _was_signaled(result)


def _was_signaled(written: Written) -> bool:
    """Tell whether a signal ended a run, which cannot know why: ``scancel`` sends what preemption sends."""
    return written["status"] == "preempted" and schema.error(written).type not in slurm.OVER


def _end(job: ledger.Job, state: JobState | None, *, begun: bool) -> tuple[str, str]:
    """State and message for a job that SLURM ended, or has forgotten, and whether the run had begun in it."""
    where = f"{OUTPUT}{job.log}"
    if state is None:
        kind, message = "Gone", f"job {job.id} is not in the queue any more and left no result"
    else:
        reason = f" ({state.reason})" if state.reason not in ("", "None") else ""
        nodes = f" on {state.nodes}" if state.nodes else ""
        kind, message = state.state, f"SLURM ended job {job.id}{nodes}: {state.state}{reason}"
    if job.step is not None and not begun:  # what the job's script says is of other runs
        return kind, f"{message}, before this run had begun{where}"
    if kind in ("Gone", "FAILED") and (words := log_out_of_memory(job)):
        return "OUT_OF_MEMORY", f"{message}; SLURM said: {words}{where}"
    if kind == "FAILED" and not begun and (words := log_reason(job)):
        return kind, f"{message}: {words}{where}"
    return kind, message + where


def _says_more(state: JobState | None) -> bool:
    """Tell whether SLURM knows more of a job's end than that it was well or not."""
    return state is not None and state.state not in ("COMPLETED", "FAILED")


def _reached_its_limit(written: Written, state: JobState | None) -> bool:
    """Tell whether the warning ahead of its time limit ended a run, of which SLURM only says FAILED.

    The warning is asked for at most a tenth of the limit ahead (:meth:`ptdbench.sweep.submission.Array.script`), and
    comes up to a minute earlier than that (sbatch(1), ``--signal``).
    """
    minutes = _time_minutes(written)
    seconds = math.inf if minutes is None else 60 * minutes
    was_warned = WARNING in schema.error(written).message
    return was_warned and state is not None and (state.elapsed or 0) >= 0.9 * seconds - 60


def _saved(written: Written) -> str:
    """Return what a run that has saved says of how to go on."""
    message = schema.error(written).message
    return f"; {message}" if "it has saved" in message else ""


def _time_minutes(written: Written) -> float | None:
    return option(written, "cluster.time_minutes", float)  # type: ignore[no-any-return]


def _number(run: Run) -> tuple[int, str]:
    """For the order: the number in the sweep, which stands at the head of a directory's name."""
    if run.job:
        return run.job.number, ""
    head = re.match(r"\d{1,9}(?=_)", Path(run.directory).name)
    return (int(head[0]), "") if head else (0, run.directory)


def log_tail(job: ledger.Job, lines: int = 15) -> str:
    """The last lines of the rank that wrote last."""
    return "\n".join(next((said[-lines:] for said in _ends(job) if said), []))


def log_out_of_memory(job: ledger.Job) -> str | None:
    """The line with which SLURM says that the job used too much memory, if it does."""
    return next((line.strip() for said in _ends(job) for line in said if _OUT_OF_MEMORY.search(line)), None)


def log_reason(job: ledger.Job) -> str | None:
    """Return what kept a step from starting: SLURM's first error, or its plugins', else the last line of the rank.

    srun's own lines only say that there was one.
    """
    for said in _ends(job):
        errors = [match[1] for line in said if (match := re.match(r"slurmstepd\S*: error: (.*)", line))]
        others = [line.strip() for line in said if line.strip() and not line.startswith(("srun: ", "slurmstepd"))]
        if errors or others:
            return errors[0] if errors else others[-1]
    return None


def _ends(job: ledger.Job) -> Iterator[list[str]]:
    """The last lines of each rank, of the one that wrote last first; those of the script of several runs; SLURM's."""
    log = Path(job.log)
    logs = [
        path
        for folder in (log, *([log.parent] if job.step is not None else []))
        for path in sorted(folder.glob(f"{job.id}_*_log.err"), key=lambda path: -path.stat().st_mtime)
    ]
    logs += [folder / ledger.LOG_OF_SLURM.replace("%j", str(job.id)) for folder in (log, *log.parents)]
    for path in filter(Path.is_file, logs):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOOKED_AT))
            yield file.read().decode(errors="replace").splitlines()
