"""Status of a sweep's runs, from its files and the queue alone, so that any shell can ask at any time."""

import errno
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ptdbench.launch import slurm
from ptdbench.launch.slurm import JobState, SlurmError
from ptdbench.records import ledger, ownership, schema, store
from ptdbench.records.failure import Failure
from ptdbench.records.ownership import Progress, read_progress
from ptdbench.records.record import failed
from ptdbench.records.run_record import RunRecord, typed
from ptdbench.report.remarks import OUTPUT

#: Errors of another user's sweep, or of a read-only file system.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

#: Number of bytes to read at the end of a log.
_LOOKED_AT = 65536

#: SLURM's messages in a log when a job used too much memory. With OverMemoryKill (slurm.conf, JobAcctGatherParams) this
#: is the only sign, as the job's state is FAILED.
_OUT_OF_MEMORY = re.compile(
    r"(slurm\w+[\w.-]*|srun): error: .*(exceeded (job )?memory limit|oom[-_]kill|out of memory)", re.IGNORECASE
)

#: Status of a run by the state in which SLURM ended its job; ``failed`` for all other states.
STATUS_OF = {"TIMEOUT": "timeout", "DEADLINE": "timeout", "OUT_OF_MEMORY": "oom", "PREEMPTED": "preempted"}

#: The status of a run whose record cannot be read; no record itself has this status.
DAMAGED = "damaged"

#: Seconds until a job's last output is visible here: network file systems cache directories and files.
GRACE = 3.0


@dataclass(frozen=True)
class Run:
    """The current state of one run of a sweep."""

    directory: str  #: The run's directory, as its record names it.
    job: ledger.Job | None  #: Its job, or ``None`` if it was not submitted.
    queue: JobState | None  #: SLURM's state of the job; ``None`` if SLURM no longer knows it.
    record: RunRecord  #: Its current record.
    is_over: bool  #: Whether it has ended.
    progress: Progress | None = None  #: The progress of a run that has not ended.


