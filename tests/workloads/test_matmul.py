"""The workload ``matmul``: its record, what it refuses, and the ceiling that later runs find."""

import pytest

from ptdbench.launch.world import World
from ptdbench.setup import run_spec
from tests.conftest import read
from tests.workloads.made_job import refusal

SHORT = (
    "workload=matmul", "workload.shapes=[64,32x96x128]", "workload.seconds=0.001", "device=cpu",
    "cluster.ranks_per_node=2",
)  # fmt: skip
TOY = ("model=toy", "train.steps=3", "device=cpu", "parallel=ddp", "cluster.ranks_per_node=2")


pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.ranks
class TestRun:
    def test_every_rank_is_in_the_record(self, shared_run):
        record = shared_run(*SHORT)
        assert (record["status"], record["error"], record["model"]) == ("ok", None, None)
        rates = record["matmul"]
        assert [rank["rank"] for rank in rates["ranks"]] == [0, 1]
        for rank in rates["ranks"]:
            measured = [(product["dtype"], product["shape"]) for product in rank["products"]]
            assert measured == [(d, s) for d in ("fp32", "bf16") for s in ("64x64x64", "32x96x128")]
            for product in rank["products"]:
                assert 0 < product["median"] <= product["maximum"]
                assert 0 < product["mean"] <= product["maximum"]
        assert [(one["dtype"], one["ranks"]) for one in rates["ceilings"]] == [("fp32", 2), ("bf16", 2)]
        assert rates["kept"] is None

    def test_a_training_run_finds_the_ceiling_of_its_dtype_and_threads(self, shared_run):
        before = shared_run(*TOY)["metrics"]
        assert (before["ceiling_flops_per_second"], before["share_of_ceiling"]) == (None, None)
        (fp32, _) = shared_run(*SHORT)["matmul"]["ceilings"]
        record = shared_run(*TOY)
        after = record["metrics"]
        assert after["ceiling_flops_per_second"] == fp32["flops_per_second"]
        rate = after["model_flops_per_second"]
        assert after["share_of_ceiling"] == pytest.approx(rate / 2 / fp32["flops_per_second"])

    def test_a_cache_that_cannot_be_written_is_said_and_fails_nothing(self, shared_run, tmp_path):
        (tmp_path / "cache").write_text("a file where a folder should be")
        record = shared_run(*SHORT)
        assert record["status"] == "ok"
        assert record["matmul"]["kept"].startswith("not cached: ")


@pytest.mark.parametrize(("overrides", "lines"), [
    (
        ["shapes=[64,2x3]", "dtypes=[fp32,fp8]", "seconds=0"],
        [
            "shapes=[64,2x3]: must be one or more of N, such as 4096, or MxNxK, such as 4096x1024x512",
            "dtypes=[fp32,fp8]: must be dtypes for matrix products; try fp32, tf32, bf16, fp16",
            "seconds=0: must be greater than 0",
        ],
    ),
    (["shapes=[]"], ["shapes=[]: must be "]),
    (["dtypes=[]"], ["dtypes=[]: must be "]),
    (["shapes=2x3", "dtypes=fp8"], ["shapes=2x3: must be one or more", "dtypes=fp8: must be dtypes"]),
    (["dtypes=tf32"], ["dtypes=tf32: TF32 exists only on GPUs; try fp32, bf16, fp16"]),
    (["dtypes=[tf32]"], ["dtypes=[tf32]: TF32 exists only on GPUs; try fp32, bf16, fp16"]),
])  # fmt: skip
def test_what_is_refused(overrides, lines):
    said = refusal("workload=matmul", "device=cpu", *(f"workload.{option}" for option in overrides))
    for told, line in zip(said.splitlines(), lines, strict=True):
        assert told.startswith(f"workload.{line}")


def test_a_job_may_have_more_memory():
    # Ranks refuse what does not fit into theirs.
    asked = read("workload=matmul", "cluster=slurm", "device=cpu", "workload.shapes=[1000000]")
    assert run_spec.specify(asked, World(0, 1, 0, 1, "SLURM", nodes=1), 0)
