"""The memory and messages of each rank in ``ptdbench plan``, against the same steps on real ranks.

    make memory-truth ARGS='--rows fsdp 3d --columns "gpt keep fp32"'

Weights, gradients and optimizer state of the rank with the most must agree to the byte (the last shards of a weight are
padded, their optimizer state is not), and messages in operations, calls and bytes. The peak of allocated memory is only
shown; it leaves out ``other``, in which a GPU has cuBLAS's workspaces.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.cells import Matrix
from benchmarks.plan_truth import plan
from benchmarks.rank import job_of, on_ranks
from benchmarks.script import keep, read
from ptdbench.job import Job
from ptdbench.launch import peers
from ptdbench.setup.config import Config
from ptdbench.training import profile
from ptdbench.workloads.train import assemble

MATRIX = Matrix.load("memory")

KINDS = ("weights", "gradients", "optimizer")


def main() -> int:
    """Print a row for each cell; 1 if one of them misses."""
    args = MATRIX.options(__doc__)
    started, verdicts = time.monotonic(), []
    print(f"{'MiB':18}{'':22}{'ranks':>6}{'state':>10}{'planned':>10}{'peak':>10}{'planned':>10}  off by")
    for row in args.rows:
        cells = [read(*MATRIX.words(row, column), "device=cpu") for column in args.columns]
        for column, real in zip(args.columns, on_ranks(cells[0], _measure, cells), strict=True):
            planned = plan([*MATRIX.words(row, column), "virtual=h100"], "--again").records
            verdicts.append(bool(planned) and _agrees(row, column, real, planned[0]))
    print(f"{sum(verdicts)} of {len(verdicts)} cells pass; {time.monotonic() - started:.0f} s")
    keep("memory", f"{sum(verdicts)} of {len(verdicts)}")
    return int(not all(verdicts))


def _agrees(row: str, column: str, real: Mapping[str, Any], planned: Mapping[str, Any]) -> bool:
    """Print the row of a cell, and whether it is as required."""
    if planned["status"] == "failed":
        print(f"{row:18}{column:22} no plan: {planned['error']}", flush=True)
        return False
    of_ranks = real["state"], planned["plan"]["state"]
    state, foreseen = ({kind: max(rank[kind] for rank in ranks) for kind in KINDS} for ranks in of_ranks)
    sent, expected = map(_messages, (real["phases"]["communication"], planned["virtual"]["messages"]))
    peaks = _peak(real["memory"]), _peak(planned["memory"])
    misses = [
        f"{name} {here.get(name)} and not {there.get(name)}"
        for here, there in ((state, foreseen), (sent, expected))
        for name in dict.fromkeys([*here, *there])
        if here.get(name) != there.get(name)
    ]
    figures = "".join(f"{size / 2**20:10.3f}" for size in (sum(state.values()), sum(foreseen.values()), *peaks))
    verdict = f"MISS: {'; '.join(misses)}" if misses else "PASS"
    print(f"{row:18}{column:22}{MATRIX.rows[row][0]:6}{figures}{peaks[1] / peaks[0] - 1:+8.2%}  {verdict}", flush=True)
    return not misses


def _messages(operations: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return calls and bytes of each operation, the mean over ranks."""
    return {name: (round(sent["calls"], 2), round(sent["bytes"] or 0)) for name, sent in operations.items()}


def _peak(memory: Mapping[str, Any]) -> int:
    """Return the most bytes that a rank has allocated, without those of unknown kind."""
    return max(map(sum, zip(*(sizes for kind, sizes in memory["ranks"].items() if kind != "other"), strict=True)))


def _measure(job: Job, cells: Sequence[Config]) -> list[dict[str, Any]]:
    """In a rank, all cells in one process group: torch keeps plans for DTensors by names of groups."""
    torch.set_num_threads(1)
    return [_measured(job_of(cell, job)) for cell in cells]


def _measured(job: Job) -> dict[str, Any]:
    loop = assemble(job)
    loop.rehearse()  # DDP makes its buckets anew
    loop.engine.gradients(*loop.feed.peek(0), loop.update.scale)
    weights = [*loop.engine.module.parameters()]
    copies = [copy for part in loop.engine.parts if part.copies for copy in part.copies.tensors]
    gradients = _bytes(weight.grad for weight in weights if weight.grad is not None)
    loop.update(0)
    kept = [value for values in loop.update.optimizer.state.values() for value in values.values()]
    state = {
        "weights": _bytes([*weights, *loop.engine.module.buffers(), *copies]),
        "gradients": gradients,
        "optimizer": _bytes(value for value in kept if isinstance(value, Tensor)),
    }
    return {
        "state": peers.gather(state),
        "phases": to_builtins(profile.phases(job, loop, None)),
        "memory": to_builtins(profile.memory_by_purpose(job, loop)),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors, each storage once."""
    plain = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({store.data_ptr(): store.nbytes() for store in (tensor.untyped_storage() for tensor in plain)}.values())
