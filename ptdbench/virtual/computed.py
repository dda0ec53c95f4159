"""What virtual GPUs compute: whole numbers, by torch on the host; and a self-test of the kernels that they compute.

A router's choice decides how much memory experts take: which experts a token goes to, how many tokens each gets, in
which order. Nothing computes the scores by which it chooses, so the k largest of a row are the next k columns in turn,
which gives each expert its share. What follows from that, such as counts and orders, is computed by torch on the host,
in the memory of the device, which has addresses of this process. What ``torch.compile`` turns into kernels of its own
is not computed.

``computed.c`` reads the arguments of a few of torch's kernels by layouts that are private to torch. As a program, this
file tests each kind of these on numbers with known results; :class:`ptdbench.virtual.machine.Machine` enables those
that pass.

Like :mod:`ptdbench.virtual.watch` this imports nothing but torch.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

#: Operators that are computed where all tensors that they read are known, and whole numbers or truth values.
_COMPUTED = (
    *("sum.dim_IntList", "cumsum", "max", "bincount", "histc", "sort.stable", "nonzero", "remainder.Scalar"),
    *("scatter.value", "scatter_.value", "scatter.src", "scatter_.src", "scatter_add", "scatter_add_"),
    *("gather", "index.Tensor", "index_select", "cat", "repeat_interleave.Tensor"),
    *("eq.Scalar", "gt.Scalar", "ne.Scalar", "lt.Tensor", "clamp"),
)

#: Likewise those that only write the tensor that they are given first, or as ``out``.
_WRITERS = ("zero_", "fill_.Scalar", "copy_", "arange.start_out")


@cache
def attach() -> Any:
    """Have torch compute whole numbers in this process; returns what overrides its operators, and has to be kept."""
    import torch

    library: Any = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has each of these operators itself
        for name in ("topk", *_COMPUTED, *_WRITERS):
            kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")
            library.impl(name, partial(_run, name, kernel), "CUDA", with_keyset=True)
        grouped = torch.library.get_kernel("aten::_grouped_mm", "CUDA")
        library.impl("_grouped_mm", partial(_run_grouped, grouped), "CUDA", with_keyset=True)
    torch.cuda._lazy_call(ctypes.CDLL(None).ptdbench_virtual_follow_blocks)  # memory used anew has no known values
    return library


def _run_grouped(kernel: Any, keys: Any, left: Any, right: Any, offsets: Any = None, *arguments: Any) -> Any:
    """Run torch's product of groups; its kernel reads their sizes from the device, so the library is told the mean."""
    announce: Any = ctypes.CDLL(None).ptdbench_virtual_grouped
    announce.argtypes = [ctypes.c_double] * 4
    groups = left.shape[0] if offsets is None else offsets.numel()
    is_split = left.dim() == 2, right.dim() == 2  # into groups: rows, columns, or what is summed over
    parts = {(True, False): (groups, 1, 1), (False, True): (1, groups, 1), (True, True): (1, 1, groups)}
    sizes = zip((left.shape[-2], right.shape[-1], left.shape[-1]), parts.get(is_split, (1, 1, 1)), strict=True)
    announce(*(size / part for size, part in sizes), groups)
    try:
        return kernel.call_boxed(keys, left, right, offsets, *arguments)
    finally:
        announce(0, 0, 0, 0)


def _run(name: str, kernel: Any, keys: Any, *arguments: Any, **options: Any) -> Any:
    """Run torch's own kernel, then write what it should have computed into its result."""
    import torch

    if name == "copy_" and not torch.is_tensor(arguments[1]):  # torch passes its own scalars as numbers
        with _uncounted():
            arguments = (arguments[0], torch.tensor(arguments[1]), *arguments[2:])
    result = kernel.call_boxed(keys, *arguments, **options)
    single = torch.is_tensor(result)
    results = [result] if single else [*result]
    with _uncounted():
        if (computed := _compute(name, arguments, options, results)) is None:
            return result
        written = [*map(_write, computed, results)]
    return written[0] if single else type(result)(written)


@contextmanager
def _uncounted() -> Iterator[None]:
    """Exclude from the log's operators what the host computes in place of a device."""
    exclude: Any = ctypes.CDLL(None).ptdbench_virtual_exclude
    exclude(True)
    try:
        yield
    finally:
        exclude(False)


