"""The workload: what all ranks make of their steps together."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import asdict

from ptdbench.data.protocol import HeldOutPart
from ptdbench.records.schema import Energy
from ptdbench.workloads.train import PROBE_STEPS, _affordable, assemble, steps
from tests.conftest import composed
from tests.parallel.ranks import each, on_ranks
from tests.refusals import refusal_of
from tests.workloads import made_task
from tests.workloads.made_job import job
from tests.workloads.made_task import TASK, Kept, Largest

pytestmark = pytest.mark.ranks

TOY = ("model=toy", "device=cpu")


def test_every_rank_brings_every_step(shared_run):
    record = shared_run(*TOY, "parallel=ddp", "cluster.ranks_per_node=3", "train.global_batch=12", "train.steps=6")
    assert record["error"] is None
    assert [len(seconds) for seconds in record["rank_step_seconds"]] == [6, 6, 6]
    assert len(record["losses"]) == len(record["memory_bytes"]) == 6
    assert all(in_use > 0 for in_use in record["memory_bytes"])
    assert record["remarks"] == {}
    metrics = record["metrics"]
    assert metrics["first_step_seconds"] == pytest.approx(sum(metrics["startup_seconds"].values()))
    assert metrics["peak_memory_bytes"] > 0
    assert record["hardware"]["gpu"] == asdict(Energy(reason="the run used no GPU"))


@pytest.mark.parametrize("number", [1, 4])  # found early, or after the last step
def test_a_run_whose_replicas_differ_has_failed(shared_run, number):
    drifting = (*TASK, f"model._target_={made_task.__name__}.Drifting", f"+model.number={number}", "train.steps=5")
    record = shared_run(*drifting, "parallel=ddp")
    assert (record["status"], record["steps"]) == ("failed", number)
    assert record["error"]["message"].startswith("replicas differ: shift has other bits on rank 1 than on rank 0; ")


def test_a_run_cut_short_and_a_lopsided_pipeline_are_on_record(shared_run):
    record = shared_run(*TOY, "parallel=ddp", "train.steps=50", "train.max_minutes=1e-9")
    assert record["status"] == "ok"
    assert len(record["losses"]) == PROBE_STEPS
    assert [len(seconds) for seconds in record["rank_step_seconds"]] == [PROBE_STEPS] * 2
    assert record["remarks"]["cut_short"] == f"{PROBE_STEPS} of 50 steps: more would exceed train.max_minutes=1e-09"
    record = shared_run(*TOY, "parallel=pdp", "train.steps=1", "model.inputs=20000")
    assert record["remarks"]["pipeline"].startswith("stages 99 : 1 of the FLOPs, as ")


def drawn(directory: Path, seeds: list[int]) -> list[float]:
    """What dropout would begin with on this rank, for runs of these seeds."""
    found = []
    for number, seed in enumerate(seeds):
        options = ("model=gpt_tiny", "parallel=tp", "parallel.tensor=2", "parallel.replicate=2", f"seed={seed}")
        assemble(job(directory / str(number), composed(*options)))
        found.append(torch.rand(1).item())
    return found


def test_chance_follows_the_seed_and_is_shared_by_those_who_share_each_product(tmp_path):
    first, second, third, fourth = on_ranks(4, drawn, tmp_path, [0, 0, 1])
    assert (first, third) == (second, fourth)
    for again, once, other in (first, third):
        assert again == once != other
    assert not {*first} & {*third}


def affordable() -> list[int]:
    """What two ranks find that measured different times: 2 s and 4 s for their fastest step."""
    mine: Any = [[9.0, 2.0, 3.0], [8.0, 5.0, 4.0]][dist.get_rank()]
    loop: Any = SimpleNamespace(clock=SimpleNamespace(seconds=lambda: mine), first_step=0, done=PROBE_STEPS)

    def job(steps: int, max_minutes: float | None) -> Any:
        asked = SimpleNamespace(steps=steps, max_minutes=max_minutes)
        return SimpleNamespace(spec=SimpleNamespace(config=SimpleNamespace(train=asked)), device=torch.device("cpu"))

    cases = ((100, 1), (10, 1), (100, 0.01), (100, None))
    return [_affordable(job(*case), loop) for case in cases]


def test_all_ranks_afford_what_the_slowest_can():
    assert on_ranks(2, affordable) == [[60 // 4, 10, PROBE_STEPS, 100]] * 2


def test_the_garbage_collector_is_off_in_steps_and_on_again_afterwards(alone, tmp_path):
    of_rank = job(tmp_path, composed(*TOY, "train.steps=4", "parallel=single"))
    loop = assemble(of_rank)
    enabled: list[bool] = []
    loop.engine.module.register_forward_pre_hook(lambda *_: enabled.append(gc.isenabled()))
    assert list(steps(of_rank, loop)) == [1, 2, 3, 4]
    assert enabled == [False] * 4
    assert gc.isenabled()


class Other(Largest):
    """What a node reads whose copy of the files is another one."""

    def __init__(self, *, seed: int, differs: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(seed=seed + rank * (differs == "samples"))
        self._more = rank * (differs == "held_out")

    @property
    def held_out(self) -> Any:
        return HeldOutPart(101 + self._more, Kept().samples)


def refused(directory: Path, what: str) -> str:
    other = (*TASK, f"data._target_={__name__}.Other", f"+data.differs={what}")
    return refusal_of(assemble, job(directory / what, composed(*other)))


def test_data_that_are_not_the_same_on_all_ranks_are_refused(tmp_path):
    """Where copies of a data set differ between nodes."""
    rule = "give all nodes the same files, and let sample k depend only on the seed and k"
    of_rank = {
        (tmp_path, "samples"): f"data=Other: samples 0 to 7 differ between ranks 0 and 1; {rule}",
        (tmp_path, "held_out"): f"data=Other: rank 0 holds out 101 samples, but rank 1 102; {rule}",
    }
    assert on_ranks(2, each, refused, [*of_rank]) == [of_rank] * 2
