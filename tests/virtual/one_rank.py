"""torch on one virtual GPU: prints answers as JSON."""

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from ptdbench.checkpoints.saver import Saver, Staging
from ptdbench.launch import rendezvous
from ptdbench.measure import memory, operations, timing
from ptdbench.models.experts import Balance, Router, RouterOptions
from ptdbench.parallel import context
from ptdbench.parallel.activations import Offload
from ptdbench.training import evaluation
from tests.virtual.calls import resident

MIB, GIB = 1 << 20, 1 << 30


def device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name, "capability": torch.cuda.get_device_capability(),
        "multiprocessors": properties.multi_processor_count, "memory": properties.total_memory,
        "count": torch.cuda.device_count(),
    }  # fmt: skip


def allocator() -> dict[str, int]:
    """Bytes that torch's allocator counts, and those that the device has left."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.mem_get_info()[0]
    held = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    figures = {"allocated": torch.cuda.memory_allocated(), "taken": start - torch.cuda.mem_get_info()[0]}
    other = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    del held, other
    torch.cuda.empty_cache()
    figures["peak"] = torch.cuda.max_memory_allocated()
    return {**figures, "left": start - torch.cuda.mem_get_info()[0]}


def expandable() -> dict[str, Any]:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    start = torch.cuda.mem_get_info()[0]
    held = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
    expandable = [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]
    sizes = {"segments": sum(expandable), "taken": start - torch.cuda.mem_get_info()[0], "over": bool(out_of_memory())}
    del held
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    return {**sizes, "left": start - torch.cuda.mem_get_info()[0]}


def out_of_memory() -> str:
    try:
        torch.empty(30 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""


def steps() -> dict[str, Any]:
    """Bytes that a step of a small module leaves: parameters, gradients and state; and whether its loss is a number."""
    before = torch.cuda.memory_allocated()
    layer = nn.Linear(512, 1024, bias=False, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = layer(torch.ones(8, 512, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        losses.append(isinstance(loss.item(), float))
        del loss
    torch._C._cuda_clearCublasWorkspaces()
    return {"bytes": torch.cuda.memory_allocated() - before, "losses": losses}


def garbage() -> dict[str, Any]:
    """Decisions by what no kernel has computed: counts are 0, and showing a large tensor costs nothing."""
    before = resident()
    tensor = torch.empty(2 * GIB, device="cuda").normal_()
    shown = repr(tensor)
    return {
        "nonzero": tensor.nonzero().shape[0], "masked": tensor[tensor > 0].numel(),
        "shown": shown.startswith("tensor("), "grown": resident() - before,
    }  # fmt: skip


def profiled() -> dict[str, Any]:
    """What torch's profiler sees of a product, and the operation that it belongs to."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        torch.mm(torch.zeros(64, 128, device="cuda"), torch.zeros(128, 32, device="cuda")).sum().item()
    of_device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    products = [op.name for op in seen.events() for kernel in op.kernels if "gemm" in kernel.name]
    return {"kernels": [event.name for event in of_device], "operations": products}


