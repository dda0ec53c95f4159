"""A training step of ptdbench's models against the same step of the models of ``transformers``.

    make model-speed                                      # fp32 on a CPU, bf16 on a GPU; eager and compiled
    make model-speed ARGS="--model gpt_xl --batch 8 --sequence 1024 --steps 50"

One step is forward, backward and AdamW. Ours is a run's; theirs has SDPA, autocast in bf16, ``torch.compile`` of the
whole model and torch's fused AdamW. The two alternate; the peak memory is that of a fresh process for each, resident
on a CPU, allocated on a GPU. Good is a ratio below 1.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from benchmarks.ratio import by_turns
from benchmarks.script import keep, options, read
from ptdbench.measure.memory import peak_bytes, release
from ptdbench.measure.timing import median_interval
from ptdbench.parallel.mesh import Mesh
from ptdbench.setup import run_spec
from ptdbench.setup.compose import conf_folder
from ptdbench.training.loop import Update

Step = Callable[[], Tensor]

#: Our sizes, by their names in ``transformers``; GPT-2 has aliases for these.
_COMMON = {
    "vocabulary": "vocab_size", "sequence_length": "max_position_embeddings", "width": "hidden_size",
    "layers": "num_hidden_layers", "heads": "num_attention_heads",
}  # fmt: skip
_LLAMA = {"hidden": "intermediate_size", "key_value_heads": "num_key_value_heads", "tie_weights": "tie_word_embeddings"}
_MIXTRAL = {
    "expert_hidden": "intermediate_size", "key_value_heads": "num_key_value_heads", "experts": "num_local_experts",
    "active": "num_experts_per_tok", "norm_epsilon": "rms_norm_eps",
}  # fmt: skip


def main() -> int:
    """Print time and memory of each mode, or, in a fresh process, the peak memory of one model."""
    on_gpu = torch.cuda.is_available()
    args = options(
        __doc__,
        model=("gpt_small", "of conf/model"),
        set=((), "NAME=VALUE: other sizes of the model"),
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
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a mesh needs one
    if args.memory_of:
        step = stepper(args.memory_of, args, args.modes[0])
        for _ in range(3):  # the first step has no optimizer state yet
            step()
        print(peak_bytes(torch.device(args.device)))
        return 0
    run = f"{args.model}, batch {args.batch} x {args.sequence} tokens, {args.precision}, {args.device}"
    print(f"{run}, {args.threads} threads", file=sys.stderr if args.json else sys.stdout)
    figures = {}
    for mode in args.modes:
        # Memory first: a fresh process needs all of a GPU that two models in this one would have taken.
        ours, theirs = (_peak_of_fresh_process(side, mode) for side in ("ours", "theirs"))
        figures[mode] = {"our_peak": ours, "their_peak": theirs} | _times(args, mode)
        release(torch.device(args.device))
        if not args.json:
            print(_shown(mode, figures[mode]), flush=True)
    if args.json:
        print(json.dumps(figures))
    ratios = ", ".join(f"{mode} {of_mode['ratio']:.3f}" for mode, of_mode in figures.items())
    keep(f"{args.model} transformers", ratios)
    return 0


def _shown(mode: str, figures: dict[str, Any]) -> str:
    interval = "{:.3f} to {:.3f}".format(*figures["interval"]) if figures["interval"] else "unknown: too few pairs"
    return (
        f"{f'compile={mode}':<17} step     ours {figures['ours']:.4f} s, transformers {figures['theirs']:.4f} s; "
        f"ours/theirs {figures['ratio']:.3f} (95 % interval {interval}, {figures['pairs']} pairs)\n"
        f"{'':<17} peak     ours {figures['our_peak'] / 2**20:.0f} MiB, transformers "
        f"{figures['their_peak'] / 2**20:.0f} MiB; ours/theirs {figures['our_peak'] / figures['their_peak']:.3f}"
    )


def _times(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    steps = {side: stepper(side, args, mode) for side in ("ours", "theirs")}
    turns = by_turns(steps, args.warmup + args.steps, torch.device(args.device))
    ours, theirs = ([seconds for seconds, _ in of_side[args.warmup :]] for of_side in turns.values())
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    medians = {"ours": median(ours), "theirs": median(theirs), "ratio": median(ratios)}
    return {**medians, "interval": median_interval(ratios), "pairs": len(ratios)}


def _peak_of_fresh_process(side: str, mode: str) -> int:
    command = [sys.executable, "-m", "benchmarks", "model-speed", *sys.argv[1:], "--memory-of", side, "--modes", mode]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def stepper(side: str, args: argparse.Namespace, mode: str) -> Step:
    """Build the training step of one side, on the same tokens for both; ``args`` are this file's options."""
    sizes = yaml.safe_load((conf_folder() / "model" / f"{args.model}.yaml").read_text())
    sizes |= {name: yaml.safe_load(value) for name, value in (word.split("=", 1) for word in args.set)}
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(sizes["vocabulary"], (args.batch, args.sequence + 1), generator=generator)
    text = text.to(args.device)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if side == "theirs":
        return _theirs(args, sizes, inputs, targets, mode)
    return _ours(args, inputs, targets, mode)


def _ours(args: argparse.Namespace, inputs: Tensor, targets: Tensor, mode: str) -> Step:
    """Build the step of a run of this configuration, without its data and its clock."""
    device, sizes = torch.device(args.device), [f"model.{word}" for word in args.set]
    config = read(
        f"model={args.model}", f"model.sequence_length={args.sequence}", *sizes, "parallel=single",
        f"train.global_batch={args.batch}", f"precision={args.precision}", f"compile={mode}",
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


def _theirs(args: argparse.Namespace, sizes: dict[str, Any], inputs: Tensor, targets: Tensor, mode: str) -> Step:
    with torch.device(args.device):
        model = of_transformers(sizes)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = model if mode == "false" else torch.compile(model)

    def step() -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss: Tensor = forward(input_ids=inputs, labels=inputs, shift_labels=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def of_transformers(sizes: dict[str, Any]) -> nn.Module:
    """Build Mixtral for sizes with experts, Llama for those with key-value heads, else GPT-2; without dropout."""
    import transformers

    kind: Any = transformers.GPT2LMHeadModel
    names, dropout = _COMMON, dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    if "experts" in sizes:
        kind, names, dropout = transformers.MixtralForCausalLM, _COMMON | _MIXTRAL, {}
    elif "key_value_heads" in sizes:
        kind, names, dropout = transformers.LlamaForCausalLM, _COMMON | _LLAMA, {}
    config = kind.config_class(**{theirs: sizes[ours] for ours, theirs in names.items()}, **dropout, use_cache=False)
    config._attn_implementation = "sdpa"
    model: nn.Module = kind(config)
    return model
