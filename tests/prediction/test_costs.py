"""Costs, worked out by hand from the tables beside them."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks.script import read
from ptdbench.prediction.costs import KERNEL, Costs, NoCosts, memory_share
from ptdbench.prediction.log import Flag
from ptdbench.setup import choices
from tests.prediction.records import product, record


def costs(name):
    return Costs.of(choices.virtual(read(f"virtual={name}")).gpu)


H200 = costs("h200")


def seconds(of, name="virtual_gemm", on=H200):
    return on.work(of[0], name)[1] - KERNEL


def test_products_reach_a_share_of_the_peak_or_of_the_bandwidth():
    large = 2 * 8192 * 8192 * (2048 + 125) / (0.71 * 989.4e12)
    assert seconds(product(8192, 8192, 2048)) == pytest.approx(large)
    assert seconds(product(8192, 8192, 2048, result="float32")) == pytest.approx(large / 0.93)
    flat = 2 * (8192 * 8 + 8 * 8192 + 8192 * 8192) / (0.85 * 4.8e12)  # limited by its bytes
    assert seconds(product(8192, 8192, 8)) == pytest.approx(flat)
    eighths = product(8192, 8192, 4096, dtype="float8")  # as with half the depth in bf16
    assert seconds(eighths) == pytest.approx(1.16 * large * 2 * 989.4 / 1978.9)
    assert H200.work(eighths[0], "virtual_gemm")[0] == "fp8 products"
    limited = costs("h100_500w")
    assert seconds(product(8192, 8192, 2048), on=limited) == pytest.approx(large * 0.71 / 0.558)


def test_attention_reaches_a_share_by_its_length_pass_and_heads():
    forward = 2 * 2 * 2 * 8 * 4096 * 4096 * 128 / (0.597 * 989.4e12)
    whole = record(dims=(2, 8, 4096, 128, 4096, 8, 2))
    causal = record(dims=(2, 8, 4096, 128, 4096, 8, 2), flags=Flag.CAUSAL)
    backward = record(dims=(2, 8, 4096, 64, 4096, 8, 5))
    name = "virtual_cudnn_attention"
    assert seconds(whole, name) == pytest.approx(forward)
    assert seconds(causal, name) == pytest.approx(forward / 2)
    assert seconds(backward, name) == pytest.approx(5 / 2 / 2 * forward * 0.597 / 0.479 / 0.75)
    between = record(dims=(2, 8, 4096, 128, round(4096 * math.sqrt(2)), 8, 2))
    assert seconds(between, name) == pytest.approx(math.sqrt(2) * forward * 0.597 / 0.624, rel=1e-4)
    assert seconds(causal, "pytorch_flash::flash_fwd_kernel") == pytest.approx(forward / 2 * 0.597 / 0.35)


def test_convolutions_are_products_or_limited_by_their_bytes():
    inputs, weights, results = 8 * 1024 * 32 * 32, 2048 * 512 * 3 * 3, 8 * 2048 * 16 * 16  # of stride 2, in two groups
    fields = {"dims": (8, 1024, 32, 32, 2048, 512, 3, 3), "bytes": 2 * (inputs + weights + results)}
    of = record(dtype="bfloat16", **fields)
    for name, depth in (("forward", 512 * 9), ("dgrad", 1024 * 9), ("wgrad", 8 * 16 * 16)):
        expected = 2 * results * 512 * 9 * (depth + 125) / depth / (0.71 * 989.4e12)
        assert seconds(of, f"virtual_cudnn_convolution_{name}") == pytest.approx(expected)
    assert H200.work(of[0], "virtual_cudnn_convolution_forward")[0] == "convolutions"
    of_tf32 = record(dtype="tf32", **fields | {"bytes": 4 * (inputs + weights + results)})
    assert seconds(of_tf32, "virtual_cudnn_convolution_forward") == pytest.approx(
        2 * results * 512 * 9 * (512 * 9 + 125) / (512 * 9) / (0.71 * 494.7e12)
    )
    flat = record(dims=(8, 64, 32, 32, 64, 1, 3, 3), bytes=2 * (2 * 8 * 64 * 32 * 32 + 64 * 9), dtype="bfloat16")
    assert seconds(flat, "virtual_cudnn_convolution_forward") == pytest.approx(flat["bytes"][0] / (0.5 * 4.8e12))


def test_other_kernels_and_copies_reach_a_share_of_a_bandwidth():
    of = record(bytes=4800000000)
    assert seconds(of, "vectorized_elementwise_kernel") == pytest.approx(1e-3 / 0.87)
    assert seconds(of, "layer_norm_grad_input_kernel") == pytest.approx(1e-3 / 0.52)
    assert [memory_share(name)[0] for name in ("triton_poi_fused_add_0", "triton_per_fused_0", "what")] == [
        0.87, 0.75, 0.5,
    ]  # fmt: skip
    assert seconds(record("SET", bytes=4800000000), "memset") == pytest.approx(1e-3 / 0.85)
    assert seconds(record("COPY", bytes=2400000000), "DtoD") == pytest.approx(1e-3 / 0.85)
    assert seconds(record("COPY", bytes=50000000), "HtoD") == pytest.approx(1e-3)


def test_messages_follow_the_table_and_the_link():
    assert H200.message("all_gather", 8, 2**29) == pytest.approx(1395e-6)
    assert H200.message("all_gather", 6, 2**30) == pytest.approx(2 * 1395e-6)  # a table of 2, 4 and 8; beyond its end
    middle = H200.message("reduce", 8, round(2**28.5))
    assert middle == pytest.approx(math.sqrt(716.3 * 1393) * 1e-6, rel=1e-6)  # as a reduce-scatter
    assert H200.message("send", 2, 360_000_000) == pytest.approx(20e-6 + 1e-3)


def test_rates_measured_on_the_device_replace_the_tables(tmp_path):
    rows = [("products", "bf16", [1024] * 3, 100e12), ("products", "bf16", [4096] * 3, 400e12),
            ("attention", "forward", [1024], 200e12), ("memory", "elementwise,", [2**28], 2e12),
            ("copies", "HtoD", [2**20], 25e9), ("launches", "", [], 1e5)]  # fmt: skip
    path = tmp_path / "costs.json"
    content = [dict(zip(("kind", "name", "sizes", "rate"), row, strict=True)) for row in rows]
    path.write_text(json.dumps({"device": "NVIDIA H200", "rows": content}))
    on = Costs.of(replace(H200.device, costs=str(path)))
    cube = 2 * 2048**3
    assert seconds(product(2048, 2048, 2048), on=on) == pytest.approx(cube / 200e12)  # the geometric mean of both
    assert seconds(product(4096, 4096, 4096), on=on) == pytest.approx(8 * cube / 400e12, rel=1e-6)
    assert seconds(record(dims=(1, 1, 1024, 128, 1024, 1, 2)), "attention", on) == pytest.approx(4 * 2**27 / 200e12)
    assert seconds(record(bytes=2000000), "elementwise", on) == pytest.approx(1e-6)
    assert seconds(record("COPY", bytes=25000000), "HtoD", on) == pytest.approx(1e-3)
    assert on.launch == pytest.approx(1e-5)
    half = product(8192, 8192, 2048, dtype="float8")
    assert seconds(half, on=on) == seconds(half)  # not in the file
    with pytest.raises(NoCosts, match="it was measured on NVIDIA H200, and this is NVIDIA B200"):
        Costs.of(replace(H200.device, name="NVIDIA B200", costs=str(path)))


def test_what_has_no_figures_has_no_costs():
    with pytest.raises(NoCosts, match="no costs of NVIDIA L4; there are those of NVIDIA H200"):
        costs("l4")
    with pytest.raises(NoCosts, match="no costs of products in fp8 on NVIDIA A100-SXM4-80GB"):
        seconds(product(8, 8, 8, dtype="float8"), on=costs("a100"))
    with pytest.raises(NoCosts, match="no costs of all_reduce of 16 ranks"):
        H200.message("all_reduce", 16, 8)
