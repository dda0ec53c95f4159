"""What a training step asks of a GPU: kernels, bytes, FLOPs and memory, of ours and of others side by side.

    python benchmarks/virtual_step.py
    python benchmarks/virtual_step.py --model gpt_small --batch 64 --only ours nanogpt --modes eager

Each model takes the steps of ``model_speed.py`` in bf16 on a virtual H100, alone in a fresh process. Kernels and peaks
of memory are exact. The rest is **estimated, not measured**:

- bytes: of the tensors that an operation reads and writes, each once; of a Triton kernel as Inductor counts them. What
  caches save and what a kernel reads twice is not in it.
- FLOPs: of matrix products and attention, by torch's formulas; causal attention in full, as MFU has it.
- roofline: the longer of the time of an operation's bytes and of its FLOPs, added up; see :data:`SHARES`. Nothing
  overlaps, and no kernel is late.
- host: seconds in which this machine launched a step, beside whatever else it does.

A cast is a kernel that only changes a dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.model_speed import stepper
from benchmarks.script import parser_of
from ptdbench.measure import memory
from ptdbench.models import softmax  # noqa: F401 # makes operations of torch's
from ptdbench.profiling import trace
from ptdbench.setup.compose import compose_all
from ptdbench.training import profile
from ptdbench.virtual import library
from ptdbench.virtual.device import Device

#: What of a data sheet's rates is assumed to be reached: 680 of an H100's 989 TFLOP/s in products of this size, half of
#: them in attention, which computes half of its pairs, and 2.75 of its 3.35 TB/s.
SHARES = {"product": 0.687, "attention": 0.5, "memory": 0.82}

#: The GPUs of the roofline; the step is taken on the first.
GPUS = ("h100", "h200", "a100")

#: Steps before the one that is looked at: the first compiles, and has no optimizer state yet.
WARMUP = 3

#: The compile mode of ``model_speed.py``, by what is compiled.
MODES = {"eager": "false", "compiled": "layers"}

_aten = torch.ops.aten

#: Operations that only look up some rows or elements: what they read of their first tensor is as large as the result.
_LOOK_UPS = {_aten.embedding, _aten.gather, _aten.index, _aten.nll_loss_forward, _aten.index_select}

#: Operations that write all of their first tensor without reading it, and those that write some elements of it.
_OVERWRITES = {_aten.copy_, _aten.zero_, _aten.fill_, _aten._foreach_copy_, _aten._foreach_zero_}
_SCATTERS = {_aten.scatter_}

#: FLOPs of an operation by its arguments: torch's formulas, and that of the head's ``total + left.T @ right``.
_FLOPS = {
    **flop_registry,
    torch.ops.ptdbench.add_product_: lambda total, left, right, out_val: 2 * left.numel() * right.shape[1],
}

#: Kernels that change a dtype and do nothing else: of torch, and of Inductor.
_CASTS = re.compile(r"copy_kernel.*LoadWithCast|bfloat16_copy_kernel|float16_copy_kernel|converting_copy|CopyFunctor")
_TRITON_CASTS = re.compile(r"triton_\w+?_fused_(_to_copy_|t_|view_|transpose_)*_to_copy_(t_|view_|transpose_)*\d+$")


class Counted(TorchDispatchMode):
    """Counts what the operations inside of the block ask of a device.

    Attributes:
        operations: Kind, bytes and FLOPs of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, float, float]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it is, whose products are operations too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it, unless it only views its tensors."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        size = traffic(func, args, kwargs, found)
        formula = _FLOPS.get(func.overloadpacket)
        flops = float(formula(*args, **kwargs, out_val=found)) if formula else 0.0
        if size or flops:
            kind = "attention" if "attention" in str(func) else "product" if formula else "memory"
            self.operations.append((kind, size, flops))
        return found

    @contextmanager
    def with_triton(self) -> Iterator[Counted]:
        """Count Inductor's kernels too, which are no operations."""
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        run = CachingAutotuner.run

        def counted(kernel: Any, *arguments: Any, **options: Any) -> Any:
            self.operations.append(("memory", kernel.inductor_meta["kernel_num_gb"] * 1e9, 0.0))
            return run(kernel, *arguments, **options)

        with mock.patch.object(CachingAutotuner, "run", counted), self:
            yield self


def traffic(func: Any, args: Any, kwargs: Mapping[str, Any], found: Any) -> float:
    """Bytes that an operation reads and writes."""
    kind, written = func.overloadpacket, set[int]()
    for argument, value in _named(func, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {id(tensor) for tensor in _tensors(value)}
    inputs = _tensors((args, dict(kwargs)))
    held = {tensor.untyped_storage()._cdata for tensor in inputs}
    made = [tensor for tensor in _tensors(found) if tensor.untyped_storage()._cdata not in held]
    if not (written or made) or str(kind).startswith(("aten.empty", "aten.new_empty")):
        return 0.0
    if kind in _SCATTERS:
        return 3.0 * _bytes(inputs[1])
    is_out = func._overloadname.endswith("out")
    overwritten = written if is_out or kind in _OVERWRITES else set()
    read = [tensor for tensor in inputs if id(tensor) not in overwritten]
    if kind in _LOOK_UPS:
        read = [made[0], *read[1:]]
    rewritten = [tensor for tensor in inputs if id(tensor) in written]
    return float(sum(map(_bytes, (*read, *made, *rewritten))))


def _named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The arguments of an operation by its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]
        elif place < len(args):
            yield argument, args[place]


