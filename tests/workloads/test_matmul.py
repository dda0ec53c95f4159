"""The workload ``matmul``: its record, what it refuses, and the ceiling that later runs find."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ptdbench.measure import ceiling
from ptdbench.measure.other_load import OtherLoad
from ptdbench.measure.products import Shape
from ptdbench.problems import ConfigError
from ptdbench.setup import config, run_spec
from ptdbench.workloads import matmul
from tests.conftest import composed

SHORT = (
    "workload=matmul", "workload.shapes=[64,32x96x128]", "workload.seconds=0.001", "device=cpu",
    "cluster.ranks_per_node=2",
)  # fmt: skip
TOY = ("model=toy", "train.steps=3", "device=cpu", "parallel=ddp", "cluster.ranks_per_node=2")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as found:
        run_spec.specify(config.read(composed("workload=matmul", "device=cpu", *overrides)), None)
    return str(found.value).splitlines()


@pytest.mark.ranks
class TestRun:
    def test_every_rank_is_in_the_record(self, shared_run):
        record = shared_run(*SHORT)
        assert (record["status"], record["error"], record["model"]) == ("ok", None, None)
        found = record["matmul"]
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
        for rank in found["ranks"]:
            measured = [(product["dtype"], product["shape"]) for product in rank["products"]]
            assert measured == [(d, s) for d in ("fp32", "bf16") for s in ("64x64x64", "32x96x128")]
            for product in [*rank["products"], *rank["copies"]]:
                assert 0 < product["median"] <= product["maximum"]
                assert 0 < product["mean"] <= product["maximum"]
        assert [(one["dtype"], one["ranks"]) for one in found["ceilings"]] == [("fp32", 2), ("bf16", 2)]
        assert found["kept"] is None
        (load,) = found["other_load"]
        assert (load["cores"], load["on_gpu"]) == (len(os.sched_getaffinity(0)), False)
        assert load["taken"] is None or 0 <= load["taken"] <= load["cores"]

    def test_a_training_run_finds_the_ceiling_of_its_dtype_and_threads(self, shared_run):
        before = shared_run(*TOY)["metrics"]
        assert (before["ceiling_flops_per_second"], before["share_of_ceiling"]) == (None, None)
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        assert f"fp32, {threads} thread" in before["ceiling_reason"]
        assert before["ceiling_reason"].endswith("python train.py workload=matmul cluster.ranks_per_node=2")

        (fp32, _) = shared_run(*SHORT)["matmul"]["ceilings"]
        record = shared_run(*TOY)
        after = record["metrics"]
        assert (after["ceiling_flops_per_second"], after["ceiling_reason"]) == (fp32["flops_per_second"], None)
        rate = after["model_flops_per_second"]
        assert after["share_of_ceiling"] == pytest.approx(rate / 2 / fp32["flops_per_second"])

    def test_a_cache_that_cannot_be_written_is_said_and_fails_nothing(self, shared_run, tmp_path):
        (tmp_path / "cache").write_text("a file where a folder should be")
        record = shared_run(*SHORT)
        assert record["status"] == "ok"
        assert record["matmul"]["kept"].startswith("not kept for later runs: ")


class TestRefused:
    def test_shapes_and_dtypes_that_nobody_knows(self):
        assert problems("workload.shapes=[64,2x3]", "workload.dtypes=[fp32,fp8]", "workload.seconds=0") == [
            "workload.shapes=[64,2x3]: must be numbers such as 4096, or MxNxK such as 4096x1024x512, and at least one",
            "workload.dtypes=[fp32,fp8]: must be dtypes of matrix products; try fp32, tf32, bf16, fp16",
            "workload.seconds=0: must be greater than 0",
        ]

    @pytest.mark.parametrize("option", ["shapes", "dtypes"])
    def test_nothing_at_all(self, option):
        (line,) = problems(f"workload.{option}=[]")
        assert line.startswith(f"workload.{option}=[]: must be ")

    def test_tf32_without_a_gpu(self):
        (line,) = problems("workload.dtypes=[tf32]")
        assert line == "workload.dtypes=[tf32]: TF32 is a format of GPUs; try fp32, bf16, fp16"

    def test_matrices_that_are_larger_than_the_memory(self):
        (line,) = problems("workload.shapes=[1000000]")
        # Three matrices of 10^12 numbers of 4 bytes, and one more to draw random values in.
        assert line.startswith("workload.shapes=1000000x1000000x1000000: needs 14,901 GiB for its matrices, and this ")


def rank(number: int, medians: dict[str, float], **key: object) -> dict:
    own = {"device": "NVIDIA H200", "driver": "550", "torch": "2.15", "dtype": "bf16", "threads": None} | key
    products = [{"dtype": "bf16", "shape": shape, "median": median} for shape, median in medians.items()]
    return {"rank": number, "keys": {"bf16": own}, "products": products, "node": "n1"}


QUIET = OtherLoad("n1", 8, 0.0, [], on_gpu=True)


class TestCeilings:
    def test_the_best_shape_by_the_median_of_the_ranks(self):
        ranks = [rank(0, {"a": 7e14, "b": 6e14}), rank(1, {"a": 3e14, "b": 5e14}), rank(2, {"a": 4e14, "b": 5.5e14})]
        (found,) = matmul._ceilings(ranks, [QUIET])
        assert (found["shape"], found["flops_per_second"], found["ranks"]) == ("b", 5.5e14, 3)
        assert found["share_of_peak"] == pytest.approx(550 / 989.4)  # an H200's dense bf16 peak
        assert found["peak_reason"] is None

    def test_devices_that_differ_have_their_own(self):
        ranks = [rank(0, {"a": 7e14}), rank(1, {"a": 3e14}, device="NVIDIA Unheard Of")]
        one, other = matmul._ceilings(ranks, [QUIET])
        assert (one["flops_per_second"], other["flops_per_second"]) == (7e14, 3e14)
        assert (other["share_of_peak"], other["peak_reason"]) == (
            None, "no data-sheet peak on record for NVIDIA Unheard Of in bf16",
        )  # fmt: skip

    def test_one_says_when_it_was_taken_beside_other_load(self):
        ranks = [rank(0, {"a": 7e14}), rank(1, {"a": 3e14}, device="NVIDIA Unheard Of")]
        quiet, beside = matmul._ceilings(ranks, [replace(QUIET, gpu_ranks=[1])])
        assert (quiet["beside_load"], beside["beside_load"]) == (False, True)


class TestKept:
    def keep(self, rate: float, beside_load: bool, **how: bool) -> str | None:
        (found,) = matmul._ceilings([rank(0, {"a": rate})], [replace(QUIET, gpu_ranks=[0] * beside_load)])
        return matmul._keep(SimpleNamespace(world=SimpleNamespace(local_rank=0)), {"ceilings": [found]}, **how)

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

    def refuse(job, need, option, value):
        asked.append((need, option, value))
        raise ConfigError([])

    monkeypatch.setattr(matmul.timing, "require_memory", refuse)
    with pytest.raises(ConfigError):
        matmul.measure(None, [Shape(2, 3, 5), Shape(4, 4, 4)], ["bf16"], 1.0)  # type: ignore[arg-type]
    # 2 bytes for each of 3 * 16 numbers, and 4 for each of the 16 of a factor.
    assert asked == [(96 + 64, "workload.shapes", "4x4x4")]
