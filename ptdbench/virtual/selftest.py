"""Self-test: which kernels the virtual GPU computes correctly for the installed torch.

``computed.c`` reads the arguments of torch's kernels by layouts that are private to torch. This process only tests each
kind of kernel on numbers with known results; :func:`ptdbench.virtual.library.environment` enables those that pass.
"""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

#: Numbers that every dtype can represent, including zero.
_NUMBERS = [3, 0, 1, 2, 7]


def main(kinds: Iterable[str]) -> None:
    """Print, as JSON, which of the kinds are computed correctly."""
    print(json.dumps([kind for kind in kinds if _holds(CHECKS[kind])]))


def _holds(check: Callable[[Any, Any], bool]) -> bool:
    import torch

    try:
        return all(check(torch, dtype) for dtype in _dtypes(torch))
    except RuntimeError:
        return False


def _dtypes(torch: Any) -> list[Any]:
    return [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def _numbers(torch: Any, dtype: Any) -> Any:
    return torch.tensor(_NUMBERS, dtype=dtype).cuda()


def _is(tensor: Any, expected: object) -> bool:
    """Whether a tensor holds the numbers; copies between host and device are exact, and use no kernel."""
    return bool(tensor.cpu().tolist() == expected)


def _fill(torch: Any, dtype: Any) -> bool:
    filled = torch.full((5,), 3, dtype=dtype, device="cuda")
    return _is(filled, [3] * 5) and _is(torch.ones(9, dtype=torch.bool, device="cuda"), [True] * 9)


def _cast(torch: Any, dtype: Any) -> bool:
    a = _numbers(torch, dtype)
    to_bool = dtype != torch.float32 or _is(a.bool(), [True, False, True, True, True])
    return to_bool and all(_is(a.to(other), _NUMBERS) for other in _dtypes(torch))


def _strided(torch: Any, dtype: Any) -> bool:
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype).cuda()
    return _is(rows.t().contiguous(), [[1, 4], [2, 5], [3, 6]])


def _compare(torch: Any, dtype: Any) -> bool:
    a, b = _numbers(torch, dtype), torch.tensor([3, 1, 0, 2, 8], dtype=dtype).cuda()
    return all(
        (
            _is(a == b, [True, False, False, True, False]),
            _is(a != b, [False, True, True, False, True]),
            _is(a < b, [False, True, False, False, True]),
            _is(a >= b, [True, False, True, True, False]),
            _is(a == 2, [False, False, False, True, False]),
            _is(a > 2, [True, False, False, False, True]),
        )
    )


def _add(torch: Any, dtype: Any) -> bool:
    a = _numbers(torch, dtype)
    return _is(a + a, [6, 0, 2, 4, 14]) and _is(a + 2, [5, 2, 3, 4, 9]) and _is(a.add(a, alpha=2), [9, 0, 3, 6, 21])


def _sum(torch: Any, dtype: Any) -> bool:
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).cuda()
    total = dtype in (torch.int32, torch.uint8) or _is(_numbers(torch, dtype).sum(dtype=dtype), 13)
    return total and _is(rows.sum(0), [5, 7, 9]) and _is(rows.sum(1), [6, 15])


def _all(torch: Any, _: Any) -> bool:
    some = torch.tensor([True, False, True]).cuda()
    return all((_is(some.all(), False), _is(some[::2].all(), True), _is(some.any(), True), _is(some[1:2].any(), False)))


def _max(torch: Any, dtype: Any) -> bool:
    a = _numbers(torch, dtype)
    return _is(a.max(), 7) and _is(a.min(), 0)


def _nonzero(torch: Any, dtype: Any) -> bool:
    """Whether counts are 0 regardless of the input, even in memory that held something else."""
    used = torch.tensor([5] * 4096, dtype=torch.int32).cuda()
    del used
    return bool(_numbers(torch, dtype).nonzero().numel() == 0)


#: The test of each kind in computed.c, for a dtype.
CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "fill": _fill,
    "cast": _cast,
    "strided": _strided,
    "compare": _compare,
    "add": _add,
    "sum": _sum,
    "all": _all,
    "max": _max,
    "nonzero": _nonzero,
}

if __name__ == "__main__":
    main(sys.argv[1:])