def _compute(name: str, arguments: Any, options: Any, results: Any) -> Any:
    """Return what the results of an operator are, or ``None`` if it cannot be known."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    if name == "topk" and arguments[0].is_floating_point():
        return [results[0], _turns(*arguments[:3])]
    if not all(result.is_cuda and _is_whole(result) for result in results):
        return None
    reads = [*filter(torch.is_tensor, tree_leaves(arguments[1:] if name in _WRITERS else (arguments, options)))]
    are_known = all(map(_is_known, reads))
    if name == "copy_" and not are_known and not _is_whole(reads[0]):
        return [torch.zeros(reads[0].shape).expand(results[0].shape)]  # floats that nobody computed are zeros
    if not are_known or not (name == "copy_" or all(map(_is_whole, reads))):
        return None
    arguments, options = tree_map_only(torch.Tensor, _on_host, (arguments, options))
    if name == "histc":
        arguments = (arguments[0].double(), *arguments[1:])  # a CPU counts no whole numbers
    packet, _, overload = name.partition(".")
    try:
        computed = getattr(getattr(torch.ops.aten, packet), overload or "default")(*arguments, **options)
    except (IndexError, RuntimeError):  # of values that memory has lost since, at which no kernel would stop
        return None
    return [computed] if torch.is_tensor(computed) else computed


def _turns(scores: Any, k: int, dim: int = -1) -> Any:
    """Return for each row along a dimension the indices of the next k of its elements, in turn."""
    import torch

    rows = scores.movedim(dim, -1).shape[:-1]
    columns = scores.shape[dim]
    turns = torch.arange(rows.numel() * k).view(*rows, k) % columns
    return turns.movedim(-1, dim)


def _is_whole(tensor: Any) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _is_known(tensor: Any) -> bool:
    return not tensor.is_cuda or _ask_library("known", tensor)


def _ask_library(question: str, tensor: Any) -> bool:
    """Return whether the values of a tensor are known, or from now on: ``known``, ``know``."""
    ask: Any = getattr(ctypes.CDLL(None), f"ptdbench_virtual_{question}")
    ask.argtypes, ask.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_bool
    return bool(ask(tensor.data_ptr(), _span(tensor)))


def _span(tensor: Any) -> int:
    """Return the bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((1 + sum(steps)) * tensor.element_size())


def _on_host(tensor: Any) -> Any:
    """Return a tensor of the host in the memory of one of a virtual GPU."""
    import torch

    if not tensor.is_cuda or not tensor.numel():
        return tensor.cpu()
    memory = (ctypes.c_char * _span(tensor)).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _write(computed: Any, result: Any) -> Any:
    """Write what was computed on the host into a result; return it, or one of the computed shape."""
    if computed is result:
        return result
    if result.shape != computed.shape:
        result = result.new_empty(computed.shape)
    if result.numel() and _ask_library("know", result):
        _on_host(result).copy_(computed)
    return result


#: Numbers that every dtype can represent, including zero.
_NUMBERS = [3, 0, 1, 2, 7]

#: What torch computes with these numbers, and what this must give.
_Results = Iterator[tuple[Any, object]]


def _dtypes(torch: Any) -> list[Any]:
    return [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def _fill(torch: Any, a: Any) -> _Results:
    yield torch.full((5,), 3, dtype=a.dtype, device="cuda"), [3] * 5
    yield torch.ones(9, dtype=torch.bool, device="cuda"), [True] * 9


def _cast(torch: Any, a: Any) -> _Results:
    if a.dtype == torch.float32:
        yield a.bool(), [True, False, True, True, True]
    for other in _dtypes(torch):
        yield a.to(other), _NUMBERS


def _strided(torch: Any, a: Any) -> _Results:
    yield torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=a.dtype).cuda().t().contiguous(), [[1, 4], [2, 5], [3, 6]]


def _compare(torch: Any, a: Any) -> _Results:
    b = torch.tensor([3, 1, 0, 2, 8], dtype=a.dtype).cuda()
    yield a == b, [True, False, False, True, False]
    yield a != b, [False, True, True, False, True]
    yield a < b, [False, True, False, False, True]
    yield a >= b, [True, False, True, True, False]
    yield a == 2, [False, False, False, True, False]
    yield a > 2, [True, False, False, False, True]


def _add(_: Any, a: Any) -> _Results:
    yield a + a, [6, 0, 2, 4, 14]
    yield a + 2, [5, 2, 3, 4, 9]
    yield a.add(a, alpha=2), [9, 0, 3, 6, 21]


def _sum(torch: Any, a: Any) -> _Results:
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).cuda()
    if a.dtype not in (torch.int32, torch.uint8):
        yield a.sum(dtype=a.dtype), 13
    yield rows.sum(0), [5, 7, 9]
    yield rows.sum(1), [6, 15]


def _all(torch: Any, _: Any) -> _Results:
    some = torch.tensor([True, False, True]).cuda()
    yield some.all(), False
    yield some[::2].all(), True
    yield some.any(), True
    yield some[1:2].any(), False


def _max(_: Any, a: Any) -> _Results:
    yield a.max(), 7
    yield a.min(), 0


def _nonzero(torch: Any, a: Any) -> _Results:
    torch.tensor([5] * 4096, dtype=torch.int32).cuda()  # counts are 0 even in memory that has held something else
    yield a.nonzero(), []


#: The test of each kind in computed.c, for the numbers of a dtype.
CHECKS: dict[str, Callable[[Any, Any], _Results]] = {
    check.__name__.removeprefix("_"): check
    for check in (_fill, _cast, _strided, _compare, _add, _sum, _all, _max, _nonzero)
}


def main() -> None:
    """Print the version of torch, if it starts, and each kind that is computed correctly, until one crashes."""
    import torch

    torch.cuda.init()
    print(torch.__version__, flush=True)
    for kind, check in CHECKS.items():
        if _holds(check):
            print(kind, flush=True)


def _holds(check: Callable[[Any, Any], _Results]) -> bool:
    import torch

    try:  # copies between host and device are exact, and use no kernel
        numbers = (torch.tensor(_NUMBERS, dtype=dtype).cuda() for dtype in _dtypes(torch))
        return all(tensor.cpu().tolist() == expected for a in numbers for tensor, expected in check(torch, a))
    except RuntimeError:
        return False


if __name__ == "__main__":
    main()
