"""What each rank of a step sends, on virtual GPUs with NCCL and on CPUs with gloo: prints it as JSON.

An argument is a number of ranks and the options of a layout, as one word.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rank import on_ranks
from benchmarks.script import read
from ptdbench.job import Job
from ptdbench.launch import peers
from ptdbench.profiling import events, trace
from ptdbench.training import profile, traces
from ptdbench.workloads.train import assemble

SMALL = (
    "model=llama_tiny", "model.layers=2", "model.width=64", "model.heads=4", "model.key_value_heads=4",
    "model.hidden=128", "model.sequence_length=32", "data=synthetic_tokens", "train.global_batch=12",
)  # fmt: skip

DEVICES = {"virtual": ("virtual=h100",), "gloo": ("device=cpu",)}


def sent(words: str, device: str) -> list[Any]:
    """The messages of each rank in their order: operation, bytes, ranks of the group, and the peer in it."""
    ranks, *layout = words.split()
    run = read(*SMALL, *layout, *DEVICES[device], f"cluster.ranks_per_node={ranks}")
    messages: list[Any] = on_ranks(run, _in_rank)
    return messages


def _in_rank(job: Job) -> list[Any]:
    torch.set_num_threads(1)
    loop = assemble(job)
    loop.rehearse()
    loop.step()  # in which DDP makes its buckets anew
    path = job.directory / f"trace-{job.world.rank}.json"
    profile.run(job, loop, 1).export_chrome_trace(str(path))
    groups = loop.mesh.groups()
    of = {None: None, **{name: dist.get_process_group_ranks(group) for name, group in groups.items()}}
    messages = []
    for call in _calls(path, job):
        name = traces.group_of(call, groups)
        peer = traces.in_pipeline(call, groups[name]).peer if name == "pp" else call.peer
        messages.append((call.operation, call.bytes, of[name], peer))
    return peers.gather(messages)


def _calls(path: Path, job: Job) -> Sequence[events.CommCall]:
    if job.device.type == "cuda":
        every = events.events_of(path)
        launches = events.launches_of(every)
        (step,) = (event for event in every if event.name.startswith(trace.STEP) and event.kind == "user_annotation")
        kernels = [event for event in every if event.kind == "kernel" and events.is_of_nccl(event)]
        launched = [kernel for kernel in kernels if step.start <= launches[kernel.facts["correlation"]] < step.end]
        return events.calls_of_nccl(every, launched)
    recorded = trace.read(path, "cpu")
    return [call for call in recorded.calls if any(begin <= call.start < end for begin, end in recorded.steps)]


if __name__ == "__main__":
    print(json.dumps({words: {device: sent(words, device) for device in DEVICES} for words in sys.argv[1:]}))
