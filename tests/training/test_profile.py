"""The profiling pass, through the product: a sleep is found in its phase and on its rank, however busy the machine."""

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ptdbench.data.feed import Feed
from ptdbench.models.decoder import Decoder
from ptdbench.models.experts import Experts
from ptdbench.parallel import apply, context
from ptdbench.parallel.pipeline_schedules import SCHEDULES
from ptdbench.parallel.pipeline_stages import Stage
from ptdbench.profiling import trace
from ptdbench.profiling.events import CommCall, Interval, intersect, kernel_kind, length, union
from ptdbench.profiling.phases import PHASES, PhaseTimes, Ready, divided, partition
from ptdbench.training import profile, traces
from ptdbench.training.loop import Update
from tests.conftest import composed, record_of
from tests.daily import cases
from tests.shared_ranks import RANKS, Failed, carry_out

pytestmark = pytest.mark.ranks

#: Seconds of a sleep.
SLEEP = 0.2

#: Numbers that gloo takes about as long to add up.
LARGE = 24_000_000
STEPS = 2

TINY = (
    "model=gpt_tiny", "model.layers=2", "model.width=16", "model.heads=2", "model.sequence_length=8",
    "train.global_batch=4", "train.steps=3", "train.warmup_steps=1", f"profile.steps={STEPS}",
)  # fmt: skip
PIPELINE = ("parallel=pdp", "parallel.pipeline=2", "parallel.microbatches=4", "model.layers=4")


def asleep(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleeps_first(*arguments: Any, **options: Any) -> Any:
        begin = time.time()
        time.sleep(SLEEP)
        SLEPT.append((begin, time.time()))
        return original(*arguments, **options)

    return sleeps_first


def slow_all_reduce(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's all-reduce behind another one that takes longer than a step."""
    large = torch.ones(LARGE)
    begin = time.time()
    work = dist.all_reduce(large, async_op=True)
    work.get_future().add_done_callback(lambda _: SLEPT.append((begin, time.time())))
    last = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    both = torch.futures.collect_all([work.get_future(), last.get_future()])
    return both.then(lambda futures: futures.value()[1].value()[0])


def slow_replicate(original: Callable[..., Any]) -> Callable[..., Any]:
    def replicated(*arguments: Any, **options: Any) -> Any:
        part = original(*arguments, **options)
        part.runner.register_comm_hook(None, slow_all_reduce)
        return part

    return replicated


#: What is slowed down: the attribute, and what takes its place.
PLACES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "data": (Feed, "_next_batch", asleep), "forward": (Decoder, "forward", asleep),
    "stage": (Stage, "forward", asleep), "experts": (Experts, "forward", asleep),
    "ring": (context, "attention_kernel", asleep), "optimizer": (Update, "__call__", asleep),
    "collective": (apply, "replicate", slow_replicate),
}  # fmt: skip


#: When this rank slept, in seconds since the epoch.
SLEPT: list[Interval] = []


def run_slowed(configuration: Any, directory: Path, place: str, ranks: list[int]) -> tuple[Any, ...]:
    """In a rank: a run in which something sleeps on some ranks; when it slept, and what the pass made of its trace."""
    SLEPT.clear()
    owner, name, change = PLACES[place]
    seen: list[tuple[trace.Trace, Sequence[Ready]]] = []

    def watched(of_rank: trace.Trace, ready: Sequence[Ready]) -> PhaseTimes:
        seen.append((of_rank, ready))
        return partition(of_rank, ready)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profile, "partition", watched)
        if int(os.environ["RANK"]) in ranks:
            patched.setattr(owner, name, change(getattr(owner, name)))
        carry_out(configuration, directory)
    return list(SLEPT), *seen[0]


class Rank:
    def __init__(self, of_rank: trace.Trace, ready: Sequence[Ready], slept: Sequence[Interval]) -> None:
        self.phases: dict[str, Sequence[Interval]] = dict(of_rank.phases)
        self.pieces = list(divided(of_rank, ready))
        self.slept = intersect(union(slept), union(of_rank.steps))
        self.calls, self.ready = of_rank.calls, ready

    def share(self, times: Iterable[Interval]) -> float:
        """The share of the sleep that lies in these times."""
        return length(intersect(self.slept, union(times))) / length(self.slept)

    def waited(self, late: bool, operations: Collection[str], last: int | None = None) -> float:
        """The share of the sleep in which this rank waited for such a call."""
        return self.share(
            interval
            for interval, call, is_late in self.pieces
            if call is not None
            and is_late == late
            and self.calls[call].operation in operations
            and (last is None or self.ready[call].last == last)
        )

    @property
    def waits(self) -> float:
        return self.share(interval for interval, _, _ in self.pieces)


