"""Measure what a GPU reaches, as costs of predicted times: ``ptdbench plan ... virtual.gpu.costs=FILE``.

    make gpu-calibrate ARGS="--file h100.json"

Products, attention, ten families of kernels that memory limits, copies and launches: each shape without a pause for
0.3 s, so that a GPU at its power limit clocks down as in training. The file has rates by sizes, with watts and MHz. It
can be sent, and is refused for other devices. It takes two minutes, and has not yet run on a GPU.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.script import options
from ptdbench.measure import hardware, node_state
from ptdbench.measure.products import DTYPES
from ptdbench.prediction.costs import KERNEL, OPERATOR, memory_share

#: What is measured: sides and depths of products, lengths of samples, and bytes of tensors.
SIDES, DEPTHS = (2048, 4096, 16384), (256, 1024, 4096, 16384)
LENGTHS, BYTES = tuple(2**power for power in range(10, 16)), (2**26, 2**28, 2**30)

#: Products of fewer FLOPs end before the host has launched the next one.
LEAST = 2**32

HEADS, HEAD, WIDTH = 16, 128, 4096


class Work(NamedTuple):
    """What is repeated."""

    kind: str
    name: str  #: These two as in :class:`ptdbench.prediction.costs.Measured`.
    sizes: Sequence[int]
    amount: float  #: FLOPs, bytes, or launches.
    call: Callable[[], object]


def products(device: torch.device, sides: Sequence[int], depths: Sequence[int], least: int = LEAST) -> Iterator[Work]:
    """Yield products of two random matrices; with zeros a GPU draws less power."""
    for (name, dtype), m, n, k in product(DTYPES.items(), sides, sides, depths):
        if (flops := 2 * m * n * k) >= least:
            a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((n, k), (k, m)))
            yield Work("products", name, (m, n, k), flops, partial(torch.mm, a, b))


def attention(device: torch.device, lengths: Sequence[int]) -> Iterator[Work]:
    """Yield causal attention of one sample, forward and backward."""
    for length in lengths:
        shape = 3, 1, HEADS, length, HEAD
        q, k, v = parts = [part.requires_grad_() for part in torch.randn(shape, device=device, dtype=torch.bfloat16)]
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        flops, out = HEADS * length**2 * HEAD, forward()
        backward = partial(torch.autograd.grad, out, parts, torch.randn_like(out), retain_graph=True)
        yield Work("attention", "forward", (length,), 2 * flops, forward)
        yield Work("attention", "backward", (length,), 5 * flops, backward)


def memory(device: torch.device, sizes: Sequence[int]) -> Iterator[Work]:
    """Yield kernels of ten families, by a name of each, with the tensors of one size that each reads and writes."""
    compiled = partial(torch.compile, disable=device.type == "cpu")
    gated, normed = compiled(lambda x, y: F.silu(x) * y), compiled(lambda x, y: F.rms_norm(x + y, (WIDTH,)))
    for size in sizes:
        x, y, out = (torch.randn(size // 2 // WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(3))
        ones, rows = torch.ones(WIDTH, device=device, dtype=x.dtype), torch.randperm(len(x), device=device)
        _, mean, scale = torch.native_layer_norm(x, (WIDTH,), ones, None, 1e-5)
        weight = torch.randn(size // 4, device=device).requires_grad_()
        weight.grad = torch.randn_like(weight)
        of_norm = y, x, [WIDTH], mean, scale, ones, None, [True, False, False]
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "vectorized_elementwise_kernel": (3, partial(torch.mul, x, y, out=out)),
            "layer_norm_kernel": (2, partial(F.layer_norm, x, (WIDTH,), ones)),
            "layer_norm_grad_input_kernel": (3, partial(torch.ops.aten.native_layer_norm_backward, *of_norm)),
            "triton_poi_": (3, partial(gated, x, y)),
            "triton_red_": (3, partial(normed, x, y)),
            "multi_tensor_apply_kernel": (7, torch.optim.AdamW([weight], fused=True).step),
            "CatArrayBatchedCopy": (4, partial(torch.cat, [x, y], out=x.new_empty(2 * len(x), WIDTH))),
            "direct_copy_kernel": (3, partial(torch.empty_like(x, dtype=torch.float32).copy_, x)),
            "reduce_kernel": (1, partial(torch.sum, x, 1)),
            "index_select": (2, partial(torch.index_select, x, 0, rows, out=out)),
        }
        for name, (times, call) in calls.items():
            yield Work("memory", memory_share(name)[2], (times * size,), times * size, call)


def copies(device: torch.device, sizes: Sequence[int]) -> Iterator[Work]:
    """Yield copies, and launches of a small kernel."""
    for size in sizes:
        host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        for name, to, of in (("HtoD", here, host), ("DtoH", host, here), ("DtoD", there, here)):
            yield Work("copies", name, (size,), size, partial(to.copy_, of, non_blocking=True))
    yield Work("launches", "", (), 1, partial(torch.ones(1, device=device).add_, 1))


def measured(work: Work, device: torch.device, seconds: float) -> dict[str, Any]:
    """Return a row of the file: what a device reaches when it repeats some work for so many seconds."""
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    taken, count = 0.0, 3
    with hardware.tf32_allowed(work.name == "tf32"):
        for _ in range(3):  # the first compiles, the second says how often it fits into the third
            settle()
            started = time.perf_counter()
            for _ in range(count):
                work.call()
            state = _state(device)
            settle()
            taken = (time.perf_counter() - started) / count
            count = max(3, int(seconds / taken))
    fixed = OPERATOR if work.kind == "launches" else KERNEL
    rate = work.amount / max(taken - fixed, taken / 2)
    return {"kind": work.kind, "name": work.name, "sizes": [*work.sizes], "rate": rate, "seconds": taken, **state}


def _state(device: torch.device) -> dict[str, float | None]:
    """Return watts and MHz of a GPU at work."""
    nvml, _ = node_state.connect_nvml() if device.type == "cuda" else (None, None)
    handle = node_state.ask_nvml(nvml, "nvmlDeviceGetHandleByUUID", node_state.gpu_identity(device)) if nvml else None
    power = node_state.ask_nvml(nvml, "nvmlDeviceGetPowerUsage", handle)
    return {"watts": power and power / 1e3, "MHz": node_state.ask_nvml(nvml, "nvmlDeviceGetClockInfo", handle, 1)}


def main() -> int:
    """Measure all, and write the file; return 2 without a GPU."""
    args = options(__doc__, file=("gpu-costs.json", "the file to write"), seconds=(0.3, "seconds a shape"))
    if not torch.cuda.is_available():
        print(f"gpu-calibrate needs a GPU, and torch {torch.__version__} finds none on this machine", file=sys.stderr)
        return 2
    device, started = torch.device("cuda", 0), time.monotonic()
    of = products(device, SIDES, DEPTHS), attention(device, LENGTHS), memory(device, BYTES), copies(device, BYTES)
    rows = [measured(work, device, args.seconds) for work in chain(*of)]
    facts = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    Path(args.file).write_text(json.dumps({**facts, "rows": rows}, indent=1))
    print(f"{args.file}: {len(rows)} rates of {facts['device']} in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
