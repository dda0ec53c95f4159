"""torch's unchanged build for CUDA on one virtual GPU."""

from typing import Any

import pytest

from tests.virtual.conftest import DEVICE, GIB, Start

MIB = 1 << 20


@pytest.fixture(scope="module")
def answers(start: Start) -> dict[str, Any]:
    return start("one_rank")


#: Columns come first in cuBLAS: m and n are those of the result, in reverse.
PRODUCTS = [f"virtual_gemm_{dtype} m4 n2 k3 b{batch}" for dtype in ("f32", "f64", "bf16", "f16") for batch in (1, 5)]


@pytest.mark.parametrize(("question", "expected"), [
    (
        "device",
        {
            "name": f"virtual {DEVICE.name}", "capability": [9, 0], "multiprocessors": DEVICE.multiprocessors,
            "memory": DEVICE.memory, "count": 2,
        },
    ),
    ("allocator", {"allocated": 100 * MIB, "taken": 100 * MIB, "peak": 150 * MIB, "left": 0}),
    # Three tensors of 30 MiB in one segment, which grows by pages of 20 MiB.
    ("expandable", {"segments": 1, "taken": 100 * MIB, "left": 0, "over": True}),
    ("products", [*PRODUCTS, "virtual_gemm_bf16 m4 n2 k3 b1", "virtual_gemm_f8 m64 n64 k32 b1"]),
    # A ring attends by the kernel that torch chooses on this GPU; some lack a backward pass for wide heads.
    ("attention", {
        f"torch.{dtype} {width}": [kernel, [1, 2, 128], [[1, 2, 128, width]] * 3]
        for dtype, width, kernel in (
            ("bfloat16", 64, "CUDNN"), ("bfloat16", 192, "as for training"), ("float32", 64, "EFFICIENT")
        )
    }),
    ("pinned", [4 * MIB, 4 * MIB, 0]),
    ("graphs", {"captured": False, "products": 6, "shape": [64, 64], "compiled": [[64, 64]] * 3}),
    ("decided", {
        "known": [False, True, True], "loops": [False, False, 2000], "finite": [True, True], "infinite": [0, 0],
    }),
    # Messages are not verified: the pattern that they are held against is computed by kernels.
    ("uncompared", None),
    ("counted", [3, 0]),  # steps, without a question to the device
    ("routed", ["none", "loss", "bias", "forced"]),  # without waiting for the device
    # Three times 20 minutes for a first step, and half an hour: torch gives groups of a mesh 10 minutes.
    ("grouped", {"saving": 1, "patience": [10, 90, 90], "buffers": 2}),
])  # fmt: skip
def test_torch_sees_the_devices_properties(answers, question, expected):
    assert answers[question] == expected


def test_memory_ends_with_torchs_own_error_and_a_step_leaves_its_state(answers):
    assert "Tried to allocate 30.00 GiB. GPU 0 has a total capacity of 20.00 GiB" in answers["out_of_memory"]
    weights = 512 * 1024 * 4
    counters = 512  # AdamW's count of steps, in the smallest block
    assert answers["steps"]["bytes"] == 4 * weights + counters
    assert answers["steps"]["losses"] == [True, True]


def test_uncomputed_values_decide_nothing_and_unimplemented_operations_are_named(answers):
    garbage = answers["garbage"]
    assert (garbage["nonzero"], garbage["masked"], garbage["shown"]) == (0, 0, True)
    assert garbage["grown"] < GIB, "of a tensor of 8 GiB"
    assert "cusolver" in answers["unanswered"]
    lines = [line for line in answers["errors"].splitlines() if "nothing answers" in line]
    assert lines
    assert all(line.startswith("virtual GPU: nothing answers cusolverDnCreate") for line in lines)


def test_profiler_sees_kernels_and_their_operations(answers):
    kernels = answers["profiled"]["kernels"]
    assert any("gemm" in name and "m32 n64 k128" in name for name in kernels), "cuBLAS counts columns first"
    assert any("reduce_kernel" in name for name in kernels)
    assert any(name.startswith("Memcpy DtoH") for name in kernels)
    assert answers["profiled"]["operations"] == ["aten::mm"]


def test_copies_of_checkpoints_and_layers_overlap_the_work(answers):
    (product, of_steps), *copies = answers["staged"]
    assert [product.startswith("Memcpy"), *(name for name, _ in copies)] == [False, "Memcpy", "Memcpy"]
    assert [stream == of_steps for _, stream in copies] == [True, False]
    streams = dict(answers["offloaded"])
    assert {*streams} == {"virtual_gem", "Memcpy DtoH", "Memcpy HtoD"}
    assert streams["virtual_gem"] not in (streams["Memcpy DtoH"], streams["Memcpy HtoD"])