def slowed(directory: Path, *overrides: str, place: str, ranks: list[int]) -> list[Rank]:
    """Both ranks of a run in which something slept; a rank that did not is judged by the sleep of the other."""
    of_ranks = RANKS.call(2, run_slowed, composed(*TINY, *overrides), directory, place, ranks)
    record = record_of(directory)
    assert record["status"] == "ok", record["error"]
    assert len(record["phases"]["waited_for_most"]) == STEPS
    slept = of_ranks[ranks[0]][0]
    assert len(slept) > STEPS
    return [Rank(*of_rank, own or slept) for own, *of_rank in of_ranks]


#: On a busy machine a rank learns late that it need not wait any longer.
MOST = 0.6

COLLECTIVE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
STAGES = " ".join([*PIPELINE, "parallel.microbatches=2"])


@cases(("layout", "place", "rank", "phase"), [
    ("parallel=ddp", "data", 1, "data"),
    ("parallel=ddp", "optimizer", 0, "optimizer"),
    ("parallel=ddp", "forward", 1, "forward"),
    ("parallel=fsdp", "forward", 0, "forward"),
    ("parallel=ddp parallel.context=2 parallel.context_method=ring", "ring", 1, None),
    (f"{STAGES} parallel.schedule=1f1b", "stage", 1, "forward"),
    (f"{STAGES} parallel.schedule=interleaved1f1b", "stage", 1, "forward"),  # messages are awaited long after
], daily=[
    ("parallel=ddp", "data", 1, "data"),
    ("parallel=fsdp", "forward", 0, "forward"),
    (f"{STAGES} parallel.schedule=1f1b", "stage", 1, "forward"),
])  # fmt: skip
def test_sleep_is_found_in_its_phase_and_awaited_by_the_peer(tmp_path, layout, place, rank, phase):
    of_ranks = slowed(tmp_path, *layout.split(), place=place, ranks=[rank])
    if phase:
        assert of_ranks[rank].share(of_ranks[rank].phases[phase]) > 0.99
    other = of_ranks[1 - rank]
    operations = ("recv", "send") if place == "stage" else COLLECTIVE
    assert other.waited(True, operations, last=rank) > MOST * other.waits


def test_a_slow_link_is_exposed_communication(tmp_path):
    ranks = slowed(tmp_path, "parallel=ddp", place="collective", ranks=[0, 1])
    both = intersect(ranks[0].slept, ranks[1].slept)  # before that a rank waits for the other to call it
    for rank in ranks:
        rank.slept = both
        assert rank.waits > MOST
        assert rank.waited(False, ["all_reduce"]) > 0.9 * rank.waits


def test_slow_experts_are_waited_for_where_they_combine(tmp_path):
    """Only real ranks send by labels, differently many, and call by the host's order."""
    options = ["parallel=ep", "model.experts=4", "model.expert_hidden=8", "model.key_value_heads=2"]
    of_ranks = slowed(tmp_path, "model=moe_tiny", *options, place="experts", ranks=[1])
    assert of_ranks[0].waited(True, ["combine"], last=1) > MOST * of_ranks[0].waits
    record = record_of(tmp_path)["phases"]
    slept = SLEEP * record["step_seconds"] / record["profiled_step_seconds"]
    assert record["ranks"]["experts"][0] > MOST * slept


@pytest.mark.thorough
def test_every_layout_is_divided_without_rest(shared_run):
    layouts = [
        ["parallel=single"],
        ["parallel=hsdp", "parallel.replicate=2", "parallel.shard=2", "cluster.ranks_per_node=4"],
        ["parallel=tp", "parallel.sequence=true"],
        ["parallel=fsdp", "parallel.context=2", "parallel.shard=1"],
        ["parallel=ddp", "parallel.context=2", "parallel.context_method=ring"],
        ["parallel=ddp", "parallel.optimizer=zero1", "train.clip_norm=1"],
        ["parallel=fsdp", "activations=recompute", "train.micro_batch=1"],
        *([*PIPELINE, f"parallel.schedule={name}"] for name, schedule in SCHEDULES.items() if schedule.is_supported),
    ]
    for layout in layouts:
        record = shared_run(*TINY, *layout)
        assert record["status"] == "ok", (layout, record["error"])
        breakdown = record["phases"]
        assert breakdown["reason"] is None, layout
        assert list(breakdown["ranks"]) == list(PHASES)
        for rank in range(record["world_size"]):
            of_rank = {name: breakdown["ranks"][name][rank] for name in PHASES}
            assert min(of_rank.values()) >= 0, (layout, of_rank)
            assert sum(of_rank.values()) == pytest.approx(breakdown["step_seconds"]), layout
            assert of_rank["forward"] > 0, layout
            assert of_rank["backward"] > 0, layout
        assert (breakdown["bubble_formula"] is not None) == ("parallel=pdp" in layout)


