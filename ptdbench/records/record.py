"""The record of a run as it is written: before it starts, after it ends, when it fails, and from parts of its ranks."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ptdbench.files import strict
from ptdbench.problems import as_typed, in_shell
from ptdbench.records import schema, store
from ptdbench.records.effects import EARLIER, affects, leaves, options_affecting
from ptdbench.records.failure import Failure, status_of
from ptdbench.records.run_record import UNFINISHED, RunRecord, option, start_command
from ptdbench.records.schema import Configuration, Draft, Messages, Owner, Virtual, Written
from ptdbench.terminal import sources

T = TypeVar("T")

#: Fields of every record, in the order in which they are written.
FIELDS = schema.Record.__struct_fields__

#: Results that a resumed run keeps from its earlier starts.
_RESULTS = ("metrics", "steps", "final_loss", "evaluations", "segments", "micro_batch")


def begin(
    config: Configuration,
    directory: Path,
    environment: Mapping[str, object],
    overrides: Sequence[str] | None = None,
    owner: Owner | None = None,
) -> Draft:
    """Return the record of a run before its start: its status is ``failed``, in case all processes are killed at once.

    The ``config`` is the resolved one, ``environment`` versions and hardware, ``overrides`` those typed for the run,
    ``None`` if unknown, and ``owner`` the process that starts the run, ``None`` if it is not started yet.
    """
    message = "the run is still running, or was killed before it could record how it ended"
    written = strict(config, str)
    return dict.fromkeys(FIELDS) | {
        "config": written,
        "status": "failed",
        "schema": schema.SCHEMA,
        "workload": option(written, "workload.name", str) or "-",
        "model": option(written, "model.name", str),
        "parallel": option(written, "parallel.name", str),
        "global_batch": option(written, "train.global_batch", schema.Degree),
        "precision": option(written, "precision", str),
        "kernels": option(written, "kernels", str),
        "fingerprint": fingerprint(config),
        "overrides": None if overrides is None else list(overrides),
        "sources": None if overrides is None else sources(),
        "started": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "directory": str(directory),
        "owner": msgspec.to_builtins(owner),
        "remarks": {},
        "environment": dict(environment),
        "error": schema.NO_ERROR | {"type": UNFINISHED, "message": message},
    }


#: Fields of a record that are known before the run starts, from its configuration and its summary.
_BEFORE_START = (
    "world_size", "kind", "model", "parallel", "global_batch", "precision", "kernels", "parameters",
    "tokens_per_sample", "layout", "variables",
)  # fmt: skip


def started(record: Written, directory: Path, environment: Mapping[str, object], owner: Owner, launcher: str) -> Draft:
    """Return the record of a run that a process starts; what was known of the run before its start stays."""
    kept = {name: record.get(name) for name in _BEFORE_START} | {"launcher": launcher}
    return begin(configuration(record), directory, environment, owner=owner) | kept


def configuration(record: Written) -> Configuration:
    """Return the resolved configuration in a record; empty if there is none."""
    return record.get("config") or {}


def failed(record: Written, failure: Failure) -> Draft:
    """Return the record of a run with this failure."""
    return {**record, "status": status_of(failure), "error": failure.as_error()}


def with_earlier_results(draft: Written, earlier: Written) -> Draft:
    """Return the draft of a resumed run's record, with the results of its earlier starts."""
    kept = {name: earlier[name] for name in _RESULTS if earlier.get(name) is not None}
    typed = draft if draft.get("overrides") is not None else earlier
    goes_on = same_work(configuration(earlier), configuration(draft))
    words = {name: typed.get(name) for name in ("overrides", "sources")}
    return {**draft, **words, **(kept if goes_on else {})}


#: How a stopped run continues, by whether its last step was saved; ``None`` if the run saves nothing.
_HOW_IT_GOES_ON = {
    True: "it has saved",
    False: "this step could not be saved (see remarks), so resuming continues from an earlier one",
    None: "no checkpoint (see checkpoint.every_steps), so resuming starts over",
}