def _tensors(values: Any) -> list[Tensor]:
    """The tensors in some values, each once."""
    found = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
    return list(found.values())


def _bytes(tensor: Tensor) -> int:
    """Bytes of the different elements of a tensor: one that is expanded is read once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def seconds(operations: list[tuple[str, float, float]], gpu: Device) -> float:
    """The roofline of some operations."""
    peak, bandwidth = gpu.peaks["bf16"], gpu.bandwidth * SHARES["memory"]
    rates = {"product": peak * SHARES["product"], "attention": 2 * peak * SHARES["attention"], "memory": peak}
    return sum(max(size / bandwidth, flops / rates[kind]) for kind, size, flops in operations)


def count(who: str, options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """In a process with a virtual GPU: take steps, and look at memory, operations and kernels of one each.

    ``options`` are those of ``model_speed.py``.
    """
    torch._inductor.config.benchmark_kernel = True  # Inductor writes to a kernel how many bytes it reads and writes
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    step = stepper(who, options, mode)
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    step()
    host = time.perf_counter() - started
    peaks = memory.peak_bytes(options.device), memory.peak_reserved_bytes(options.device)
    with Counted().with_triton() as counted:
        step()
    names = kernels(step, options.device)
    return {
        "kernels": len(names),
        "kinds": Counter(map(profile.kernel_kind, names)),
        "casts": sum(map(is_cast, names)),
        "bytes": sum(size for _, size, _ in counted.operations),
        "flops": sum(flops for *_, flops in counted.operations),
        "allocated": peaks[0],
        "reserved": peaks[1],
        "host": host,
        "roofline": {gpu: seconds(counted.operations, device(gpu)) for gpu in GPUS},
        "names": Counter(names),
    }


def kernels(step: Callable[[], Tensor], on: torch.device) -> list[str]:
    """The names of the kernels of a step."""
    with profile.profiled(on) as taken, record_function(f"{trace.STEP}0"):
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "trace.json")
        taken.export_chrome_trace(str(path))
        return [event.name for event in trace.launched_in_steps(path)[0]]


def is_cast(kernel: str) -> bool:
    """Whether a kernel only changes a dtype."""
    return bool(_TRITON_CASTS.match(kernel) or _CASTS.search(kernel))


def device(name: str) -> Device:
    """A model of GPU, as ``virtual`` chooses it."""
    found: Device = instantiate(compose_all([f"virtual={name}"]).jobs[0].virtual.gpu)
    return found


def row(label: str, found: Mapping[str, Any]) -> str:
    """A row of the table."""
    figures = (
        label,
        found["kernels"],
        found["casts"],
        f"{found['bytes'] / 1e9:.1f}",
        f"{found['flops'] / 1e12:.1f}",
        *(f"{found[peak] / 2**30:.2f}" for peak in ("allocated", "reserved")),
        f"{found['host'] * 1e3:.0f}",
        *(
            f"{took * 1e3:.1f} ({found['flops'] / took / device(gpu).peaks['bf16']:.0%})"
            for gpu, took in found["roofline"].items()
        ),
    )
    return f"| {' | '.join(map(str, figures))} |"


def main(asked: argparse.Namespace) -> int:
    """Print the table; 1 if a model fails."""
    environment = os.environ | library.environment(device(GPUS[0]), 1) | {"CUDA_VISIBLE_DEVICES": "0"}
    what = f"{asked.model}, {asked.batch} x {asked.sequence} tokens, bf16"
    print(f"{what}, on a virtual H100 with torch {torch.__version__}; estimates, not measurements\n")
    heads = ["step of", "kernels", "casts", "GB", "TFLOP", "allocated GiB", "reserved GiB", "host ms"]
    heads += [f"roofline {gpu.upper()}, ms (MFU)" for gpu in GPUS]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    failed = 0
    for mode in asked.modes:
        for who in asked.only:
            command = [sys.executable, __file__, *sys.argv[1:], "--only", who, "--modes", mode, "--here"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            failed |= done.returncode
            if not done.returncode:
                found = json.loads(done.stdout.splitlines()[-1])
                print(row(f"{who}, {mode}", found), flush=True)
                if asked.names:
                    kinds = ", ".join(f"{number} {kind}" for kind, number in found["kinds"].items())
                    print(f"    {kinds}", *(f"    {n:5} {name}" for name, n in found["names"].items()), sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="gpt_xl", help="a GPT or Llama of conf/model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences (default: %(default)s)")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens each (default: %(default)s)")
    everyone = ["ours", "nanogpt", "transformers"]
    parser.add_argument("--only", nargs="+", choices=everyone, default=everyone, help="default: all")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="default: both")
    parser.add_argument("--names", action="store_true", help="print the kernels of each by kind and by name")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        (who,), (mode,) = asked.only, asked.modes
        how = {"against": who, "precision": "bf16", "device": torch.device("cuda", 0), "set": []}
        print(json.dumps(count(who, argparse.Namespace(**vars(asked), **how), MODES[mode])))
    else:
        sys.exit(main(asked))
