"""A GPT's MLP on a virtual GPU, compiled: prints the names of the kernels of its passes, as JSON."""

import json

import torch
from torch.profiler import ProfilerActivity, profile

from ptdbench.kernels.copies import Copies
from ptdbench.kernels.wide_gradients import enable_wide_gradients
from ptdbench.models.gpt import MLP

#: Of as many tokens Inductor sums gradients in a kernel of its own, if all at once.
SEQUENCES, TOKENS, WIDTH = 16, 1024, 2048

if __name__ == "__main__":
    mlp = MLP(WIDTH).cuda()
    enable_wide_gradients(mlp)
    mlp.forward = torch.compile(mlp.forward, fullgraph=True)  # type: ignore[method-assign]
    Copies(mlp, [], torch.bfloat16)
    x = torch.zeros(SEQUENCES, TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    mlp(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        mlp(x).sum().backward()
    names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    print(json.dumps({"kernels": names}))