def stopped(record: Written, why: str, saved: bool | None = True) -> Draft:
    """Return the record of a run that was asked to stop; ``saved`` as in :class:`ptdbench.job.Outcome`.

    SIGUSR2 comes ahead of the time limit of a job that ptdbench submitted.
    """
    is_limit = why.startswith("SIGUSR2") and option(configuration(record), "cluster.submit", str)
    signal, mark, more = why.partition(";")
    why = f"{signal}, ahead of the time limit of its job{mark}{more}" if is_limit else why
    again = f"{start_command(record.get('launcher'), configuration(record))} {in_shell('resume', record['directory'])}"
    message = f"stopped by {why}; {_HOW_IT_GOES_ON[saved]}: {again}"
    status = "timeout" if is_limit else "preempted"
    return {**record, "status": status, "error": schema.NO_ERROR | {"type": "Stopped", "message": message}}


def requeued(record: Written, number: int, limit: int) -> Draft:
    """Return the record of a run whose job was requeued: it stays open."""
    message = f"saved and requeued ({number} of {limit}); it resumes in the same directory"
    return {**record, "status": "preempted", "error": schema.NO_ERROR | {"type": UNFINISHED, "message": message}}


def is_open(record: Written) -> bool:
    """Return whether the end of the run has not been recorded yet."""
    return schema.error(record).type == UNFINISHED


def is_settled(record: Written) -> bool:
    """Return whether the run's end was recorded by the queue or by all ranks together, which know more than one rank.

    A rank on a lost node may live on for a while and must not overwrite that. Nor may a rank that fails during
    shutdown, after the run was ok.
    """
    error = schema.error(record)
    return record["status"] == "ok" or (error.rank == -1 and error.type not in ("", UNFINISHED))


def same_work(config: Configuration, other: Configuration) -> bool:
    """Return whether two resolved configurations describe the same run, possibly with other cluster resources.

    For example, a run that reached its time limit may be given more time.
    """
    return work(config) == work(other)


def work(config: Configuration, ignored: Collection[str] = ()) -> str:
    """Return sixteen hex digits, equal for two resolved configurations if and only if they describe the same run.

    An empty group equals a missing one, and an unset shape option a missing one. Options with the dotted names
    ``ignored`` make no difference, in addition to those that never do.
    """
    return _digest({name: value for name, value in _requested(config).items() if name not in ignored})


def _requested(config: Configuration) -> dict[str, object]:
    """Return the options of a resolved configuration that identify its run, by their dotted names."""
    options = ((name, value) for name, value in leaves(config) if value != {} and EARLIER.get(name) != value)
    requested = {name: value for name, value in options if not affects(name, "nothing", "queue")}
    unset = {name for name in options_affecting("shape") if requested.get(name) is None}
    return {name: value for name, value in requested.items() if name not in unset}


def same_where_both(was: Configuration, now: Configuration, ignored: Collection[str]) -> bool:
    """Compare like :func:`work`, but only options of both: a later version may have added or removed some."""
    before, after = _requested(was), _requested(now)
    return all(before[name] == after[name] for name in (before.keys() & after.keys()) - {*ignored})


def work_difference(was: Configuration, now: Configuration) -> str | None:
    """Describe the options in which two resolved configurations' runs differ: ``train.steps=5 (here 7)``.

    Only the first three are named, as configurations of different package versions may differ in many.
    """
    sides = [{name: as_typed(value) for name, value in _requested(config).items()} for config in (was, now)]
    values = {name: [side.get(name, "not set") for side in sides] for name in sides[0] | sides[1]}
    differing = [f"{name}={before} (here {after})" for name, (before, after) in values.items() if before != after]
    return ", ".join([*differing[:3], *([f"{len(differing) - 3} more"] if len(differing) > 3 else [])]) or None


def other_model(was: Configuration, now: Configuration) -> str | None:
    """Describe the earlier model if it differs from the current one: ``gpt_tiny``, or ``toy with width=64 (here 32)``.

    Both arguments are options as in ``config.model``; a different ``name`` alone does not count.
    """
    if was.get("_target_") != now.get("_target_"):
        return str(was.get("name"))
    options = [option for option in {**was, **now} if option != "name" and was.get(option) != now.get(option)]
    differing = [f"{option}={was.get(option, '(not set)')} (here {now.get(option, 'not set')})" for option in options]
    return f"{was.get('name')} with {', '.join(differing)}" if differing else None


