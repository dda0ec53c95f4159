"""``train.micro_batch=max`` and ``best``: by runs that are made up here, and on real ranks."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ptdbench.launch.world import World
from ptdbench.measure import memory
from ptdbench.planning.tries import try_options, with_found_micro_batch
from ptdbench.profiling.events import NCCL_BUFFERS
from ptdbench.records import record, store
from ptdbench.records.schema import Metrics
from ptdbench.report.display import Heading
from ptdbench.run.door import find_micro_batch
from ptdbench.run.micro_batch import Broken, Finder
from ptdbench.setup import config, run_spec
from ptdbench.setup.config import Config
from ptdbench.setup.runs import Shape
from tests.conftest import composed, read
from tests.report.made import made
from tests.shared_ranks import carry_out

ANYWHERE = (
    "model=toy", "parallel=ddp", "cluster.ranks_per_node=2", "train.steps=4", "profile.steps=0", "memory_reserve=0",
)  # fmt: skip
TOY = (*ANYWHERE, "device=cpu")

MIB = 2**20


@pytest.fixture
def room(monkeypatch) -> int:
    """1000 MiB, of which nothing is kept for others."""
    monkeypatch.setattr("ptdbench.setup.checks.host_memory", lambda: memory.HostMemory(2000 * MIB, 1000 * MIB))
    return 1000 * MIB


def fields(
    directory: Path, made: Callable[[int, int], Mapping[str, Any]], *words: str, notes: list[Any] | None = None
) -> dict[str, Any]:
    """What is found where a run of a micro-batch, the first, second, ... of all, leaves a record with ``made``."""
    count = 0

    def try_it(where: Path) -> None:
        nonlocal count
        count += 1
        written = store.load_record(where) | {"error": None}
        store.write_record(where, written | made(written["config"]["train"]["micro_batch"], count))

    note = (notes if notes is not None else []).append
    return Finder(directory, read(*TOY, *words), Heading("toy"), try_it, note).find()


def size_of(fields: Mapping[str, Any]) -> int:
    assert fields["layout"]["micro_batch"] == fields["micro_batch"]["found"]
    return fields["micro_batch"]["found"]


def idle(directory: Path, config: Config, shape: Shape | None = None) -> Finder:
    return Finder(directory, config, Heading("toy"), lambda *_: None, lambda _: None, shape)


def of_memory(mib: Callable[[int], int]) -> Callable[[int, int], dict[str, Any]]:
    return lambda size, _: {"status": "ok", "metrics": {"peak_memory_bytes": mib(size) * MIB}}


def test_the_memory_of_all_ranks_of_the_machine_counts(tmp_path, room):
    notes: list[Any] = []
    made = fields(tmp_path, of_memory(lambda size: 100 + 3 * size), "train.global_batch=4096", "train.micro_batch=max",
                 notes=notes)  # fmt: skip
    assert size_of(made) == 128  # twice 484 MiB; of 256, twice 868 MiB
    assert made["layout"]["accumulation"] == 4096 // 2 // 128
    assert made["micro_batch"]["room_bytes"] == room
    assert [row["micro_batch"] for row in made["micro_batch"]["tries"]] == [1, 8, 128]
    waiting = [row["needed_bytes"] / 2 - (100 + 3 * row["micro_batch"]) * MIB for row in made["micro_batch"]["tries"]]
    assert waiting == [(2048 - 2 * size) * waiting[0] / 2046 for size in (1, 8, 128)]  # of a replica's 2,048
    assert waiting[0] > 0
    assert [len(note["tries"]) for note in notes] == [1, 2, 3]
    written = [json.loads(path.read_text()) for path in tmp_path.glob("tries/*/record.json")]
    assert {row["layout"]["accumulation"] for row in written} == {2}
    assert {row["config"]["train"]["steps"] for row in written} == {3}


def test_a_rank_that_is_out_of_memory_ends_a_try_and_no_search(tmp_path, room):
    def made(size: int, _: int) -> dict[str, Any]:
        if size > 8:
            return {"status": "oom"}
        return {"status": "ok", "metrics": {"peak_memory_bytes": (100 + size) * MIB}}

    search = fields(tmp_path, made, "train.global_batch=128", "train.micro_batch=max")
    assert size_of(search) == 8
    assert [row["status"] for row in search["micro_batch"]["tries"]].count("oom") >= 1


@pytest.mark.parametrize("wanted", ["max", "best"])
def test_one_that_accumulates_nothing_fits_where_whole_gradients_do_not(tmp_path, room, wanted):
    def made(size: int, _: int) -> dict[str, Any]:
        peak = room // 2 + (20_000 if size < 8 else -MIB)  # of either rank, which hold 21 kB more than their shards
        return {"status": "ok", "metrics": {"peak_memory_bytes": peak, "samples_per_second": 1.0}}

    words = ("parallel=fsdp", "train.global_batch=16", f"train.micro_batch={wanted}")
    search = fields(tmp_path, made, *words)
    assert size_of(search) == 8
    assert [row["micro_batch"] for row in search["micro_batch"]["tries"]] == [1, 8]


def test_none_fits_and_what_fails_otherwise_is_no_matter_of_memory(tmp_path, room):
    with pytest.raises(MemoryError, match=r"not even micro-batch 1 fits into 1000 MiB: it needs 1\.2 GiB"):
        fields(tmp_path, of_memory(lambda size: 600 + size), "train.micro_batch=max")
    error = {"rank": 1, "type": "ValueError", "message": "no such layer", "traceback": ""}
    with pytest.raises(Broken, match="the trial run of micro-batch 1 ended without a result: failed on rank 1:"):
        fields(tmp_path, lambda *_: {"status": "failed", "error": error}, "train.micro_batch=max")


@pytest.mark.parametrize(("kind", "is_answer"), [("OutOfMemoryError", True), ("MemoryError", False)])
def test_on_virtual_gpus_the_memory_of_this_machine_is_no_answer(tmp_path, kind, is_answer):
    error = {"rank": 1, "type": kind, "message": "", "traceback": ""}
    expected = MemoryError if is_answer else Broken
    with pytest.raises(expected, match="not even micro-batch 1 fits" if is_answer else "ended without a result"):
        fields(tmp_path, lambda *_: {"status": "oom", "error": error}, "train.micro_batch=max", "virtual=h100",
              "device=auto")  # fmt: skip


@pytest.mark.parametrize(("fastest", "expected"), [(8, 8), (4, 4), (2, 2)])
def test_the_fastest_is_looked_for_from_the_largest_downward(tmp_path, room, fastest, expected):
    def made(size: int, number: int) -> dict[str, Any]:
        rate = 1000 / (1 + abs(size - fastest) / 4) * (1 + (number % 3) / 1000)
        return {"status": "ok", "metrics": {"peak_memory_bytes": MIB, "samples_per_second": rate}}

    search = fields(tmp_path, made, "train.global_batch=16", "train.micro_batch=best")
    assert size_of(search) == expected
    measured = [row["micro_batch"] for row in search["micro_batch"]["tries"] if row["rates"]]
    assert set(measured) == {8: {8, 4}, 4: {8, 4, 2}, 2: {8, 4, 2, 1}}[expected]


@pytest.mark.parametrize(("seconds", "steps"), [(None, 10), (0.01, 10), (1.0, 6), (60.0, 5)])
def test_a_smaller_one_that_is_clearly_slower_takes_three_runs_of_few_slow_steps(tmp_path, room, seconds, steps):
    def made(size: int, number: int) -> dict[str, Any]:
        rate = (130.0 if size == 8 else 100.0) * (1 + number % 3 / 20)
        stats = {"peak_memory_bytes": MIB, "samples_per_second": rate, "step_seconds": seconds and {"median": seconds}}
        return {"status": "ok", "metrics": stats}

    search = fields(tmp_path, made, "train.global_batch=16", "train.micro_batch=best")
    assert {row["micro_batch"]: len(row["rates"]) for row in search["micro_batch"]["tries"] if row["rates"]} == {
        8: 3,
        4: 3,
    }
    written = [json.loads(path.read_text())["config"]["train"] for path in tmp_path.glob("tries/*/record.json")]
    assert {row["steps"] for row in written if row["warmup_steps"]} == {steps}


def test_both_of_every_pair_are_carried_out_in_turns(tmp_path, room):
    """A rate of the pair before is minutes old: by then the machine may do something else."""
    order: list[int] = []

    def made(size: int, _: int) -> dict[str, Any]:
        order.append(size)
        rate = {8: 100.0, 4: 200.0, 2: 150.0}.get(size, 1.0) * (1 + len(order) / 10_000)
        return {"status": "ok", "metrics": {"peak_memory_bytes": MIB, "samples_per_second": rate}}

    search = fields(tmp_path, made, "train.global_batch=16", "train.micro_batch=best")
    assert size_of(search) == 4
    _, *pairs = "".join(map(str, order)).partition("8448")  # after the tries for memory
    assert "4224" in pairs[-1]


def test_a_try_without_a_throughput_is_no_slow_one(tmp_path, room):
    with pytest.raises(Broken, match=r"has no throughput; try train\.micro_batch=max"):
        fields(tmp_path, of_memory(lambda _: 1), "train.global_batch=16", "train.micro_batch=best")


def test_what_earlier_tries_found_counts_for_the_same_ranks(tmp_path, room):
    made = of_memory(lambda size: 100 + size)
    for _ in range(2):
        assert fields(tmp_path, made, "train.global_batch=16", "train.micro_batch=max")["layout"]["micro_batch"] == 8
    assert len([*tmp_path.glob("tries/*/record.json")]) == 4
    finder = idle(tmp_path, read(*TOY, "train.global_batch=16", "train.micro_batch=max"))
    assert finder.reuse(16) is None
    assert finder.reuse(8)["layout"]["micro_batch"] == 8


def test_ranks_of_a_job_go_on_with_what_its_script_has_found():
    options = read(*TOY, "train.micro_batch=max")
    assert with_found_micro_batch(options, made({"micro_batch": {"found": 4}})).train.micro_batch == 4
    assert with_found_micro_batch(options, made({"micro_batch": {"found": None}})) is options
    typed = options.changed({"train.micro_batch": 2})
    assert with_found_micro_batch(typed, made({"micro_batch": {"found": 4}})) is typed


def of_job(directory: Path, *words: str) -> Shape:
    """The shape of a job of two nodes, and the record of its run as it was submitted."""
    options = read(*TOY, "cluster=slurm", "cluster.nodes=2", *words)
    store.write_record(directory, record.begin(options.resolved, directory, {}))
    return Shape(2, 2, 0, None)


def test_in_a_job_the_ranks_of_a_node_share_what_the_job_has_of_it(tmp_path, room):
    shape = of_job(tmp_path, "cluster.mem_gb=0.5", "train.micro_batch=max")
    finder = idle(tmp_path, config.of_record(store.load_record(tmp_path)), shape)
    assert finder.reuse(4)
    assert finder._room(None) == 512 * MIB
    assert finder._needed(4, Metrics(peak_memory_bytes=5 * MIB)) == 10 * MIB


def test_what_nccl_takes_beside_the_allocator_counts_on_virtual_gpus(tmp_path):
    finder = idle(tmp_path, read(*ANYWHERE, "virtual=h100", "train.micro_batch=max"))
    assert finder.reuse(4)
    metrics = Metrics(peak_reserved_bytes=5 * MIB, outside_memory_bytes=MIB)
    assert finder._needed(4, metrics) == 6 * MIB + NCCL_BUFFERS


def test_a_step_without_a_word_and_a_job_that_queues_again(tmp_path):
    shape = of_job(tmp_path, "train.micro_batch=max")
    assert not find_micro_batch(tmp_path, shape, ["sh", "-c", "exit 3"])
    written = store.load_record(tmp_path)
    assert (written["status"], written["error"]["type"]) == ("failed", "Broken")
    assert "failed: its step ended with exit status 3 and without a result" in written["error"]["message"]
    options = read(*TOY, "cluster=slurm", "cluster.requeue=true", "checkpoint.every_steps=2")
    assert run_spec.specify(options.changed(try_options(options)), World(0, 2, 0, 2, "SLURM"))


@pytest.mark.parametrize(("device", "steps"), [("device=cpu", 3 + 16), ("virtual=v100", 3)])
def test_a_try_in_fp16_lasts_until_the_loss_scale_is_small_enough_for_a_step(device, steps):
    """One that is skipped for an overflow leaves the optimizer without its state; nothing overflows on virtual GPUs."""
    assert try_options(read(*ANYWHERE, device, "precision=fp16"))["train.steps"] == steps


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("wanted", ["max", "best"])
def test_the_run_goes_on_with_what_was_found(tmp_path, wanted):
    carry_out(composed(*TOY, "train.global_batch=64", f"train.micro_batch={wanted}"), tmp_path)
    written = store.load_record(tmp_path)
    assert written["status"] == "ok", written["error"]
    assert written["config"]["train"]["micro_batch"] == wanted
    assert written["micro_batch"]["asked"] == wanted
    assert written["layout"]["micro_batch"] == written["micro_batch"]["found"]
    assert written["steps"] == 4
