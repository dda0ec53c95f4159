"""Logs calls of each family of kernels, and layers beside torch's operators, on one virtual GPU: prints bytes as JSON.

A layer has, for each family, the bytes of its kernels and those of the inputs and outputs of its operators.
"""

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptdbench.models.decoder import Block
from ptdbench.models.gpt import MLP, MultiHeadAttention
from ptdbench.models.llama import GroupedAttention, Rotary, SwiGLU
from ptdbench.prediction.log import Flag, Log, read

_LIBRARY: Any = ctypes.CDLL(None)

#: Operators that only view their tensors, or allocate one.
VIEWS = (
    *("view", "reshape", "t.", "transpose", "permute", "expand", "slice.", "select.", "unsqueeze", "squeeze", "detach"),
    *("alias", "as_strided", "split", "_unsafe_view", "unbind", "empty", "new_empty", "chunk"),
)

#: Families by parts of the names of kernels and operators, the first that matches.
FAMILIES = {
    "product": ("gemm", "mm."),
    "attention": ("attention",),
    "norm backward": ("layer_norm_grad", "GammaBeta", "layer_norm_backward", "rms_norm_backward"),
    "norm": ("layer_norm", "rms_norm"),
    "reduction": ("reduce_kernel", "sum."),
    "concatenation": ("CatArray", "cat.", "stack."),
    "pointwise": (),
}


