"""The ceilings of devices: of which shape, beside what load, and which of two is kept for later runs."""

from __future__ import annotations

import pytest
import torch
from msgspec import to_builtins
from msgspec.structs import replace

from ptdbench.launch.world import World
from ptdbench.measure import ceiling
from ptdbench.measure.contention import OtherLoad
from ptdbench.measure.products import Shape
from ptdbench.problems import ConfigError

pytestmark = pytest.mark.usefixtures("cache")


def rank(number: int, medians: dict[str, float], **key: object) -> dict:
    own = replace(ceiling.Key("NVIDIA H200", "550", "2.15", "bf16", None), **key)
    products = [{"dtype": "bf16", "shape": shape, "median": median} for shape, median in medians.items()]
    return {"rank": number, "keys": {"bf16": own}, "products": products, "node": "n1"}


QUIET = OtherLoad("n1", 8, 0.0, [], on_gpu=True)


class TestCeilings:
    def test_the_best_shape_by_the_median_of_the_ranks(self):
        ranks = [rank(0, {"a": 7e14, "b": 6e14}), rank(1, {"a": 3e14, "b": 5e14}), rank(2, {"a": 4e14, "b": 5.5e14})]
        (found,) = ceiling._ceilings(ranks, [QUIET])
        assert (found.shape, found.flops_per_second, found.ranks) == ("b", 5.5e14, 3)
        assert found.share_of_peak == pytest.approx(550 / 989.4)  # an H200's dense bf16 peak
        assert found.peak_reason is None

    def test_devices_that_differ_have_their_own(self):
        ranks = [rank(0, {"a": 7e14}), rank(1, {"a": 3e14}, device="NVIDIA Unheard Of")]
        one, other = ceiling._ceilings(ranks, [QUIET])
        assert (one.flops_per_second, other.flops_per_second) == (7e14, 3e14)
        assert (other.share_of_peak, other.peak_reason) == (
            None, "no data-sheet peak on record for NVIDIA Unheard Of in bf16",
        )  # fmt: skip

    def test_one_says_when_it_was_taken_beside_other_load(self):
        ranks = [rank(0, {"a": 7e14}), rank(1, {"a": 3e14}, device="NVIDIA Unheard Of")]
        quiet, beside = ceiling._ceilings(ranks, [replace(QUIET, gpu_ranks=[1])])
        assert (quiet.beside_load, beside.beside_load) == (False, True)


class TestKept:
    def keep(self, rate: float, beside_load: bool, **how: bool) -> str | None:
        (found,) = ceiling._ceilings([rank(0, {"a": rate})], [replace(QUIET, gpu_ranks=[0] * beside_load)])
        return ceiling.keep_ceilings(World(0, 1, 0, 1, "torchrun"), {"ceilings": [to_builtins(found)]}, **how)

    @staticmethod
    def kept() -> tuple[float, bool | None]:
        found = ceiling.look_up(ceiling.Key("NVIDIA H200", "550", "2.15", "bf16", None))
        assert found
        return found.flops_per_second, found.beside_load

    def test_the_latest_of_those_on_a_quiet_machine(self):
        for rate in (7e14, 6e14):
            assert self.keep(rate, beside_load=False) is None
            assert self.kept() == (rate, False)

    def test_one_beside_other_load_replaces_no_higher_one_and_says_so(self):
        self.keep(7e14, beside_load=False)
        rule = "taken beside other load, and 700 TFLOP/s measured earlier is higher"
        assert self.keep(6e14, beside_load=True) == f"bf16 not kept for later runs: {rule}"
        assert self.kept() == (7e14, False)
        assert self.keep(8e14, beside_load=True) is None
        assert self.kept() == (8e14, True)

    def test_of_one_that_is_measured_again_the_higher(self):
        self.keep(7e14, beside_load=True)
        self.keep(6e14, beside_load=False, only_higher=True)
        assert self.kept() == (7e14, True)


def test_products_that_no_rank_has_room_for_are_refused_by_all(monkeypatch):
    """On a GPU too, of whose memory nothing is known before."""
    asked = []

    def refuse(device, local_size, need, option, value):
        asked.append((need, option, value))
        raise ConfigError([])

    monkeypatch.setattr(ceiling.timing, "require_memory", refuse)
    here = World(0, 1, 0, 1, "torchrun"), torch.device("cpu")
    with pytest.raises(ConfigError):
        ceiling.measure(*here, [Shape(2, 3, 5), Shape(4, 4, 4)], ["bf16"], 1.0)
    # 2 bytes for each of 3 * 16 numbers, and 4 for each of the 16 of a factor.
    assert asked == [(96 + 64, "workload.shapes", "4x4x4")]
