"""Virtual runs in tables and lines: they have no times, and no rank in an order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ptdbench.records.record import option
from ptdbench.records.schema import Layout, Memory, Plan, Virtual, Written, part
from ptdbench.report.text import drawn, figure_text, wrap
from ptdbench.terminal import rank_names
from ptdbench.units import size_text


def is_ok(record: Written) -> bool:
    """Return whether a run on virtual GPUs, or a plan, finished: neither has a throughput."""
    return record.get("kind") in ("virtual", "planned") and record["status"] == "ok"


def has_figures(record: Written) -> bool:
    """Return whether a run finished on virtual GPUs, by itself or for a plan."""
    return bool(record.get("virtual")) and (record.get("kind") == "planned" or is_ok(record))


def remarks(records: Iterable[Written]) -> Iterator[str]:
    """Yield what to know about the virtual runs and the plans of a table."""
    records = list(records)
    if any(record.get("kind") == "planned" for record in records):
        yield "planned: what a run will need, and no run; memory is that of the rank that needs most"
    names = [name for record in records if (name := part(record, Virtual).device)]
    if names:
        devices = ", ".join(dict.fromkeys(names))
        yield f"{devices}: nothing is computed: memory and messages are exact, and there are no times"
    yield from dict.fromkeys(line for record in records if record.get("virtual") for line in of_model(record))


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
    found, step = record["virtual"], _step(record)
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


def _step(record: Written) -> str:
    """Return what was carried out: ``a step``, or of a plan with more passes ``2 of 8 passes of a step``."""
    carried, passes = part(record, Plan).accumulation, part(record, Layout).accumulation
    return f"{carried} of {passes} passes of a step" if carried and passes and carried < passes else "a step"


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
