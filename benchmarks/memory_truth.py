"""What ``ptdbench plan`` says of each rank's memory and messages, against the same steps on real ranks.

    python benchmarks/memory_truth.py
    python benchmarks/memory_truth.py --rows "fsdp;3d" --columns "gpt keep fp32"

A cell is a layout with a model, a way of handling activations and a precision. The product assembles it on gloo ranks
of this machine and takes steps: the memory in which weights, gradients and optimizer state lie is counted, each piece
once, then a step is watched by the profiler for its messages and another one for its memory. The same is planned on
virtual GPUs. State must agree to the byte and messages in operations, calls and bytes. Of the rank that takes the
most: the last shards of a weight are padded, but their optimizer state is not.

The peak is shown, and nothing is required of it: a plan is of a GPU, whose kernels keep other things than those of a
CPU, and whose streams free FSDP's buffers at other times. It is that of what is allocated, without ``other``, where a
GPU has cuBLAS's workspaces.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import to_builtins
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.cells import parser_of_cells
from benchmarks.rank import on_ranks
from benchmarks.script import read
from ptdbench.job import Job
from ptdbench.launch import peers
from ptdbench.planning import memory_plan
from ptdbench.problems import ConfigError
from ptdbench.run import run
from ptdbench.setup import run_spec
from ptdbench.setup.config import Config
from ptdbench.training import memory_split, profile
from ptdbench.workloads.train import assemble

#: The layouts: ranks and options.
ROWS = {
    "single": (1, "parallel=single"),
    "ddp": (4, "parallel=ddp"),
    "ddp, zero1": (4, "parallel=ddp parallel.optimizer=zero1"),
    "fsdp": (4, "parallel=fsdp"),
    "fsdp of 8": (8, "parallel=fsdp"),
    "hsdp": (4, "parallel=hsdp parallel.replicate=2 parallel.shard=2"),
    "tp": (4, "parallel=tp parallel.tensor=2 parallel.replicate=2"),
    "tp, fsdp": (4, "parallel=tp parallel.tensor=2 parallel.shard=2"),
    "context, fsdp": (4, "parallel=fsdp parallel.context=2 parallel.shard=2"),
    "pdp": (4, "parallel=pdp parallel.pipeline=2"),
    "pdp, interleaved": (4, "parallel=pdp parallel.pipeline=2 parallel.schedule=interleaved1f1b"),
    "3d": (8, "parallel=3d parallel.pipeline=2 parallel.tensor=2 parallel.shard=2"),
}

#: Models, ways of handling activations, and precisions.
COLUMNS = {
    "gpt keep fp32": "model=gpt_tiny",
    "gpt recompute fp32": "model=gpt_tiny activations=recompute",
    "gpt selective bf16": "model=gpt_tiny activations=selective precision=bf16",
    "llama keep bf16": "model=llama_tiny precision=bf16",
    "llama recompute bf16": "model=llama_tiny activations=recompute precision=bf16",
}

#: What all cells share.
COMMON = ("data=synthetic_tokens", "train.global_batch=32", "train.steps=3", "profile.steps=1")

KINDS = ("weights", "gradients", "optimizer")


def main(options: argparse.Namespace) -> int:
    """Print a row for each cell; 1 if one of them misses."""
    started, verdicts = time.monotonic(), []
    print(f"{'MiB':18}{'':22}{'ranks':>6}{'state':>10}{'planned':>10}{'peak':>10}{'planned':>10}  off by")
    for row in options.rows:
        for column, real in zip(options.columns, carried_out(row, options.columns), strict=True):
            try:
                verdicts.append(_told(row, column, real, planned(row, column)))
            except (ConfigError, memory_plan.Failed) as error:
                print(f"{row:18}{column:22} no plan: {error}", flush=True)
                verdicts.append(False)
    print(f"{sum(verdicts)} of {len(verdicts)} cells pass; {time.monotonic() - started:.0f} s")
    return int(not all(verdicts))


def asked(row: str, column: str, *words: str) -> Config:
    """The configuration of a cell."""
    ranks, layout = ROWS[row]
    return read(*COMMON, *layout.split(), *COLUMNS[column].split(), f"cluster.ranks_per_node={ranks}", *words)


def carried_out(row: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """What was measured of each cell of a row on real ranks, which are started once."""
    cells = [asked(row, column, "device=cpu") for column in columns]
    found: list[dict[str, Any]] = on_ranks(cells[0], _measure, cells)
    return found


def planned(row: str, column: str) -> dict[str, Any]:
    """The plan of a cell."""
    return memory_plan.plan(memory_plan.Asked(asked(row, column, "virtual=h100"), False, f"{row}, {column}", run))


def _told(row: str, column: str, real: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    """Print the row of a cell, and whether it is as required."""
    state = {kind: max(one[kind] for one in real["state"]) for kind in KINDS}
    foreseen = {kind: max(one[kind] for one in plan["plan"]["state"]) for kind in KINDS}
    sent = _messages(real["phases"]["communication"])
    expected = _messages(plan["virtual"]["messages"])
    peaks = _peak(real["memory"]), _peak(plan["memory"])
    misses = [f"{kind} {state[kind]:,} and not {foreseen[kind]:,}" for kind in KINDS if state[kind] != foreseen[kind]]
    misses += [
        f"{name} {sent.get(name)} and not {expected.get(name)}"
        for name in dict.fromkeys([*sent, *expected])
        if sent.get(name) != expected.get(name)
    ]
    sizes = [sum(state.values()), sum(foreseen.values()), *peaks]
    figures = "".join(f"{size / 2**20:10.3f}" for size in sizes)
    verdict = f"MISS: {'; '.join(misses)}" if misses else "PASS"
    print(f"{row:18}{column:22}{ROWS[row][0]:6}{figures}{peaks[1] / peaks[0] - 1:+8.2%}  {verdict}", flush=True)
    return not misses


def _messages(told: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Calls and bytes of each operation, the mean over ranks."""
    return {name: (round(one["calls"], 2), round(one["bytes"] or 0)) for name, one in told.items()}


def _peak(memory: Mapping[str, Any]) -> int:
    """Bytes allocated on the rank that takes the most, without what no kind is known of."""
    return max(map(sum, zip(*(sizes for kind, sizes in memory["ranks"].items() if kind != "other"), strict=True)))


def _measure(job: Job, cells: Sequence[Config]) -> list[dict[str, Any]]:
    """In a rank, all cells in one process group: torch keeps plans for DTensors by names of groups."""
    torch.set_num_threads(1)
    return [_measured(replace(job, spec=run_spec.specify(cell, job.world))) for cell in cells]


def _measured(job: Job) -> dict[str, Any]:
    loop = assemble(job)
    expected = profile.expect(job)
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
        "phases": to_builtins(profile.phases(job, loop, None, expected)),
        "memory": to_builtins(memory_split.split(job, loop)),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory in which these tensors lie, each piece once."""
    plain = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in plain}.values())


if __name__ == "__main__":
    sys.exit(main(parser_of_cells(__doc__, ROWS, COLUMNS, between_rows=";").parse_args()))