@dataclass(frozen=True)
class Sweep:
    """A sweep, run by run."""

    runs: Sequence[Run]  #: The runs, in the order of their numbers.
    silence: str = ""  #: Why SLURM could not be queried; empty if it could, or did not have to be.
    damage: Sequence[str] = ()  #: A message for a damaged ledger, and for what could not be written.
    goes_on: bool = False  #: Whether a process here is executing it, and may start more runs.
    #: The sweep or single runs whose process was killed, to be resumed with these options, such as ``--config-dir``.
    killed: Mapping[Path, Sequence[str]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether every run has ended."""
        return not self.goes_on and all(run.is_over for run in self.runs)


def settle(directory: Path) -> Sweep:
    """Record how jobs ended that could not do so; return the status of a sweep, a run, or the single runs in a folder.

    A job's end is recorded by the first process that comes here, with SLURM's state as the reason. A run whose record
    is damaged or gone is listed as :data:`DAMAGED`.

    Raises:
        FileNotFoundError: There is no run.
    """
    damage: list[str] = []
    jobs = _jobs(directory, damage.append)
    records = _records(directory, jobs)
    doubtful = [job for job in jobs if not _is_final(records[job.directory])]
    try:
        by_directory, queue = _ask(doubtful)
        silence = ""
    except SlurmError as error:
        by_directory, queue, silence = {}, {}, str(error)
    jobs = [by_directory.get(job.directory, job) for job in jobs]
    gone = [job for job in by_directory.values() if job.id and _is_gone(queue.get(job.id))]
    if gone:
        try:
            _record_ends(directory, gone, queue)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            damage.append(f"{error.filename or directory}: {error.strerror}; how jobs ended is not written down")
        records |= {job.directory: record_of(directory / job.directory) for job in gone}
    ended = {job.directory for job in gone}
    runs = [
        _submitted(directory, job, queue.get(job.id or ""), records[job.directory], job.directory in ended)
        for job in jobs
    ]
    submitted = {job.directory for job in jobs}
    for name, record in records.items():
        if name not in submitted:
            shown = directory.resolve().name if name == "." else name
            runs.append(Run(shown, None, None, record, not record.is_open, read_progress(directory / name)))
    if not runs:
        raise FileNotFoundError(directory)
    goes_on = store.is_locked(directory)
    is_one = store.is_sweep(directory) or (directory / store.RECORD).exists()
    killed = {
        directory if is_one else directory / run.directory: run.record.sources or []
        for run in runs
        if not goes_on and _was_killed(run)
    }
    return Sweep(sorted(runs, key=_number), silence, damage, goes_on, killed)


def _was_killed(run: Run) -> bool:
    """Return whether the process of a local run was killed; runs of ``compare`` do not count, as they cannot resume."""
    is_here = run.record.launcher in (None, "local")  # others resume under their launcher
    is_open = not (run.job or run.is_over or run.record.option("repeat.series", str))
    return is_here and is_open and run.record.owner is not None and ownership.is_alive(run.record.owner) is False


def _records(directory: Path, jobs: Sequence[ledger.Job]) -> dict[str, RunRecord]:
    """Return the records of a sweep's runs, of a run, or of the runs in a folder, by their directories below it."""
    paths = store.run_directories(directory) if store.is_sweep(directory) else [directory, *directory.glob("*")]
    names = [str(path.relative_to(directory)) for path in paths if (path / store.RECORD).exists()]
    return {name: record_of(directory / name) for name in [*names, *(job.directory for job in jobs)]}


def _jobs(directory: Path, tell: Callable[[str], object]) -> list[ledger.Job]:
    """Return the jobs of a sweep, without runs outside its directory, which a foreign ledger must not reach."""
    try:
        jobs = ledger.read(directory).jobs
    except (PermissionError, store.Damaged) as damaged:
        tell(f"{damaged}; what SLURM says of its jobs is not shown")
        return []
    if elsewhere := ", ".join(str(job.number) for job in jobs if not _is_below(job)):
        tell(f"{directory / ledger.LEDGER}: not below the sweep, and left out: the runs of jobs {elsewhere}")
    return [job for job in jobs if _is_below(job)]


def _is_below(job: ledger.Job) -> bool:
    """Return whether a run's directory, where the end of its job will be recorded, is inside its sweep's."""
    path = Path(job.directory)
    return not (path.is_absolute() or ".." in path.parts)


def record_of(directory: Path) -> RunRecord:
    """Return the record of a run; if it cannot be read, a stand-in with status :data:`DAMAGED` and the reason."""
    try:
        return store.read_record(directory)
    except store.Damaged as damage:
        why = str(damage)
    except FileNotFoundError:
        why = f"{directory / store.RECORD} is gone"
    error = schema.NO_ERROR | {"type": "Damaged", "message": why}
    unknown = {"status": DAMAGED, "workload": "-", "fingerprint": "", "directory": str(directory)}
    return typed({**unknown, "error": error})


def _ask(jobs: Sequence[ledger.Job]) -> tuple[dict[str, ledger.Job], dict[str, JobState]]:
    """Return the jobs by their runs' directories, and SLURM's states by their ids; raises SlurmError."""
    named = {job.cluster for job in jobs if job.cluster}
    if named and (others := named - {*slurm.clusters()}):  # on another cluster, the same ids are other jobs
        raise SlurmError(f"its jobs are on cluster {', '.join(others)}, and this is {', '.join(slurm.clusters())}")
    queue = slurm.queue(job.id for job in jobs if job.id)
    by_name = slurm.named(job.name for job in jobs if not job.id)  # the process that submitted them was killed
    by_directory = {job.directory: job for job in jobs}
    for job in jobs:
        if not job.id and (state := by_name.get(job.name, {}).get(job.element)):
            by_directory[job.directory] = ledger.with_id(job, state.id)
            queue[state.id] = state
    return by_directory, queue


def conclude(sweep: Path, subdirectory: str, cause: Failure, status: str | None = None) -> None:
    """Record the end of a run that could not do so itself; ``status`` defaults to the cause's."""
    written = failed(store.load_record(sweep / subdirectory), cause)
    store.write_record(sweep / subdirectory, {**written, "status": status or written["status"]})


def _submitted(directory: Path, job: ledger.Job, state: JobState | None, record: RunRecord, has_ended: bool) -> Run:
    """Return the status of a submitted run; while its job is in the queue the run is not over, whatever its record."""
    # Except in a job with several runs: it stays in the queue for the others, and is never requeued.
    is_recorded = not record.is_open and record.status != DAMAGED
    if is_recorded and (_is_gone(state) or (job.step is not None and _is_final(record))):
        return Run(job.directory, job, None, record, is_over=True)
    return Run(job.directory, job, state, record, has_ended, read_progress(directory / job.directory))


def _record_ends(directory: Path, gone: Sequence[ledger.Job], queue: Mapping[str, JobState]) -> None:
    """Record the end of jobs that could not do so themselves, or only noted a signal."""
    if any(record_of(directory / job.directory).is_open for job in gone):
        time.sleep(GRACE)
    for job in gone:
        record, state = record_of(directory / job.directory), queue.get(job.id or "")
        owner = record.owner and record.owner.job
        if record.status == DAMAGED or (record.is_open and owner not in (None, job.id)):
            continue  # nothing more can be known; or another job owns the run, and refused this one
        if record.is_open or (_was_signaled(record) and state and state.state not in ("COMPLETED", "FAILED")):
            kind, message = _end(job, state, begun=owner is not None)
            if "it has saved" in record.error.message:  # and how to resume it
                message += f"; {record.error.message}"
            cause = Failure(-1, kind, message)
            conclude(directory, job.directory, cause, STATUS_OF.get(kind, "failed"))


def _is_gone(state: JobState | None) -> bool:
    return state is None or state.is_over


def _is_final(record: RunRecord) -> bool:
    """Return whether a record is final, so that SLURM cannot add to it."""
    return not record.is_open and record.status != DAMAGED and not _was_signaled(record)


def _was_signaled(record: RunRecord) -> bool:
    """Return whether a signal ended a run, which cannot know why: ``scancel`` and preemption send the same one."""
    return record.status == "preempted" and record.error.type not in slurm.OVER


def _end(job: ledger.Job, state: JobState | None, *, begun: bool) -> tuple[str, str]:
    """Return state and message for a job that SLURM ended or forgot; ``begun`` says whether the run had started."""
    if state and state.state == "CANCELLED" and not (state.nodes or begun):  # its reason is why it was pending
        return state.state, f"SLURM ended job {job.id} before it began: CANCELLED"
    where = f"{OUTPUT}{job.log}"
    if state is None:
        kind, message = "Gone", f"job {job.id} is not in the queue any more and left no result"
    else:
        reason = f" ({state.reason})" if state.reason else ""
        nodes = f" on {state.nodes}" if state.nodes else ""
        kind, message = state.state, f"SLURM ended job {job.id}{nodes}: {state.state}{reason}"
    if job.step is not None and not begun:  # the script's output is about other runs
        return kind, f"{message}, before this run had begun{where}"
    messages = (line.strip() for lines in _ends(job) for line in lines if _OUT_OF_MEMORY.search(line))
    if kind in ("Gone", "FAILED") and (words := next(messages, None)):
        return "OUT_OF_MEMORY", f"{message}; SLURM said: {words}{where}"
    if kind == "FAILED" and not begun and (words := log_reason(job)):
        return kind, f"{message}: {words}{where}"
    return kind, message + where


def _number(run: Run) -> tuple[int, str]:
    """Return a sort key: the number in the sweep, with which the directory's name begins."""
    if run.job:
        return run.job.number, ""
    head = re.match(r"\d{1,9}(?=_)", Path(run.directory).name)
    return (int(head[0]), "") if head else (0, run.directory)


def log_tail(job: ledger.Job) -> str:
    """Return the last 15 lines of the rank that wrote last."""
    return "\n".join(next((lines[-15:] for lines in _ends(job) if lines), []))


def log_reason(job: ledger.Job) -> str | None:
    """Return what kept a step from starting: the first error of SLURM or its plugins, else the rank's last line."""
    for lines in _ends(job):
        errors = [match[1] for line in lines if (match := re.match(r"slurmstepd\S*: error: (.*)", line))]
        # srun's own lines only say that there was an error.
        others = [line.strip() for line in lines if line.strip() and not line.startswith(("srun: ", "slurmstepd"))]
        if errors or others:
            return errors[0] if errors else others[-1]
    return None


def _ends(job: ledger.Job) -> Iterator[list[str]]:
    """Yield the last lines of each rank, most recent first, then of the script of several runs, then of SLURM's log."""
    log = Path(job.log)
    logs = [
        path
        for folder in (log, *([log.parent] if job.step is not None else []))
        for path in sorted(folder.glob(f"{job.id}_*_log.err"), key=lambda path: -path.stat().st_mtime)
    ]
    logs += [folder / ledger.LOG_OF_SLURM.replace("%j", str(job.id)) for folder in (log, *log.parents)]
    for path in filter(Path.is_file, logs):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOOKED_AT))
            yield file.read().decode(errors="replace").splitlines()
