"""A training step of ptdbench's models against those of ``transformers``, or of nanoGPT's recipe.

    python benchmarks/model_speed.py                      # fp32 on a CPU, bf16 on a GPU; eager and compiled
    python benchmarks/model_speed.py --against nanogpt --model gpt_xl --batch 8 --sequence 1024 --steps 50
    python benchmarks/model_speed.py --model mixtral_8x7b --modes false --batch 2 --sequence 128
        --set layers=2 width=256 heads=4 key_value_heads=2 expert_hidden=448 vocabulary=2048

One step is forward, backward and AdamW. Ours is the one that a run does, built from the configuration; theirs is
autocast in bf16 and ``torch.compile`` of the whole model, as their scripts have it, with torch's fused AdamW. For time
the two run by turns in one process, so that whatever disturbs the machine disturbs both; the figure is the ratio of
neighboring steps, with a 95 % interval of its median. For memory each runs alone in a fresh process: peak resident
memory on a CPU, peak allocated memory on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from benchmarks.rivals import RIVALS
from benchmarks.script import parser_of, read
from ptdbench.measure.memory import peak_bytes, release
from ptdbench.measure.timing import median_interval
from ptdbench.parallel.mesh import Mesh
from ptdbench.setup import run_spec
from ptdbench.setup.compose import conf_folder
from ptdbench.training.loop import Update

Step = Callable[[], Tensor]


def main() -> None:
    """Print both figures for both modes, or be the fresh process that measures the memory of one model."""
    options = _parse()
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a mesh wants one
    if options.memory_of:
        print(_peak_bytes(stepper(options.memory_of, options, options.mode), options))
        return
    if not options.json:
        print(
            f"{options.model}, batch {options.batch} x {options.sequence} tokens, {options.precision}, "
            f"{options.device}, {options.threads} threads"
        )
    found = {}
    for mode in options.modes:
        # Memory first: a fresh process needs all of a GPU that two models in this one would have taken.
        found[mode] = _memory(options, mode) | _times(options, mode)
        release(options.device)
        if not options.json:
            print(_shown(mode, options.against, found[mode]), flush=True)
    if options.json:
        print(json.dumps(found))


def _shown(mode: str, rival: str, found: dict[str, Any]) -> str:
    interval = "unknown: too few pairs" if found["interval"] is None else "{:.3f} to {:.3f}".format(*found["interval"])
    head = f"compile={mode}"
    return (
        f"{head:<17} step     ours {found['ours']:.4f} s, {rival} {found['theirs']:.4f} s; ours/theirs "
        f"{found['ratio']:.3f} (95 % interval {interval}, {found['pairs']} pairs)\n"
        f"{'':<17} peak     ours {found['our_peak'] / 2**20:.0f} MiB, {rival} {found['their_peak'] / 2**20:.0f} MiB "
        f"{found['memory']}; ours/theirs {found['our_peak'] / found['their_peak']:.3f}"
    )


def _times(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    ours, theirs = (stepper(who, options, mode) for who in ("ours", "theirs"))
    for _ in range(options.warmup):
        ours(), theirs()
    pairs = [
        (_seconds(ours, options), _seconds(theirs, options))
        if turn % 2
        else (_seconds(theirs, options), _seconds(ours, options))[::-1]
        for turn in range(options.steps)
    ]
    ratios = [mine / other for mine, other in pairs]
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    interval = median_interval(ratios)
    ratio = statistics.median(ratios)
    return {"ours": mine, "theirs": other, "ratio": ratio, "interval": interval, "pairs": len(pairs)}


def _memory(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    mine, other = (_peak_of_fresh_process(who, mode) for who in ("ours", "theirs"))
    kind = "allocated" if options.device.type == "cuda" else "resident"
    return {"our_peak": mine, "their_peak": other, "memory": kind}


def _seconds(step: Step, options: argparse.Namespace) -> float:
    start = time.perf_counter()
    step()
    if options.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def stepper(who: str, options: argparse.Namespace, mode: str) -> Step:
    """One training step of a model, on tokens that are the same for both; ``options`` are those of this file."""
    sizes = yaml.safe_load((conf_folder() / "model" / f"{options.model}.yaml").read_text()) | dict(options.set)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(sizes["vocabulary"], (options.batch, options.sequence + 1), generator=generator)
    text = text.to(options.device)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return (_ours if who == "ours" else _theirs)(options, sizes, inputs, targets, mode)


def _ours(options: argparse.Namespace, _: dict[str, Any], inputs: Tensor, targets: Tensor, mode: str) -> Step:
    """What a run of this configuration does in each step, but for its data and its clock."""
    sizes = (f"model.{name}={value}" for name, value in options.set)
    asked = read(
        f"model={options.model}", f"model.sequence_length={options.sequence}", *sizes, "parallel=single",
        f"train.global_batch={options.batch}", f"precision={options.precision}", f"compile={mode}",
        f"device={options.device.type}", "cluster.ranks_per_node=1", "optimizer.lr=1e-4",
    )  # fmt: skip
    training = run_spec.specify(asked, None).training
    assert training
    engine = training.engine(Mesh(training.layout.dims, options.device.type), options.device)
    engine.module.train()
    optimizer = engine.optimizer(training.optimizer)
    update = Update(engine, optimizer, training.schedule, asked.train, options.device)

    def step() -> Tensor:
        loss = engine.gradients(inputs, targets, update.scale)
        update(0)
        return loss

    return step


def _theirs(options: argparse.Namespace, sizes: dict[str, Any], inputs: Tensor, targets: Tensor, mode: str) -> Step:
    with options.device:
        model, loss_of = RIVALS[options.against](sizes)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = loss_of if mode == "false" else torch.compile(loss_of)

    def step() -> Tensor:
        with torch.autocast(options.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _peak_bytes(step: Step, options: argparse.Namespace) -> int:
    for _ in range(3):  # the first step has no optimizer state yet
        step()
    return peak_bytes(options.device)


def _peak_of_fresh_process(who: str, mode: str) -> int:
    command = [sys.executable, *sys.argv, "--memory-of", who, "--mode", mode]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="gpt_small", help="of conf/model (default: %(default)s)")
    parser.add_argument(
        "--set", nargs="+", type=_size, default=[], metavar="NAME=VALUE", help="other sizes of the model"
    )
    parser.add_argument("--against", choices=list(RIVALS), default="transformers", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8 if on_gpu else 2, help="sequences (default: %(default)s)")
    parser.add_argument(
        "--sequence", type=int, default=1024 if on_gpu else 256, help="tokens each (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=100 if on_gpu else 15, help="pairs (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=10 if on_gpu else 2, help="steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="bf16" if on_gpu else "fp32", help="default: %(default)s"
    )
    device = "cuda" if on_gpu else "cpu"
    parser.add_argument("--device", type=torch.device, default=device, help="default: %(default)s")
    parser.add_argument("--modes", nargs="+", default=["false", "layers", "whole"], help="of compile, ours")
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    parser.add_argument("--memory-of", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="false", help=argparse.SUPPRESS)
    return parser.parse_args()


def _size(typed: str) -> tuple[str, Any]:
    name, _, value = typed.partition("=")
    return name, yaml.safe_load(value)


if __name__ == "__main__":
    main()
