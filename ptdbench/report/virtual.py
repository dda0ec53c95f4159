"""Virtual runs and plans in tables and lines: they have no times, and no rank in an order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import astuple

from ptdbench.profiling.phases import KINDS
from ptdbench.records.record import option
from ptdbench.records.schema import Layout, Memory, Plan, Virtual, Written, part
from ptdbench.report.text import drawn, figure_text, wrap
from ptdbench.terminal import rank_names
from ptdbench.units import gib_text, size_text


def is_ok(record: Written) -> bool:
    """Return whether a run on virtual GPUs, or a plan, finished: neither has a throughput."""
    return record.get("kind") in ("virtual", "planned") and record["status"] == "ok"


def has_figures(record: Written) -> bool:
    """Return whether a run finished on virtual GPUs, by itself or for a plan."""
    return bool(record.get("virtual")) and (record.get("kind") == "planned" or is_ok(record))


def does_not_fit(record: Written) -> bool:
    """Return whether a plan says that a run does not fit, which is an answer, and no failure."""
    return record.get("kind") == "planned" and record["status"] == "oom"


#: The columns of a plan besides its name and ranks, in display order, each with its place in the order of omission.
PLANNED = {
    "mb": None, "rank": 4, "weights": 7, "gradients": 3, "optimizer": 6, "activations": None, "gathered": None,
    "other": 1, "allocated": 5, "reserved": None, "outside": 2, "of GPU": 0, "left": None, "fits": None, "max mb": None,
}  # fmt: skip

#: Those that are no sizes.
NO_SIZES = ("mb", "rank", "fits", "max mb")


def plan_figures(record: Written) -> dict[str, int | str | None]:
    """Return the figures of a plan by :data:`PLANNED`, sizes in bytes, of the rank that needs most; none of a run."""
    if record.get("kind") != "planned":
        return {}
    plan, imitated, kinds = part(record, Plan), part(record, Virtual), part(record, Memory).ranks or {}
    place = imitated.ranks.index(plan.rank) if plan.rank is not None and imitated.ranks else None
    state = max(plan.state or [], key=lambda one: sum(astuple(one)), default=None)
    room, needed, largest = plan.room_bytes, plan.needed_bytes, plan.largest_micro_batch
    return {
        "mb": part(record, Layout).micro_batch,
        "rank": None if place is None else plan.rank,
        **{
            {"communication": "gathered"}.get(kind, kind): kinds[kind][place]
            if place is not None and kind in kinds
            else getattr(state, kind, None)
            for kind in KINDS
        },
        "allocated": plan.allocated_bytes,
        "reserved": plan.reserved_bytes,
        "outside": sum(plan.outside.values()) if plan.outside else None,
        "of GPU": plan.capacity_bytes,
        "left": None if room is None or needed is None else room - needed,
        "fits": {True: "yes", False: "no", None: "?"}[plan.fits] if record.get("plan") else "failed",
        "max mb": largest if largest is None else str(largest or "none"),
    }


def remarks(records: Sequence[Written]) -> Iterator[str]:
    """Yield what to know about the virtual runs and the plans of a table."""
    plans = [record for record in records if record.get("kind") == "planned"]
    if plans:
        yield "planned: what a run will need, and no run; memory is that of the rank that needs most"
    if devices := ", ".join(dict.fromkeys(name for record in records if (name := part(record, Virtual).device))):
        yield f"{devices}: nothing is computed: memory and messages are exact, and there are no times"
    models = (line for record in records if record.get("virtual") for line in of_model(record))
    yield from dict.fromkeys([*of_plans(plans), *models])


def of_plans(records: Sequence[Written]) -> Iterator[str]:
    """Yield what the columns of plans mean, and what is not in them; lines may repeat."""
    simulated = [record for record in records if part(record, Plan).stands_for]
    for plan in (record["plan"] for record in simulated):
        samples = ", samples that wait for their pass" if "samples" in (plan.get("outside") or {}) else ""
        yield (
            f"left: of {gib_text(plan['room_bytes'])} of {gib_text(plan['capacity_bytes'])} ({plan['capacity_of']}), "
            f"after what torch reserves{samples}, the CUDA context and NCCL's buffers, the latter two by estimate"
        )
    if simulated:
        yield (
            "gathered: weights that FSDP has gathered, and buffers of communication; max mb: the largest micro-batch "
            "that fits; simulated: " + "; ".join(dict.fromkeys(map(_stands_for, simulated)))
        )
    if any(option(record, "eval.every", int) for record in simulated):
        yield "evaluation (eval.every) is left out: a batch of it, of eval.micro_batch samples, may need more"
    offloaded = (part(record, Plan).state for record in records if option(record, "offload", str) not in (None, "none"))
    for size in dict.fromkeys(max(sum(astuple(one)) for one in state) for state in offloaded if state):
        yield f"offload: {gib_text(size)} of a rank are in host memory, which is compared with nothing"
    yield from (line for record in records if record.get("virtual") for line in of_model(record))
    for known in (part(record, Plan) for record in records):
        if known.capacity_bytes and known.reason:
            yield f"memory: {known.capacity_of}"


def _stands_for(record: Written) -> str:
    """``rank 0 (stands for 511 ranks) and rank 511``."""
    pairs = zip(record["virtual"]["ranks"], record["plan"]["stands_for"], strict=True)
    *others, last = [f"rank {rank}" + (f" (stands for {count} ranks)" if count > 1 else "") for rank, count in pairs]
    return f"{', '.join(others)} and {last}" if others else last


def of_model(record: Written) -> Iterator[str]:
    """Yield how a model behaves differently on virtual GPUs."""
    if option(record, "model.router", dict):
        yield (
            "experts take turns by position, as with model.router.balance=forced, since no scores are computed; "
            "real tokens are routed less evenly"
        )
    if any((part(record, Virtual).kernels or {}).get("convolution", ())):
        yield "convolutions have no workspaces here; on a GPU cuDNN allocates them, which takes more memory"


def explained(record: Written, called: str, width: int) -> str:
    """Render memory, kernels and messages of one run."""
    found = record["virtual"]
    carried, passes = part(record, Plan).accumulation, part(record, Layout).accumulation
    step = f"{carried} of {passes} passes of a step" if carried and passes and carried < passes else "a step"
    ranks, size = found["ranks"], record.get("world_size")
    present = f"all {size} ranks" if len(ranks) == size else f"{rank_names(ranks)} of {size}"
    lines = [wrap(f"{called} on {found['device']}, {present}", width), *_memory(record, width)]
    if found.get("reason"):
        lines.append(wrap(f"no kernels and no messages: {found['reason']}", width))
    else:
        lines += [*_kernels(found, step, width), *_messages(found, step, width)]
    lines += [wrap(line, width) for line in of_model(record)]
    if hosts := found["host_seconds"]:
        told = f"the host launched {step} in {1e3 * max(hosts):.0f} ms, beside the other ranks on this machine"
        lines.append(wrap(told, width))
    return "\n".join(lines)


def _memory(record: Written, width: int) -> Iterator[str]:
    """Yield a table with a row for each rank: its peaks, and its memory by purpose."""
    found, kinds = record["virtual"], part(record, Memory).ranks or {}
    names = ["allocated", "reserved", *kinds]
    rows = []
    for place, rank in enumerate(found["ranks"]):
        peaks = [found["allocated_bytes"][place], found["reserved_bytes"][place]]
        rows.append([str(rank), *map(size_text, [*peaks, *(kinds[kind][place] for kind in kinds)])])
    yield drawn(["rank", *names], rows, width, spared=["other", "communication"])
    on_top = f"the CUDA context (about {size_text(found['context_bytes'])}) and NCCL's buffers come on top"
    yield wrap(f"reserved: what torch's allocator takes from the GPU; it decides whether a run fits; {on_top}", width)


def _kernels(found: Mapping[str, Any], step: str, width: int) -> Iterator[str]:
    totals = [sum(counts) for counts in zip(*found["kernels"].values(), strict=True)]
    of_first = ", ".join(f"{counts[0]:,} {kind}" for kind, counts in found["kernels"].items() if counts[0])
    if totals:
        yield wrap(f"{totals[0]:,} kernels in {step} on rank {found['ranks'][0]}: {of_first}", width)


def _messages(found: Mapping[str, Any], step: str, width: int) -> Iterator[str]:
    if not found["messages"]:
        return
    rows = []
    for operation, sent in found["messages"].items():
        figures = (sent["calls"], sent.get("bytes"), sent.get("formula_bytes"))
        rows.append([operation, *(figure_text(figure, "{:,.0f}".format) for figure in figures)])
    title = f"messages of {step}"
    yield drawn([title, "calls", "bytes", "by formula"], rows, width, words=[title])
