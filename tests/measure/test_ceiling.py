"""The ceilings of devices: of which shape, beside what load, and found again for exactly the same device."""

import pytest
import torch
from msgspec.structs import replace

from ptdbench.launch.world import World
from ptdbench.measure import products
from ptdbench.measure.products import ProductShape
from ptdbench.measure.results import Ceiling, Key, Product, RankProducts
from ptdbench.problems import ConfigError

GPU = Key("NVIDIA H200", "550.54", "2.15.0", "bf16", None)
FOUND = Ceiling(
    *("NVIDIA H200", "550.54", "2.15.0", "bf16", None), ranks=2, shape="8192x8192x8192", flops_per_second=7.5e14,
    share_of_peak=0.758, peak_reason=None,
)  # fmt: skip
ENVIRONMENT = {"cpu": "AMD EPYC", "driver": "550.54", "torch": "2.15.0"}


pytestmark = pytest.mark.usefixtures("cache")


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