def test_bytes_are_those_of_the_weights_and_timed_steps_those_without_a_pass(shared_run):
    """DDP averages all gradients once; FSDP gathers the first of two layers twice and the rest once."""
    record, without = shared_run(*TINY, "parallel=ddp"), shared_run(*TINY, "parallel=ddp", "profile.steps=0")
    assert record["losses"] == without["losses"]
    assert record["steps"] == without["steps"] == 3
    assert without["phases"] is None
    size = 4 * record["parameters"]
    sent = record["phases"]["communication"]["all_reduce"]
    assert sent["bytes"] == size
    sent = shared_run(*TINY, "parallel=fsdp", "train.clip_norm=1")["phases"]["communication"]
    assert sent["reduce_scatter"]["bytes"] == size
    assert 1.2 * size < sent["all_gather"]["bytes"] < 1.5 * size
    assert sent["all_reduce"]["calls"] == 1  # of the norm


@pytest.mark.parametrize(("timed", "count"), [(0.1, 5), (None, 5), (25.0, 2), (100.0, 1)])
def test_as_many_steps_are_profiled_as_fit_into_a_minute(timed, count):
    assert profile._count(5, timed) == count


@pytest.mark.parametrize(("timed", "host", "duration"), [(9.0, 4, 18), (5.0, 0, 14), (11.0, 6, 20)])
def test_profiler_overhead_is_subtracted_from_host_time(timed, host, duration):
    """Two steps of 10 s, of which the GPU waited 6 s: no kernel was slower than in a timed step."""
    of_rank = PhaseTimes(2, 20.0, {"forward": 14.0, "host": 6.0}, {}, [])
    left = profile._without_profiler(of_rank, timed)
    assert (left.duration, left.seconds) == (duration, {"forward": 14.0, "host": host})


def test_messages_of_one_kernel_of_nccl_begin_with_the_last_of_them():
    calls = [
        CommCall("send", 8, 1.0, 6.0, peer=0),
        CommCall("recv", 8, 1.0, 6.0, peer=2),
        CommCall("send", 8, 7.0, 8.0, peer=0),
    ]
    of_each = [Ready(1.0), Ready(5.0, last=2), Ready(7.0)]
    assert traces.together(calls, of_each) == [Ready(5.0, last=2), Ready(5.0, last=2), Ready(7.0)]


@pytest.mark.parametrize(("name", "expected"), [
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ("triton_poi_fused__to_copy_0", "compiled"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "product"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "product"),
    ("void at::native::vectorized_elementwise_kernel<8, converting_copy_kernel_cuda<float, Half>>", "copy"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
    ("sm80_xmma_fprop_implicit_gemm_conv_indexed_bf16bf16", "convolution"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "norm"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copy"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
    ("a kernel of somebody's own", "other"),
])  # fmt: skip
def test_kernel_kinds(name, expected):
    assert kernel_kind(name) == expected


def run_broken(configuration: Any, directory: Path, name: str, error: Exception) -> None:
    """In a rank: a run in whose profiling pass a function raises."""

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"ptdbench.{name}", Mock(side_effect=error))
        carry_out(configuration, directory)


def test_a_run_whose_pass_fails_was_ok_before(tmp_path):
    with pytest.raises(Failed):
        RANKS.call(2, run_broken, composed(*TINY), tmp_path, "training.profile.partition", ZeroDivisionError())
    record = record_of(tmp_path)
    assert (record["status"], record["steps"], record.get("phases")) == ("ok", 3, None)
    assert record["metrics"]["samples_per_second"] > 0


def test_a_run_whose_memory_is_not_split_keeps_its_phases_and_its_curves_end_well(tmp_path):
    with pytest.raises(Failed):
        RANKS.call(2, run_broken, composed(*TINY), tmp_path, "training.profile._usage", ZeroDivisionError())
    record = record_of(tmp_path)
    assert (record["status"], record["phases"]["steps"], record["memory"]) == ("ok", STEPS, None)
    assert record["nodes"]
    curves = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in curves.Scalars("summary/ok")][-1] == 1.0
    assert [event.step for event in curves.Scalars("step/learning_rate")] == [0, 1, 2]


def test_a_trace_that_is_written_in_part_is_removed(tmp_path):
    def write(path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "trace" / "rank0.json.gz"
    assert traces._written(path, write) == "[Errno 28] No space left on device"
    assert not path.exists()


@pytest.mark.thorough
def test_traces_that_cannot_be_written_cost_nothing_else(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    RANKS.call(2, run_broken, composed(*TINY, "profile.trace=true"), tmp_path, "profiling.perfetto.compress", full)
    record = record_of(tmp_path)
    assert (record["status"], record["phases"]["reason"]) == ("ok", None)
    assert record["memory"]["moments"]
    assert not (tmp_path / "trace.json.gz").exists()