def family(name: str) -> str:
    return next(family for family, parts in FAMILIES.items() if not parts or any(part in name for part in parts))


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def backward_of(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """What computes the gradients of the function's inputs."""
    out = function(*(tensor.requires_grad_() for tensor in inputs))
    gradient = torch.empty_like(out)
    return partial(torch.autograd.grad, out, inputs, gradient)


def calls() -> dict[str, Callable[[], object]]:
    """One call of each family, whose bytes the test works out by hand."""
    x, wide, tokens = empty(64, 512), empty(64, 512, dtype=torch.float32), empty(64, dtype=torch.int64)
    logits = empty(64, 3000, dtype=torch.float32)
    lists = [[empty(1000, 70) for _ in range(3)] for _ in range(4)]
    steps = [torch.ones((), device="cuda") for _ in range(3)]
    q, k = empty(2, 8, 256, 64), empty(2, 2, 256, 64)
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    halves = [empty(64, 256), empty(64, 256)]
    return {
        "add": lambda: x + x,
        "add two types": lambda: x + wide,
        "add a column": lambda: x + x[:, :1],
        "scale": lambda: x * 2,
        "compare": lambda: x == halves[0][:, :1],
        "where": lambda: torch.where(wide > 0, wide, wide),
        "power": lambda: torch.pow(empty(dtype=torch.float64), wide),
        "transpose": lambda: x.t().contiguous(),
        "narrow": wide.bfloat16,
        "widen": x.float,
        "widen columns": x[:, ::2].float,
        "multiply complex": lambda: empty(64, 512, dtype=torch.complex64).mul(empty(1, 512, dtype=torch.complex64)),
        "sum of rows": lambda: x.sum(0),
        "mean": lambda: wide.mean(-1),
        "norm": lambda: F.layer_norm(x, (512,), x[0], x[0]),
        "norm backward": backward_of(lambda y: F.layer_norm(y, (512,)), empty(64, 512)),
        "norm and weights backward": backward_of(lambda y, w: F.rms_norm(y, (512,), w), empty(64, 512), empty(512)),
        "softmax": lambda: logits.softmax(-1),
        "small softmax": lambda: x.softmax(-1),
        "log softmax backward": backward_of(lambda y: F.log_softmax(y, -1), empty(64, 3000)),
        "loss": lambda: F.nll_loss(logits, tokens),
        "concatenate": lambda: torch.cat([x, x, x[:, :100]], 1),
        "look up": lambda: F.embedding(tokens, wide),
        "adam": lambda: torch._fused_adamw_(*lists, [], steps, **rates, **flags),
        "scale a list": lambda: torch._foreach_mul_(lists[0], 2.0),
        "norms of a list": lambda: torch._foreach_norm(lists[0]),
        "copy a list": lambda: torch._foreach_copy_(lists[0], [tensor.float() for tensor in lists[1]]),
        "split": lambda: torch.split_with_sizes_copy(x, [256, 256], 1, out=halves),
        "chunks": lambda: torch._chunk_cat([x, x], 0, 4, out=empty(4, 16 * 1024, dtype=torch.float32)),
        "product": lambda: torch.mm(x, empty(512, 300)),
        "product in fp32": lambda: torch.mm(x, empty(512, 300), out_dtype=torch.float32),
        "attention": lambda: attend(q, k, k),
        "attention backward": backward_of(lambda q: attend(q, k, k), empty(2, 8, 256, 64)),
        "convolve": lambda: F.conv2d(empty(8, 64, 32, 32), empty(128, 64, 3, 3), padding=1),
        "convolve volumes": lambda: F.conv3d(empty(2, 4, 6, 10, 12), empty(8, 4, 3, 3, 3), padding=1),
        "drop": lambda: F.dropout(x, 0.1),
    }


class Operators(TorchDispatchMode):
    """Bytes of the inputs and outputs of operators, by family; what is changed in place counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if not name.startswith(VIEWS):
            read, written = tensors((args[1:] if name.startswith("copy_") else args, kwargs)), tensors(out)
            if name.startswith(("slice_backward", "select_backward")):  # zeros, and a copy into a part of them
                written[0] = next(iter(read.values()))
            self.bytes[family(name)] += sum(map(size, [*read.values(), *written.values()]))
        return out


def tensors(values: Any) -> dict[int, Tensor]:
    return {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def size(tensor: Tensor) -> int:
    """Bytes of a tensor, whose expanded elements are one."""
    bytes_ = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        bytes_ *= length if stride else 1
    return bytes_


def layers() -> dict[str, Callable[[], object]]:
    """A forward and backward pass of a layer of each family of models."""
    with torch.device("cuda"):
        gpt = Block(MultiHeadAttention(512, 8), MLP(512), partial(nn.LayerNorm, 512)).bfloat16()
        mix = GroupedAttention(512, 8, 2, Rotary(64, 1e4, 1.0))
        llama = Block(mix, SwiGLU(512, 1024), partial(nn.RMSNorm, 512)).bfloat16()

    def step(layer: nn.Module) -> None:
        out = layer(empty(8, 256, 512).requires_grad_())
        torch.autograd.backward(out, torch.empty_like(out))

    return {"gpt": partial(step, gpt), "llama": partial(step, llama)}


def logged(work: dict[str, Callable[[], object]], folder: Path) -> tuple[Log, dict[str, Any]]:
    """Log each piece of work, with a mark before it and after it; and the records of each."""
    _LIBRARY.ptdbench_virtual_log(f"{folder}/0".encode(), b'{"rank": 0}')
    for do in work.values():
        _LIBRARY.ptdbench_virtual_mark(b"step")
        do()
    _LIBRARY.ptdbench_virtual_mark(b"step")
    _LIBRARY.ptdbench_virtual_log(None, None)
    (log,) = read(folder)
    return log, dict(zip(work, log.steps(), strict=True))


def main() -> None:
    answers: dict[str, Any] = {"calls": {}, "layers": {}}
    with TemporaryDirectory() as folder:
        log, of_calls = logged(calls(), Path(folder))
        for name, records in of_calls.items():
            kernels = records[records["kind"] == b"K"]
            answers["calls"][name] = [
                [int(r["bytes"]), int(r["flags"]), r["dims"].tolist(), int(r["layout"])] for r in kernels
            ]
        work = layers()
        for step in work.values():
            step()  # without what it does only once
        log, of_layers = logged(work, Path(folder))
        for name, records in of_layers.items():
            with Operators() as operators:
                work[name]()
            kernels = Counter[str]()
            for record in records:
                kernels[family(log.names[record["name"]])] += int(record["bytes"])
                assert not record["flags"] & Flag.GUESSED, log.names[record["name"]]
            answers["layers"][name] = {of: [kernels[of], operators.bytes[of]] for of in FAMILIES}
    print(json.dumps(answers))


if __name__ == "__main__":
    sys.exit(main())