#: Statuses of runs that would end alike if they were done again: one that diverged has the same weights and samples.
DONE = ("ok", "diverged")


def is_done(directory: Path, config: Configuration, or_failed: bool = False) -> bool:
    """Return whether ``directory`` holds a run of this configuration that is done, or that failed, if that counts."""
    try:
        earlier = store.read_record(directory)
    except (FileNotFoundError, store.Damaged):
        return False
    is_over = earlier.status in DONE or (or_failed and not earlier.is_interrupted)
    return is_over and same_work(earlier.config, config)


def fingerprint(config: Configuration) -> str:
    """Return sixteen hex digits, equal for two runs if and only if their resolved configurations are equal.

    Options that do not affect the work are ignored, see :mod:`ptdbench.records.effects`.
    """
    return _digest({name: value for name, value in config.items() if not affects(name, "nothing")})


def _digest(options: Configuration) -> str:
    canonical = json.dumps(strict(options, str), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


Objective = Literal["throughput", "held_out_loss", "held_out_accuracy"]

#: The direction in which each objective improves.
DIRECTIONS: dict[Objective, Literal["maximize", "minimize"]] = {
    "throughput": "maximize",
    "held_out_loss": "minimize",
    "held_out_accuracy": "maximize",
}


def objective_value(record: RunRecord, objective: Objective) -> float | None:
    """Return the value of a run's objective; ``None`` if the run is not ok or has no such figure.

    ``throughput`` is in tokens per second, or samples per second if samples are not token sequences. The other
    objectives are taken from the best evaluation.
    """
    if record.status != "ok" or objective == "throughput":
        return record.throughput
    is_loss = objective == "held_out_loss"
    figures = [evaluation.loss if is_loss else evaluation.top1 for evaluation in record.evaluations]
    best = max if DIRECTIONS[objective] == "maximize" else min
    return best((figure for figure in figures if figure is not None), default=None)


#: Fields with a number for each rank, besides those by kind.
_OF_RANKS = (
    "allocated_bytes", "peak_steps", "reserved_bytes", "outside_bytes", "communicators", "host_seconds", "flops"
)  # fmt: skip


def merged_accounts(accounts: Sequence[Virtual], stands_for: Mapping[int, int] | None = None) -> Virtual:
    """Combine accounts of different ranks; ``stands_for``: how many ranks each stands for, by default itself only.

    The bytes of a message are known only if all ranks that send it know theirs.
    """
    first, ranks = accounts[0], [account.ranks or [] for account in accounts]
    kinds = dict.fromkeys(kind for account in accounts for kind in account.kernels or ())
    operations = dict.fromkeys(operation for account in accounts for operation in account.messages or ())
    counts = [sum((stands_for or {}).get(rank, 1) for rank in of_account) for of_account in ranks]
    return Virtual(
        device=first.device,
        ranks=[*chain(*ranks)],
        context_bytes=first.context_bytes,
        first_step=None,
        **{name: _joined(getattr(account, name) for account in accounts) for name in _OF_RANKS},
        kernels={kind: [*chain(*(_kernels(account, kind) for account in accounts))] for kind in kinds},
        messages={operation: _mean(operation, accounts, counts) for operation in operations},
        reason=next((account.reason for account in accounts if account.reason), None),
    )


def _kernels(account: Virtual, kind: str) -> list[int]:
    return (account.kernels or {}).get(kind) or [0] * len(account.ranks or ())


def _joined(lists: Iterable[list[T] | None]) -> list[T] | None:
    present = [numbers for numbers in lists if numbers is not None]
    return [*chain(*present)] if present else None


def _mean(operation: str, accounts: Sequence[Virtual], counts: Sequence[int]) -> Messages:
    """Average an operation over all ranks; ``counts``: how many ranks each account stands for."""
    of_accounts = [(account.messages or {}).get(operation) for account in accounts]
    sent = [(messages, count) for messages, count in zip(of_accounts, counts, strict=True) if messages]
    sizes = [messages.bytes * count for messages, count in sent if messages.bytes is not None]
    return Messages(
        calls=sum(messages.calls * count for messages, count in sent) / sum(counts),
        bytes=sum(sizes) / sum(counts) if len(sizes) == len(sent) else None,
    )