def products() -> list[str]:
    """The kernels of a product in each way that torch asks cuBLAS for one."""

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    eighth, scale = of(64, 32, dtype=torch.float8_e4m3fn), torch.ones((), device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            torch.mm(of(2, 3, dtype=dtype), of(3, 4, dtype=dtype))
            torch.bmm(of(5, 2, 3, dtype=dtype), of(5, 3, 4, dtype=dtype))
        torch.addmm(of(4, dtype=torch.bfloat16), of(2, 3, dtype=torch.bfloat16), of(3, 4, dtype=torch.bfloat16))
        torch._scaled_mm(eighth, eighth.t(), scale, scale, out_dtype=torch.bfloat16)
    return [event.name for event in seen.events() if "gemm" in event.name]


def graphs() -> dict[str, Any]:
    """Products of three launches of a graph of two; one is on a stream that joins by an event."""
    side, graph, weight = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.zeros(64, 64, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            first = weight @ weight
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                second = first @ first
            torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.is_current_stream_capturing()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    compiled = torch.compile(lambda x: (x @ x).relu(), mode="reduce-overhead")
    shapes = [list(compiled(weight).shape) for _ in range(3)]
    return {
        "captured": captured,
        "products": sum("gemm" in event.name for event in seen.events()),
        "shape": list(second.shape),
        "compiled": shapes,
    }


def decided() -> dict[str, Any]:
    """Decisions by values: those that are known, and those that nobody has computed, which are a healthy program's."""
    freed = [torch.full((256,), -100).cuda() for _ in range(20)]  # as numbers, they are not a number
    mask = torch.tensor([True, True, False]).cuda()
    del freed
    large, few = torch.randn(2000, 2000, device="cuda"), torch.randn(500, device="cuda")
    return {
        "known": [mask.all().item(), mask.any().item(), (~mask.cpu()).cuda().any().item()],
        "loops": [(large > 0).any().item(), (few > 0).any().item(), nn.init.trunc_normal_(large).shape[0]],
        "finite": [tensor.isfinite().all().item() for tensor in (large, few)],
        "infinite": [(tensor.isinf() | tensor.isnan()).float().max().item() for tensor in (large, few)],
    }


def attention() -> dict[str, list[Any]]:
    """The kernel of a ring's blocks, and the shapes of its log-sum-exp and its gradients."""
    blocks: dict[str, list[Any]] = {}
    for dtype, width in ((torch.bfloat16, 64), (torch.bfloat16, 192), (torch.float32, 64)):
        tensors = [torch.empty(1, 2, 128, width, dtype=dtype, device="cuda") for _ in range(4)]
        with torch.no_grad():
            kernel = context.attention_kernel(tensors[0], trains=True)
        name = next(name for name, member in vars(context).items() if member is kernel)
        if width == 192:  # which kernel it is depends on torch
            trained = tensors[0].detach().requires_grad_()
            chosen = torch._fused_sdp_choice(trained, trained, trained, None, 0.0, True)
            name = "as for training" if kernel is context._CHOSEN.get(SDPBackend(chosen)) else name
        out, lse = kernel.forward(*tensors[:3], True)
        gradients = kernel.backward(tensors[3], *tensors[:3], out, lse, True)
        blocks[f"{dtype} {width}"] = [name, list(lse.shape), [list(gradient.shape) for gradient in gradients]]
    return blocks


def staged() -> list[tuple[str, int]]:
    """What a device does for a step and a checkpoint, and in which stream: kernels, and copies to the host."""
    stage = Staging()
    tensors = {name: torch.empty(MIB, device="cuda") for name in ("statistics", "weight")}
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        torch.mm(torch.empty(64, 64, device="cuda"), torch.empty(64, 64, device="cuda"))
        stage(tensors, {"weight"})()
    stage.close()
    events = seen.profiler.kineto_results.events()
    of_device = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    in_order = sorted(of_device, key=lambda event: event.start_ns())
    return [(event.name()[:6], event.device_resource_id()) for event in in_order]


def pinned() -> list[int]:
    """Bytes of the host that torch takes for a pinned tensor of 3 MiB, and keeps after it and after a release."""

    def taken() -> int:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    memory.release(torch.device("cuda"))
    held = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    bytes_taken = [taken()]
    del held
    bytes_taken.append(taken())
    memory.release(torch.device("cuda"))
    return [*bytes_taken, taken()]


def offloaded() -> list[tuple[str, int]]:
    """Products and copies of a step whose layers keep what they save on the host, each with its stream."""
    layers = [nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    out = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    Offload()(layers)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for layer in layers:
            out = layer(out)
        out.sum().backward()
    every = seen.profiler.kineto_results.events()
    events = [event for event in every if "gemm" in event.name() or "Memcpy" in event.name()]
    of_device = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    return [(event.name()[:11], event.device_resource_id()) for event in of_device]


def uncompared() -> None:
    return operations.compare(torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"), "message", 0)


def counted() -> list[int]:
    """Steps that a clock takes for finished, without a question to CUDA."""
    steps, counts = timing.clock_for(torch.device("cuda")), []
    for _ in range(3):
        steps.start()
        torch.ones(100, device="cuda").sum()
        steps.stop()
    torch.cuda.synchronize()
    query, torch.cuda.Event.query = torch.cuda.Event.query, None
    counts.append(steps.finished())
    steps.forget()
    counts.append(steps.finished())
    torch.cuda.Event.query = query
    return counts


def routed() -> list[str]:
    """The ways of choosing experts for which the host does not wait: torch's guard raises where it would."""
    balances = []
    for balance in get_args(Balance):
        with torch.device("cuda"):
            router, tokens = Router(64, 4, 2, None, RouterOptions(balance)), torch.ones(2, 8, 64)
        torch.cuda.set_sync_debug_mode("error")
        with suppress(RuntimeError):
            router(tokens)[0].sum().backward()
            balances.append(balance)
        torch.cuda.set_sync_debug_mode("default")
    return balances


def grouped() -> dict[str, Any]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    results = {"saving": saving(), "patience": patience(), "buffers": buffers()}
    dist.destroy_process_group()
    return results


def saving() -> int:
    """The device of the thread that saves, where the rank has the second one."""
    devices = []
    with TemporaryDirectory() as folder, torch.cuda.device(1):
        saver = Saver(Path(folder), keep=1)
        saver._begin(lambda: devices.append(torch.cuda.current_device()))
        saver.close()
    return devices[0]


def buffers() -> int:
    """Buffers that can be sent, one of them of a type that NCCL refuses, and one of columns."""
    module = nn.Module()
    module.register_buffer("unsigned", torch.zeros(3, dtype=torch.uint32, device="cuda"))
    module.register_buffer("columns", torch.zeros(2, 3, device="cuda").t())
    evaluation.broadcast_buffers(module, dist.distributed_c10d._get_default_group())
    return len([*module.buffers()])


def patience() -> list[float]:
    """Minutes that a group waits: one of a mesh as torch makes it, the default one and that of the mesh afterwards."""
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("one", "other"))["one"].get_group()

    def minutes(group: dist.ProcessGroup | None) -> float:
        chosen = group or dist.distributed_c10d._get_default_group()
        return chosen._get_backend(torch.device("cuda")).options._timeout.total_seconds() / 60  # type: ignore[attr-defined]

    waits = [minutes(mesh)]
    rendezvous.be_patient(rendezvous.patience_for(20))
    return [*waits, minutes(None), minutes(mesh)]


def unanswered() -> str:
    """The error of an operation that nothing answers, a decomposition by cuSOLVER."""
    try:
        torch.linalg.eigh(torch.eye(3, device="cuda"))
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    questions = (
        device, allocator, expandable, out_of_memory, steps, garbage, profiled, products, attention, staged, pinned,
        offloaded, uncompared, counted, routed, grouped, graphs, decided, unanswered,
    )  # fmt: skip
    print(json.dumps({question.__name__: question() for question in questions}))
