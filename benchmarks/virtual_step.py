"""What a training step asks of a GPU: kernels, bytes, FLOPs and memory, of ours and of others side by side.

    make virtual-step ARGS="--model gpt_small --batch 64 --only ours nanogpt --modes false"

Each model takes the steps of ``make model-speed`` in bf16 on a virtual H100, alone in a fresh process. Kernels, casts
(which only change a dtype) and peaks of memory are exact; bytes, FLOPs and the roofline are **estimates**, see the
README; host is the time in which this machine launched a step. Good is fewer bytes than the others.
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
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.model_speed import stepper
from benchmarks.script import keep, options, read
from benchmarks.tables import drawn
from ptdbench.kernels import softmax  # noqa: F401 # makes operations of torch's
from ptdbench.measure import memory
from ptdbench.profiling import trace
from ptdbench.profiling.kernels import kernel_kind
from ptdbench.setup import choices
from ptdbench.training import profile
from ptdbench.virtual.device import Device
from ptdbench.virtual.machine import Machine

#: What of a data sheet's rates is assumed to be reached: 680 of an H100's 989 TFLOP/s in products of this size, half of
#: them in attention, which computes half of its pairs, and 2.75 of its 3.35 TB/s.
SHARES = {"product": 0.687, "attention": 0.5, "memory": 0.82}

#: The GPUs of the roofline; the step is taken on the first.
GPUS = ("h100", "h200", "a100")

#: Steps before the one that is looked at: the first compiles, and has no optimizer state yet.
WARMUP = 3

COLUMNS = (
    "step of", "kernels", "casts", "GB", "TFLOP", "allocated GiB", "reserved GiB", "host ms",
    *(f"roofline {gpu.upper()}, ms (MFU)" for gpu in GPUS),
)  # fmt: skip

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
    """Return the bytes that an operation reads and writes."""
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


def count(given: argparse.Namespace) -> dict[str, Any]:
    """Take steps of one model in a process with a virtual GPU; look at memory, operations and kernels of one each."""
    torch._inductor.config.benchmark_kernel = True  # Inductor writes to a kernel how many bytes it reads and writes
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (rival,), (mode,) = given.only, given.modes
    steps = {"against": rival, "precision": "bf16", "device": "cuda", "set": []}
    step = stepper("ours" if rival == "ours" else "theirs", argparse.Namespace(**vars(given), **steps), mode)
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    step()
    host = time.perf_counter() - started
    on = torch.device("cuda", 0)
    peaks = memory.peak_bytes(on), memory.peak_reserved_bytes(on)
    with Counted().with_triton() as counted:
        step()
    names = kernels(step, on)
    flops = sum(flops for *_, flops in counted.operations)
    rooflines = [(machine(gpu).gpu, seconds(counted.operations, machine(gpu).gpu)) for gpu in GPUS]
    row = [
        f"{rival}, {'eager' if mode == 'false' else 'compiled'}",
        len(names),
        sum(map(is_cast, names)),
        f"{sum(size for _, size, _ in counted.operations) / 1e9:.1f}",
        f"{flops / 1e12:.1f}",
        *(f"{peak / 2**30:.2f}" for peak in peaks),
        f"{host * 1e3:.0f}",
        *(f"{took * 1e3:.1f} ({flops / took / gpu.peaks['bf16']:.0%})" for gpu, took in rooflines),
    ]
    return {"row": row, "kinds": Counter(map(kernel_kind, names)), "names": Counter(names)}


def kernels(step: Callable[[], Tensor], on: torch.device) -> list[str]:
    """Return the names of the kernels of a step."""
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


def machine(name: str) -> Machine:
    """Return a virtual machine with a GPU, as ``virtual`` chooses it."""
    found = choices.virtual(read(f"virtual={name}"))
    assert found
    return found


def main() -> int:
    """Print the table; 1 if a model fails."""
    everyone, modes = ("ours", "nanogpt", "transformers"), ("false", "layers")
    given = options(
        __doc__,
        model=("gpt_xl", "a GPT or Llama of conf/model"),
        batch=(8, "sequences"),
        sequence=(1024, "tokens each"),
        only=(everyone, "whose step", everyone),
        modes=(modes, "of compile, ours", modes),
        names=(False, "print the kernels of each by kind and by name"),
        here=(False, "take the step in this process, and print what came of it as JSON"),
    )
    if given.here:
        print(json.dumps(count(given)))
        return 0
    environment = os.environ | machine(GPUS[0]).environment(1)
    what = f"{given.model}, {given.batch} x {given.sequence} tokens, bf16"
    print(f"{what}, on a virtual H100 with torch {torch.__version__}; estimates, not measurements\n")
    print(drawn(COLUMNS, []), flush=True)
    rows, failed = [], 0
    for mode in given.modes:
        for who in given.only:
            command = [sys.executable, __file__, *sys.argv[1:], "--only", who, "--modes", mode, "--here"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            failed |= done.returncode
            if not done.returncode:
                found = json.loads(done.stdout.splitlines()[-1])
                rows.append([*map(str, found["row"])])
                print(f"| {' | '.join(rows[-1])} |", flush=True)
                if given.names:
                    kinds = ", ".join(f"{number} {kind}" for kind, number in found["kinds"].items())
                    print(f"    {kinds}", *(f"    {n:5} {name}" for name, n in found["names"].items()), sep="\n")
    keep(f"step {given.model}", rows)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
