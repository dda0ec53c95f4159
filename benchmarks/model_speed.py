"""A training step of ptdbench's models against those of ``transformers``, or of nanoGPT's recipe.

    make model-speed                                      # fp32 on a CPU, bf16 on a GPU; eager and compiled
    make model-speed ARGS="--against nanogpt --model gpt_xl --batch 8 --sequence 1024 --steps 50"

One step is forward, backward and AdamW. Ours is the one that a run does; theirs is autocast in bf16 and
``torch.compile`` of the whole model, as their scripts have it, with torch's fused AdamW. The two run by turns; the peak
memory is that of a fresh process for each, resident on a CPU, allocated on a GPU. Good is a ratio below 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from benchmarks.rivals import RIVALS
from benchmarks.script import keep, options, read
from ptdbench.measure.memory import peak_bytes, release
from ptdbench.measure.timing import median_interval
from ptdbench.parallel.mesh import Mesh
from ptdbench.setup import run_spec
from ptdbench.setup.compose import conf_folder
from ptdbench.training.loop import Update

Step = Callable[[], Tensor]


def main() -> int:
    """Print both figures for each mode, or be the fresh process that measures the memory of one model."""
    on_gpu = torch.cuda.is_available()
    given = options(
        __doc__,
        model=("gpt_small", "of conf/model"),
        set=((), "NAME=VALUE: other sizes of the model"),
        against=("transformers", "whose step", RIVALS),
        batch=(8 if on_gpu else 2, "sequences"),
        sequence=(1024 if on_gpu else 256, "tokens each"),
        steps=(100 if on_gpu else 15, "pairs"),
        warmup=(10 if on_gpu else 2, "steps"),
        threads=(torch.get_num_threads(), "of the process"),
        precision=("bf16" if on_gpu else "fp32", "of both", ["fp32", "bf16"]),
        device=("cuda" if on_gpu else "cpu", "where they run"),
        modes=(("false", "layers", "whole"), "of compile, ours"),
        json=(False, "print the figures as one line of JSON"),
        memory_of=(str, "print the peak memory of one model, in bytes", ["ours", "theirs"]),
    )
    torch.set_num_threads(given.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a mesh wants one
    if given.memory_of:
        print(_peak_bytes(stepper(given.memory_of, given, given.modes[0]), torch.device(given.device)))
        return 0
    what = f"{given.model}, batch {given.batch} x {given.sequence} tokens, {given.precision}, {given.device}"
    print(f"{what}, {given.threads} threads", file=sys.stderr if given.json else sys.stdout)
    found = {}
    for mode in given.modes:
        # Memory first: a fresh process needs all of a GPU that two models in this one would have taken.
        ours, theirs = (_peak_of_fresh_process(who, mode) for who in ("ours", "theirs"))
        found[mode] = {"our_peak": ours, "their_peak": theirs} | _times(given, mode)
        release(torch.device(given.device))
        if not given.json:
            print(_shown(mode, given.against, found[mode]), flush=True)
    if given.json:
        print(json.dumps(found))
    keep(f"{given.model} {given.against}", ", ".join(f"{mode} {one['ratio']:.3f}" for mode, one in found.items()))
    return 0


def _shown(mode: str, rival: str, found: dict[str, Any]) -> str:
    interval = "{:.3f} to {:.3f}".format(*found["interval"]) if found["interval"] else "unknown: too few pairs"
    return (
        f"{f'compile={mode}':<17} step     ours {found['ours']:.4f} s, {rival} {found['theirs']:.4f} s; ours/theirs "
        f"{found['ratio']:.3f} (95 % interval {interval}, {found['pairs']} pairs)\n"
        f"{'':<17} peak     ours {found['our_peak'] / 2**20:.0f} MiB, {rival} {found['their_peak'] / 2**20:.0f} MiB; "
        f"ours/theirs {found['our_peak'] / found['their_peak']:.3f}"
    )


def _times(given: argparse.Namespace, mode: str) -> dict[str, Any]:
    steps = {who: stepper(who, given, mode) for who in ("ours", "theirs")}
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for turn in range(given.warmup + given.steps):
        for who in steps if turn % 2 else reversed(steps):
            started = time.perf_counter()
            steps[who]()
            if given.device == "cuda":
                torch.cuda.synchronize()
            seconds[who].append(time.perf_counter() - started)
    ours, theirs = (times[given.warmup :] for times in seconds.values())
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    medians = {"ours": median(ours), "theirs": median(theirs), "ratio": median(ratios)}
    return {**medians, "interval": median_interval(ratios), "pairs": len(ratios)}


def _peak_bytes(step: Step, device: torch.device) -> int:
    for _ in range(3):  # the first step has no optimizer state yet
        step()
    return peak_bytes(device)


def _peak_of_fresh_process(who: str, mode: str) -> int:
    command = [sys.executable, *sys.argv, "--memory-of", who, "--modes", mode]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def stepper(who: str, given: argparse.Namespace, mode: str) -> Step:
    """Build one training step of a model, on tokens that are the same for both; ``given`` are options of this file."""
    sizes = yaml.safe_load((conf_folder() / "model" / f"{given.model}.yaml").read_text())
    sizes |= {name: yaml.safe_load(value) for name, value in (word.split("=", 1) for word in given.set)}
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(sizes["vocabulary"], (given.batch, given.sequence + 1), generator=generator)
    text = text.to(given.device)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if who == "theirs":
        return _theirs(given, sizes, inputs, targets, mode)
    return _ours(given, inputs, targets, mode)


def _ours(given: argparse.Namespace, inputs: Tensor, targets: Tensor, mode: str) -> Step:
    """What a run of this configuration does in each step, but for its data and its clock."""
    device, sizes = torch.device(given.device), [f"model.{word}" for word in given.set]
    config = read(
        f"model={given.model}", f"model.sequence_length={given.sequence}", *sizes, "parallel=single",
        f"train.global_batch={given.batch}", f"precision={given.precision}", f"compile={mode}",
        f"device={device.type}", "cluster.ranks_per_node=1", "optimizer.lr=1e-4",
    )  # fmt: skip
    training = run_spec.specify(config, None).training
    assert training
    engine = training.engine(Mesh(training.layout.dims, device.type), device)
    engine.module.train()
    update = Update(engine, engine.optimizer(training.optimizer), training.schedule, config.train, device)

    def step() -> Tensor:
        loss = engine.gradients(inputs, targets, update.scale)
        update(0)
        return loss

    return step


def _theirs(given: argparse.Namespace, sizes: dict[str, Any], inputs: Tensor, targets: Tensor, mode: str) -> Step:
    with torch.device(given.device):
        model, loss_of = RIVALS[given.against](sizes)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = loss_of if mode == "false" else torch.compile(loss_of)

    def step() -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=given.precision == "bf16"):
            loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    sys.exit(main())
