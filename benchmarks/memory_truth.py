"""The memory of weights, gradients and optimizer state on each rank, against what the layout must take by its formula.

    python benchmarks/memory_truth.py
    python benchmarks/memory_truth.py --model llama_tiny --only fsdp 3d

The product assembles a run in each rank and takes one step. Then the memory in which its tensors lie is counted, each
piece once, and set beside :func:`ptdbench.parallel.footprint.footprints`, by which a run that does not fit is refused
before it starts. A row is of the rank that takes the most; all ranks are compared. The last shards of a weight are
padded, but their optimizer state is not: so it may be less than the formula on other ranks than the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import DictConfig
from rank import joined
from torch import Tensor
from torch.distributed.tensor import DTensor

from ptdbench.launch import local, peers
from ptdbench.setup.compose import compose_all
from ptdbench.workloads.train import assemble

#: How far from its formula the memory of a kind may be, on the rank that takes the most.
TOLERANCE = 0.01

LAYOUTS = {
    "single": ["parallel=single"],
    "ddp": ["parallel=ddp"],
    "ddp, zero1": ["parallel=ddp", "parallel.optimizer=zero1"],
    "fsdp": ["parallel=fsdp"],
    "fsdp, bf16": ["parallel=fsdp", "precision=bf16"],
    "hsdp": ["parallel=hsdp", "parallel.replicate=2", "parallel.shard=2"],
    "tp": ["parallel=tp", "parallel.tensor=2", "parallel.replicate=2"],
    "tp, fsdp": ["parallel=tp", "parallel.tensor=2", "parallel.shard=2"],
    "context, fsdp": ["parallel=fsdp", "parallel.context=2", "parallel.shard=2"],
    "pdp": ["parallel=pdp", "parallel.pipeline=2"],
    "pdp, interleaved": ["parallel=pdp", "parallel.pipeline=2", "parallel.schedule=interleaved1f1b"],
    "3d": ["parallel=3d", "parallel.pipeline=2", "parallel.tensor=2", "parallel.shard=2"],
}

#: Ranks of a layout, where they are not four.
RANKS = {"single": 1, "3d": 8}

KINDS = ("weights", "gradients", "optimizer")


def main() -> int:
    """Print a row for each layout; 1 if one of them misses."""
    options = _parse()
    headings = "".join(f"{kind:>12}{'formula':>12}" for kind in KINDS)
    print(f"{'MiB, ' + options.model:18}{'ranks':>6}{headings}{'off by':>9}")
    return int(not all([_passes(name, options.model) for name in options.only or LAYOUTS]))  # noqa: C419


def _passes(name: str, model: str) -> bool:
    """Print the row of a layout, and whether it is as required."""
    ranks = RANKS.get(name, 4)
    words = [f"model={model}", *LAYOUTS[name], f"cluster.ranks_per_node={ranks}", "device=cpu", "train.steps=1"]
    composed = compose_all(words).jobs[0]
    with TemporaryDirectory() as directory:
        local.start(_in_rank, ranks, composed, directory)
        of_ranks = json.loads(Path(directory, "found").read_text())
    most = {(kind, side): max(one[side][kind] for one in of_ranks) for kind in KINDS for side in ("real", "foreseen")}
    off = max(abs(most[kind, "real"] / most[kind, "foreseen"] - 1) for kind in KINDS)
    exceeds = any(one["real"][kind] > one["foreseen"][kind] for one in of_ranks for kind in KINDS)
    figures = "".join(f"{most[kind, side] / 2**20:12.3f}" for kind in KINDS for side in ("real", "foreseen"))
    passes = off <= TOLERANCE and not exceeds
    print(f"{name:18}{ranks:6}{figures}{off:9.2%}  {'PASS' if passes else 'MISS'}", flush=True)
    return passes


def _in_rank(environ: Mapping[str, str], composed: DictConfig, directory: str) -> None:
    torch.set_num_threads(1)
    with joined(environ, composed, directory) as job:
        loop = assemble(job)
        loop.engine.gradients(*loop.feed.peek(0), loop.update.scale)
        weights = [*loop.engine.module.parameters()]
        gradients = _bytes(weight.grad for weight in weights if weight.grad is not None)
        loop.update(0)
        state = [value for values in loop.update.optimizer.state.values() for value in values.values()]
        real = {
            "weights": _bytes([*weights, *loop.engine.module.buffers()]),
            "gradients": gradients,
            "optimizer": _bytes(value for value in state if isinstance(value, Tensor)),
        }
        stage = job.training.layout.dims.stage(job.world.rank)
        of_ranks = peers.gather({"real": real, "foreseen": asdict(job.training.footprints()[stage])})
        if job.world.rank == 0:
            Path(directory, "found").write_text(json.dumps(of_ranks))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory in which these tensors lie, each piece once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in local}.values())


def _parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="gpt_tiny")
    parser.add_argument("--only", nargs="*", choices=LAYOUTS, help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
