"""Rates of matrix products, and the ceilings that they set."""

import pytest
import torch
from msgspec.structs import replace

from ptdbench.launch.world import World
from ptdbench.measure import products, timing
from ptdbench.measure.products import ProductShape
from ptdbench.measure.results import Ceiling, Key, Product, RankProducts
from ptdbench.measure.timing import Effort
from ptdbench.problems import ConfigError

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("cache")


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


GPU = Key("NVIDIA H200", "550.54", "2.15.0", "bf16", None)
FOUND = Ceiling(
    *("NVIDIA H200", "550.54", "2.15.0", "bf16", None), ranks=2, shape="8192x8192x8192", flops_per_second=7.5e14,
    share_of_peak=0.758, peak_reason=None,
)  # fmt: skip
ENVIRONMENT = {"cpu": "AMD EPYC", "driver": "550.54", "torch": "2.15.0"}


def test_stored_ceiling_is_found(cache):
    assert products.stored_ceiling(GPU) is None
    path = products.store_ceiling(FOUND)
    assert [entry for entry in cache.rglob("*") if entry.is_file()] == [path]
    assert path.parent == cache / "ceilings"
    assert products.stored_ceiling(GPU) == FOUND


@pytest.mark.parametrize(
    "change",
    [{"device": "NVIDIA H100 PCIe"}, {"driver": "550.55"}, {"torch": "2.16.0"}, {"dtype": "fp16"}, {"threads": 1}],
)
def test_ceiling_of_another_key_is_not_found(change):
    products.store_ceiling(FOUND)
    assert products.stored_ceiling(replace(GPU, **change)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"flops_per_second": null}'])
def test_damaged_file_is_no_ceiling(text):
    products.store_ceiling(FOUND).write_text(text)
    assert products.stored_ceiling(GPU) is None


def test_key_has_the_threads_of_a_cpu_and_the_driver_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cpu = products.ceiling_key(ENVIRONMENT, torch.device("cpu"), "fp32")
    assert cpu == Key("AMD EPYC", None, "2.15.0", "fp32", 8)
    assert products.ceiling_key(ENVIRONMENT, torch.device("cuda", 0), "bf16") == GPU


def rank(number: int, medians: dict[str, float], **key: object) -> products._OfRank:
    device = replace(Key("NVIDIA H200", "550", "2.15", "bf16", None), **key)
    measured = [Product("bf16", shape, 1, median, median, median) for shape, median in medians.items()]
    return products._OfRank(RankProducts(number, device.device, measured), {"bf16": device})


class TestCeilings:
    def test_ceilings_are_of_the_best_shape_by_the_median_and_of_each_device(self):
        ranks = [rank(0, {"a": 7e14, "b": 6e14}), rank(1, {"a": 3e14, "b": 5e14}), rank(2, {"a": 4e14, "b": 5.5e14})]
        (best,) = products._ceilings(ranks)
        assert (best.shape, best.flops_per_second, best.ranks) == ("b", 5.5e14, 3)
        assert best.share_of_peak == pytest.approx(550 / 989.4)  # an H200's dense bf16 peak
        assert best.peak_reason is None
        ranks = [rank(0, {"a": 7e14}), rank(1, {"a": 3e14}, device="NVIDIA Unheard Of")]
        one, other = products._ceilings(ranks)
        assert (one.flops_per_second, other.flops_per_second) == (7e14, 3e14)
        assert other.share_of_peak is None
        assert other.peak_reason == "no data-sheet peak on record for NVIDIA Unheard Of in bf16"


def keep(rate: float, device: str = "NVIDIA H200") -> str | None:
    return products.keep_ceilings(
        World(0, 1, 0, 1, "torchrun"), products._ceilings([rank(0, {"a": rate}, device=device)])
    )


def test_the_highest_is_kept():
    said = "bf16 not cached: the earlier 700 TFLOP/s is higher"
    for rate, remark, highest in ((7e14, None, 7e14), (6e14, said, 7e14), (8e14, None, 8e14)):
        assert keep(rate) == remark
        assert products.stored_ceiling(Key("NVIDIA H200", "550", "2.15", "bf16", None)).flops_per_second == highest


def test_virtual_gpu_is_not_kept(cache):
    said = keep(7e14, device="virtual NVIDIA H200")
    assert (said, cache.exists()) == ("not cached: virtual GPUs compute nothing", False)


def test_products_beyond_memory_are_refused(monkeypatch):
    """On a GPU too, of whose memory nothing is known before."""
    asked = []

    def refuse(device, local_size, need, option, value):
        asked.append((need, option, value))
        raise ConfigError([])

    monkeypatch.setattr(products.timing, "require_memory", refuse)
    here = World(0, 1, 0, 1, "torchrun"), torch.device("cpu")
    with pytest.raises(ConfigError):
        products.time_products(*here, [ProductShape(2, 3, 5), ProductShape(4, 4, 4)], ["bf16"], 1.0)
    # 2 bytes for each of 3 * 16 numbers, and 4 for each of the 16 of a factor.
    assert asked == [(96 + 64, "workload.shapes", "4x4x4")]
