"""A training step of our GPT against ``transformers``' GPT2LMHeadModel of the same size.

    python benchmarks/model_speed.py                      # fp32 on a CPU, bf16 on a GPU; eager and compiled
    python benchmarks/model_speed.py --batch 8 --sequence 1024 --steps 50

One step is forward, backward and AdamW. For time the two run by turns in one process, so that whatever
disturbs the machine disturbs both; the figure is the ratio of neighboring steps, with a 95 % interval of
its median. For memory each runs alone in a fresh process: peak resident memory on a CPU, peak allocated
memory on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import yaml
from torch import Tensor

from ptdbench.measure.memory import peak_bytes
from ptdbench.measure.statistics import median_interval
from ptdbench.models.gpt import GPT
from ptdbench.models.materialize import materialize
from ptdbench.setup.compose import conf_folder

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: str
    batch: int
    sequence: int
    steps: int
    warmup: int
    threads: int
    dtype: torch.dtype
    device: torch.device


def main() -> None:
    """Print both figures for both modes, or be the fresh process that measures the memory of one model."""
    options, memory_of, compiled = _parse()
    torch.set_num_threads(options.threads)
    if memory_of:
        print(_peak_bytes(_stepper(memory_of, options, compiled), options))
        return
    print(
        f"{options.model}, batch {options.batch} x {options.sequence} tokens, {options.dtype}, "
        f"{options.device}, {options.threads} threads"
    )
    for compiled in (False, True):
        mode = "compiled" if compiled else "eager"
        print(f"{mode + ':':<9}", _time_line(options, compiled), flush=True)
        print(f"{'':<9}", _memory_line(options, compiled), flush=True)


def _time_line(options: Options, compiled: bool) -> str:
    ours, theirs = (_stepper(who, options, compiled) for who in ("ours", "theirs"))
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
    return (
        f"step     ours {mine:.4f} s, transformers {other:.4f} s; ours/theirs "
        f"{statistics.median(ratios):.3f} (95 % interval {_interval(ratios)}, {len(pairs)} pairs)"
    )


def _interval(ratios: list[float]) -> str:
    interval = median_interval(ratios)
    return "unknown: too few pairs" if interval is None else "{:.3f} to {:.3f}".format(*interval)


def _memory_line(options: Options, compiled: bool) -> str:
    mine, other = (_peak_of_fresh_process(who, compiled) for who in ("ours", "theirs"))
    kind = "allocated" if options.device.type == "cuda" else "resident"
    return (
        f"peak     ours {mine / 2**20:.0f} MiB, transformers {other / 2**20:.0f} MiB {kind}; "
        f"ours/theirs {mine / other:.3f}"
    )


def _seconds(step: Step, options: Options) -> float:
    start = time.perf_counter()
    step()
    if options.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _stepper(who: str, options: Options, compiled: bool) -> Step:
    """One training step of a model, on tokens that are the same for both."""
    sizes = yaml.safe_load((conf_folder() / "model" / f"{options.model}.yaml").read_text())
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(sizes["vocabulary"], (options.batch, options.sequence + 1), generator=generator)
    text = text.to(options.device)
    model, loss_of = (_ours if who == "ours" else _theirs)(sizes, text, options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(loss_of) if compiled else loss_of

    def step() -> Tensor:
        mixed = options.dtype != torch.float32
        with torch.autocast(options.device.type, dtype=options.dtype, enabled=mixed):
            loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _ours(sizes: dict, text: Tensor, device: torch.device) -> tuple[torch.nn.Module, Step]:
    shape = {key: value for key, value in sizes.items() if key not in ("name", "_target_")}
    with torch.device("meta"):
        model = GPT(**shape)
    materialize(model, model, device=device, seed=0)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return model, lambda: model(inputs, targets)


def _theirs(sizes: dict, text: Tensor, device: torch.device) -> tuple[torch.nn.Module, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes["vocabulary"],
        n_positions=sizes["sequence_length"],
        n_embd=sizes["width"],
        n_layer=sizes["layers"],
        n_head=sizes["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    model: torch.nn.Module = GPT2LMHeadModel(config)
    model.to(device).train()
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return model, lambda: model(input_ids=inputs, labels=inputs, shift_labels=targets).loss


def _peak_bytes(step: Step, options: Options) -> int:
    for _ in range(3):  # the first step has no optimizer state yet
        step()
    return peak_bytes(options.device)


def _peak_of_fresh_process(who: str, compiled: bool) -> int:
    command = [sys.executable, *sys.argv, "--memory-of", who, *(["--compiled"] if compiled else [])]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _parse() -> tuple[Options, str | None, bool]:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt_small", help="a GPT of conf/model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8 if on_gpu else 2, help="sequences (default: %(default)s)")
    parser.add_argument(
        "--sequence", type=int, default=1024 if on_gpu else 256, help="tokens each (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=100 if on_gpu else 15, help="pairs (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=10 if on_gpu else 2, help="steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16" if on_gpu else "float32",
        help="bfloat16 runs under autocast (default: %(default)s)",
    )
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="default: %(default)s")
    parser.add_argument("--memory-of", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    values = vars(parser.parse_args())
    memory_of, compiled = values.pop("memory_of"), values.pop("compiled")
    values |= {"dtype": getattr(torch, values["dtype"]), "device": torch.device(values["device"])}
    return Options(**values), memory_of, compiled


if __name__ == "__main__":
    main()
