"""The workload ``collectives``: what it measures, checks and refuses."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ptdbench.measure.operations import OPERATIONS
from ptdbench.parallel.dims import Dims
from ptdbench.parallel.mesh import Mesh
from ptdbench.problems import ConfigError
from ptdbench.workloads.collectives import Collectives, groups_of
from tests.daily import cases
from tests.workloads.made_job import refusal

TWO = ("workload=collectives", "device=cpu", "cluster.ranks_per_node=2")

#: Quick figures, for tests that do not look at them.
QUICK = ("workload.seconds=0.0001", "workload.min_repetitions=2", "workload.warmup=1", "workload.max_seconds=60")


def start(shared_run, ranks, *overrides):
    record = shared_run(*TWO, f"cluster.ranks_per_node={ranks}", *QUICK, *overrides)
    assert (record["status"], record["error"]) == ("ok", None)
    return record["collectives"]


@pytest.mark.ranks
@cases("ranks", [2, 3], daily=[3])
def test_every_operation_is_right_and_timed(shared_run, ranks):
    figures = start(shared_run, ranks, "workload.max_bytes=65536", "workload.factor=8")
    measured = {row["op"] for row in figures["results"]}
    assert measured == OPERATIONS.keys()
    assert (figures["groups"], figures["left_out"]) == ([list(range(ranks))], [])
    for row in figures["results"]:
        seconds = row["seconds"]
        assert 0 < seconds["p5"] <= seconds["median"] <= seconds["p95"]
        assert row["repetitions"] >= 2
        if row["op"] != "barrier":
            assert row["algbw"] == pytest.approx(row["bytes"] / seconds["median"])
    all_reduce = [row for row in figures["results"] if row["op"] == "all_reduce"]
    for row in all_reduce:
        assert row["busbw"] == pytest.approx(row["algbw"] * 2 * (ranks - 1) / ranks)
    assert [row["bytes"] for row in all_reduce][:6] == [8, 64, 512, 4096, 32768, 65536]


@pytest.mark.ranks
def test_every_dtype_is_right(shared_run):
    ops = "workload.ops=[all_reduce,reduce,reduce_scatter,all_to_all]"
    sizes = ("workload.min_bytes=4096", "workload.max_bytes=4096")
    figures = start(shared_run, 3, ops, *sizes, "workload.dtypes=all")
    assert len(figures["results"]) == 4 * 8


@pytest.mark.ranks
@cases(
    ("group", "groups"),
    [("data", [[0, 2], [1, 3]]), ("pipeline", [[0, 1], [2, 3]]), ("[3,1]", [[1, 3]])],
    daily=[("data", [[0, 2], [1, 3]])],
)
def test_groups(shared_run, group, groups):
    figures = start(shared_run, 4, f"workload.group={group}", "workload.max_bytes=1024", "workload.factor=128")
    assert figures["groups"] == groups
    assert {row["ranks"] for row in figures["results"]} == {2}


@pytest.mark.parametrize(("data", "pipeline"), [(2, 2), (4, 2), (2, 4), (3, 1)])
def test_groups_are_those_of_the_mesh_that_trains(data, pipeline):
    """Asked of a DeviceMesh in a process that only pretends to have peers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=data * pipeline)
    try:
        mesh = Mesh(Dims(replicate=data, pipeline=pipeline), "cpu")
        of_mesh = [dist.get_process_group_ranks(one.get_group()) if one else [0] for one in (mesh.dp, mesh["pp"])]
    finally:
        dist.destroy_process_group()
    assert [groups_of(name, data * pipeline, pipeline)[0] for name in ("data", "pipeline")] == of_mesh


@pytest.mark.ranks
def test_a_wrong_result_is_a_failed_run_that_names_it(run):
    target = "workload._target_=tests.workloads.wrong.WrongAllReduce"
    record = run("workload=collectives", target, "device=cpu", "workload.ops=all_reduce", "workload.max_bytes=1024")
    assert record["status"] == "failed"
    error = record["error"]
    assert (error["rank"], error["type"]) == (1, "ArithmeticError")
    assert error["message"].startswith("all_reduce fp32 sum of 256 bytes over ranks [0, 1]: rank 1 has ")
    assert error["message"].endswith("; 1 of 64 elements are wrong")


@pytest.mark.parametrize(("words", "message"), [
    ("ops=[all_reduce,all_redcue]", "ops=[all_reduce,all_redcue]: there is no all_redcue; try "),
    ("ops=[]", "ops=[]: must name at least one; try all, broadcast,"),
    ("dtypes=fp8", "dtypes=fp8: there is no fp8; try "),
    ("group=tensor", "group=tensor: there is no such group; try all, data, pipeline, or ranks"),
    ("group=[0,2]", "group=[0,2]: there is no rank 2; the ranks are 0 to 1"),
    ("group=[0,0]", "group=[0,0]: must name at least two ranks, each once"),
    ("group=[1]", "group=[1]: must name at least two ranks, each once"),
    ("group=data", "group=data: has one rank per group, with 2 ranks in pipelines of 2;"),
    (
        "group=pipeline workload.pipeline_size=3 cluster.ranks_per_node=4",
        "pipeline_size=3: must divide the number of ranks, 4; try 1, 2, 4",
    ),
])  # fmt: skip
def test_bad_input_is_refused_before_any_rank_starts(words, message):
    assert refusal(*TWO, *f"workload.{words}".split()).startswith(f"workload.{message}")


def test_a_single_rank_and_what_the_backend_lacks_are_refused():
    assert refusal(*TWO, "cluster.ranks_per_node=1").startswith("workload=collectives: needs at least two ranks; try ")
    with pytest.raises(ConfigError, match=r"^workload.ops=gather: gloo does not support gather on GPU tensors; "):
        Collectives(ops="gather").check(2, "cuda", "gloo")
    for backend, device in (("gloo", "cpu"), ("nccl", "cuda")):
        Collectives(ops="gather").check(2, device, backend)
    Collectives().check(2, "cuda", "gloo")  # all that it has
