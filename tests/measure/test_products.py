"""Products and copies of one device: shapes, rates, and that a wrong product is told."""

import pytest
import torch

from ptdbench.measure import products, timing
from ptdbench.measure.products import ProductShape
from ptdbench.measure.timing import Effort

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch, tmp_path):
    for number, size in enumerate(("48K\n", "1024K\n", "32K\n")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size)
    monkeypatch.setattr(products, "_CACHES", tmp_path)


@pytest.mark.parametrize("text", [512, "512", "2x3x5", "20x3x5"])
def test_shape_is_parsed(text):
    assert ProductShape.of(text) == ProductShape(*([512] * 3 if "512" in str(text) else map(int, text.split("x"))))


@pytest.mark.parametrize("text", ["", "0", "2x3", "2x0x5", "2x3x5x7", "-1", "1.5", "axb", None])
def test_malformed_shape_is_refused(text):
    with pytest.raises(ValueError, match="is not a shape"):
        ProductShape.of(text)


def test_flops_bytes_and_rates_by_hand():
    shape = ProductShape(2, 3, 5)
    assert shape.flops == 2 * 30  # thirty multiplications and as many additions
    assert (shape.bytes("fp32"), shape.bytes("bf16")) == (4 * (10 + 15 + 6), 2 * (10 + 15 + 6))
    assert str(shape) == "2x3x5"
    # 12 in 1, 2 and 6 s: 36 in 9 s; the median takes 2 s, the fastest 1 s.
    assert products.rates(12, [1.0, 2.0, 6.0]) == (3, 4.0, 6.0, 12.0)


def test_wrong_product_is_an_error(monkeypatch):
    right = torch.mm

    def one_entry_off(a, b, out):
        right(a, b, out=out)
        out[3, 4] += 1

    monkeypatch.setattr(torch, "mm", one_entry_off)
    with pytest.raises(ArithmeticError, match=r"^the fp32 product 64x64x64 on cpu has a relative error of "):
        products.product_seconds(ProductShape(64, 64, 64), "fp32", CPU, seconds=0.0001)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out.fill_(float("nan")))
    with pytest.raises(ArithmeticError, match="a relative error of nan"):
        products.product_seconds(ProductShape(8, 8, 8), "bf16", CPU, seconds=0.0001)


def test_untimed_work_precedes_every_repetition(monkeypatch):
    order: list[str] = []

    class Clock:
        def start(self):
            order.append("start")

        def stop(self):
            order.append("stop")

        def seconds(self):
            return [1.0] * order.count("stop")

    monkeypatch.setattr(timing, "clock_for", lambda device: Clock())
    products.repeat(lambda: order.append("work"), lambda: order.append("flush"), CPU, seconds=0)
    assert order == ["flush", "start", "work", "stop"] * (Effort.warmup + 1 + Effort.min_repetitions)


def test_flush_covers_twice_the_largest_cache(monkeypatch, tmp_path):
    assert products.cache_bytes(CPU) == 2**20
    flush = products.cache_flusher(CPU)
    flush()
    buffer = flush()
    assert (buffer.nbytes, buffer.eq(2).all()) == (2 * 2**20, True)
    monkeypatch.setattr(products, "_CACHES", tmp_path / "missing")
    assert products.cache_bytes(CPU) == 32 * 2**20


def test_tf32_is_allowed_only_for_tf32_products(monkeypatch):
    seen = []
    right = torch.mm

    def spy(a, b, out):
        seen.append((out.dtype, torch.get_float32_matmul_precision()))
        return right(a, b, out=out)

    monkeypatch.setattr(torch, "mm", spy)
    before = torch.get_float32_matmul_precision()
    expected = {
        "fp32": (torch.float32, "highest"), "tf32": (torch.float32, "high"), "bf16": (torch.bfloat16, "highest"),
    }  # fmt: skip
    for dtype, of_each in expected.items():
        seen.clear()
        taken = products.product_seconds(ProductShape(8, 4, 16), dtype, CPU, seconds=0.0001)
        assert set(seen) == {of_each}
        assert len(taken) >= Effort.min_repetitions
        assert min(taken) > 0
    assert torch.get_float32_matmul_precision() == before
