"""One rank's profiled steps, as a trace has them, and sets of times."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptdbench.profiling import trace
from ptdbench.profiling.events import CommCall, intersect, length, subtract, union
from tests.profiling.made_trace import called, event, kernel, label, launched, milliseconds, sent, step, write

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
ROOT = "FSDP::root_post_backward_callback"
SENDS = "ncclDevKernel_SendRecv(...)"


@pytest.fixture
def read(tmp_path):
    return lambda *events, device="cpu": trace.read(write(tmp_path / "t.json", *events), device)


def reduced(end, begin=3.0, elements=1000):
    """An all-reduce that DDP calls, until ``end``."""
    return [
        called("allreduce_", begin, begin + 0.5, [elements]), sent("all_reduce", begin + 0.2, end, [elements]),
    ]  # fmt: skip


def times(call: CommCall) -> tuple[float, float]:
    return milliseconds([(call.start, call.end)])[0]


def phases(found: trace.Trace) -> dict[str, list[tuple[float, float]]]:
    return {name: milliseconds(times) for name, times in found.phases.items()}


def test_steps_and_micro_batches_have_their_phases(read):
    events = [*step(0, 1, 11, 13), event("aten::mm", 2, 5), event(BACKWARD, 6, 8), event("aten::mm", 6, 7)]
    recording = read(*events, event(BACKWARD, 8.5, 10))
    assert milliseconds(recording.steps) == [(0, 13)]
    expected = {"data": [(0, 1)], "forward": [(1, 6), (10, 11)], "backward": [(6, 10)], "optimizer": [(11, 13)]}
    assert phases(recording) == expected
    assert (recording.waits, recording.calls) == ([], [])
    passes = [(1, 2, 3), (4, 5, 6)]
    events = [one for a, b, c in passes for one in (event("aten::mm", a, b), event(BACKWARD, b, c))]
    recording = read(*step(0, 1, 6, 6.5), *events)
    assert phases(recording)["backward"] == [(2, 3), (5, 6)]
    assert phases(recording)["forward"] == [(1, 2), (3, 5)]


def test_ddp_waits_in_cpp_for_the_last_all_reduce(read):
    recording = read(*step(0, 1, 8, 9), event(BACKWARD, 1, 4), *reduced(7), event("aten::add_", 7.5, 8))
    assert milliseconds(recording.waits) == [(3, 3.5), (4, 7)]
    assert phases(recording)["backward"] == [(1, 3), (3.5, 4)]
    (call,) = recording.calls
    assert (call.operation, call.bytes, call.within[:1]) == ("all_reduce", 4000, ("ProfilerStep#3",))
    assert times(call) == (3, 7)


def test_waits_end_when_recorded_and_are_none_without_communication(read):
    """Of two waits the last one counts."""
    last = [event(BACKWARD, 1, 4), *reduced(7.6), event("aten::add_", 7.5, 8)]
    assert milliseconds(read(*step(0, 1, 8, 9), *last).waits) == [(3, 3.5), (4, 7.5)]
    last[2] = {**last[2], "tid": 98}
    recording = read(*step(0, 1, 8, 9), *reduced(5, begin=2.0, elements=500), *last)
    assert milliseconds(recording.waits) == [(2, 2.5), (3, 3.5), (4, 7.5)]
    recording = read(*step(0, 1, 8, 9), *reduced(3, begin=1.0), event(BACKWARD, 2, 4), event("aten::add_", 7.5, 8))
    assert milliseconds(recording.waits) == [(1, 1.5)]


def test_labeled_waits_know_their_caller(read):
    events = [
        label("FSDP::all_gather (0)", 1, 2),
        called("_allgather_base_", 1.2, 1.4, [8], **{"Input Dims": [[64], [32]]}),
        sent("all_gather", 1.3, 3, [32], "c10::BFloat16"),
        label(trace.WAITING, 2, 3.1),
        event("aten::mm", 4, 5),
    ]
    recording = read(*step(0, 1, 8, 9), *events)
    assert milliseconds(recording.waits) == [(1.2, 1.4), (2, 3.1)]
    (call,) = recording.calls
    assert (call.operation, call.bytes) == ("all_gather", 128)
    assert "FSDP::all_gather (0)" in call.within


def test_gloo_all_reduce_of_a_reduce_scatter_has_that_name(read):
    events = [
        called("_reduce_scatter_base_", 1, 2, [1], **{"Input Dims": [[32], [64], [], []]}),
        sent("all_reduce", 1.5, 3, [64]),
    ]
    (call,) = read(*step(0, 1, 8, 9), *events).calls
    assert (call.operation, call.bytes) == ("reduce_scatter", 256)


def test_operations_of_one_size_have_their_own_messages_within_steps(read):
    started = [called("allreduce_", 1, 1.5, [4]), called("allreduce_", 2, 2.5, [4])]
    recording = read(*step(0, 1, 8, 9), *started, sent("all_reduce", 2.6, 3, [4]), sent("all_reduce", 3, 4, [4]))
    assert [times(call) for call in recording.calls] == [(1, 3), (2, 4)]
    events = [label(trace.WAITING, 0, 12), called("allreduce_", 1, 2, [4]), sent("all_reduce", 1, 3, [4])]
    recording = read(*step(10, 11, 18, 19), *events)
    assert milliseconds(recording.waits) == [(10, 12)]
    assert len(recording.calls) == 1


def test_kernels_belong_to_the_phase_that_launched_them(read):
    collective = {
        "Collective name": "_allgather_base", "In msg nelems": 5, "Out msg nelems": 10, "dtype": "BFloat16",
        "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    events = [
        *(launched(at, number) for number, at in enumerate((1.1, 2.1, 3.1, 1.5, 2.8), start=1)),
        event(BACKWARD, 2, 2.5, thread=8), event(ROOT, 2.7, 3, "user_annotation", thread=8),
        kernel("gemm", 2, 4, 1), kernel("gemm", 6, 7, 2), kernel("reduce", 7, 8, 5), kernel("adam", 8.5, 9, 3),
        kernel("ncclDevKernel_AllGather_RING_LL(...)", 3, 5, 4, **collective),
    ]  # fmt: skip
    recording = read(*step(0, 1, 3, 10), *events, device="cuda")
    assert phases(recording) == {
        "data": [(0, 1)], "forward": [(2, 4)], "backward": [(6, 8)], "optimizer": [(8.5, 9)],
        "host": [(1, 2), (5, 6), (8, 8.5)],
    }  # fmt: skip
    assert milliseconds(recording.waits) == [(4, 5)]
    (call,) = recording.calls
    assert (call.operation, call.bytes, call.ranks) == ("all_gather", 20, (0, 1))


def test_copy_beside_kernels_takes_no_time_from_them(read):
    """As those of ``activations=offload``, in streams of their own."""
    happened = [
        *(launched(at, number) for number, at in enumerate((1.1, 1.2, 2.1), start=1)),
        event(BACKWARD, 2, 2.5, thread=8), kernel("gemm", 2, 3, 1),
        event("Memcpy DtoH", 2.5, 6.5, "gpu_memcpy", 5, correlation=2), kernel("gemm", 3.5, 6, 3),
    ]  # fmt: skip
    split = phases(read(*step(0, 1, 8, 9), *happened, device="cuda"))
    assert (split["forward"], split["backward"]) == ([(2, 3.5), (6, 6.5)], [(3.5, 6)])


def test_coalesced_nccl_messages_are_separate_calls(read):
    """Their kernel starts when their group ends, and has no facts: torch wrote them on the host before."""

    def recorded(name, start, end, **facts):
        known = {"Collective name": name, "dtype": "Float", "In msg nelems": 6, "Process Group Ranks": "[2, 3, 5]"}
        return event("record_param_comms", start, end, **known, **facts)

    alone = {"Collective name": "send", "In msg nelems": 3, "Process Group Ranks": "[2, 3, 5]", "Dst Rank": 3}
    happened = [
        event("gemm", 1, 2, "kernel", 5),
        recorded("send", 1, 1.5, **{"Dst Rank": 3}), label("nccl:send 0->1", 1.1, 1.4),
        launched(1.2, 1), kernel(SENDS, 2, 3, 1, **alone),
        recorded("wait", 1.6, 1.7),
        recorded("send", 2, 2.1, **{"Dst Rank": 5}), recorded("recv", 2.2, 2.3, **{"Src Rank": 2}),
        label("nccl:coalesced", 2.4, 2.8), launched(2.5, 2), kernel(SENDS, 4, 6, 2),
    ]  # fmt: skip
    calls = read(*step(0, 1, 8, 10), *happened, device="cuda").calls
    messages = [(call.operation, call.bytes, call.peer, times(call)) for call in calls]
    assert messages == [("send", 3, 1, (2, 3)), ("send", 24, 2, (4, 6)), ("recv", 24, 0, (4, 6))]


def test_messages_of_torch_2_15_have_peers_of_their_requests(read):
    """Of torch 2.15, whose NCCL records neither with whom a message is exchanged, nor the ranks of its group."""

    def recorded(name, start, end):
        known = {"Collective name": name, "dtype": "Float", "In msg nelems": 99, "Process Group Ranks": "[]"}
        return event("record_param_comms", start, end, **known, **{"Process Group Name": "be10"})

    def asked(name, start, end, rank, shape):
        inputs = {"Concrete Inputs": ["", "", rank, "0"], "Input Dims": [[shape], [], [], []]}
        return event(f"c10d::{name}", start, end, **inputs)

    def carries(start, end, number, name):
        known = {"Collective name": name, "In msg nelems": 99, "dtype": "Float", "Process Group Ranks": "[]"}
        return kernel(SENDS, start, end, number, **known)

    happened = [
        event("gemm", 1, 2, "kernel", 5),
        asked("send", 1, 1.5, "1", [1, 3]), recorded("send", 1.1, 1.5),
        launched(1.2, 1), carries(2, 3, 1, "send"),
        recorded("wait", 1.6, 1.7),
        asked("send", 2, 2.1, "2", [2, 3]), asked("recv_", 2.2, 2.3, "0", [4]), recorded("batch_op_issue", 2.4, 2.8),
        launched(2.5, 2), carries(4, 6, 2, "batch_op_issue"),
    ]  # fmt: skip
    calls = read(*step(0, 1, 8, 10), *happened, device="cuda").calls
    messages = [(call.operation, call.bytes, call.peer, times(call)) for call in calls]
    assert messages == [("send", 12, 1, (2, 3)), ("send", 24, 2, (4, 6)), ("recv", 16, 0, (4, 6))]
    assert {(call.ranks, call.group) for call in calls} == {(None, "be10")}


def test_messages_to_experts_have_the_name_of_their_label(read):
    facts = {"Collective name": "all_to_allv", "dtype": "Float", "In msg nelems": 6, "Process Group Ranks": "[0, 1]"}
    happened = [
        label("ptdbench::dispatch", 1, 1.5), launched(1.2, 1), launched(1.6, 2),
        label("ptdbench::combine", 2, 2.5), launched(2.2, 3),
        *(kernel(SENDS, 2 + number, 3 + number, number, **facts) for number in (1, 2, 3)),
        event("ptdbench::combine", 3, 4.5, "gpu_user_annotation", 5),
    ]  # fmt: skip
    calls = read(*step(0, 1, 8, 10), *happened, device="cuda").calls
    assert [call.operation for call in calls] == ["dispatch", "all_to_all", "combine"]


def test_wait_for_a_message_is_not_for_another_unfinished_one(read):
    """gloo notes the end of a message when it is awaited."""
    events = [
        called("send", 1, 1.2, [10]), sent("send", 1.1, 7, [10]), called("recv_", 2, 2.1, [10]),
        sent("recv", 2.1, 5, [10]), label(trace.WAITING, 3, 5.1), label(trace.WAITING, 6.9, 7.1),
    ]  # fmt: skip
    send, recv = read(*step(0, 1, 8, 9), *events).calls
    assert (milliseconds(send.held), milliseconds(recv.held)) == ([(1, 1.2), (6.9, 7.1)], [(2, 2.1), (3, 5.1)])
    assert [call.operation for call in (send, recv) if call.holds(sum(recv.held[1]) / 2)] == ["recv"]


def test_messages_of_one_size_have_their_kind_and_peer(read):
    events = [
        called("recv_", 1, 1.1, [10]), called("send", 2, 2.1, [10], **{"Concrete Inputs": ["", "", "3", "0"]}),
        sent("send", 2, 3, [10]), called("allreduce_", 4, 4.1, [10]), sent("all_reduce", 4, 5, [10]),
    ]  # fmt: skip
    calls = [(call.operation, call.peer, times(call)) for call in read(*step(0, 1, 8, 9), *events).calls]
    assert calls == [("send", 3, (2, 3)), ("all_reduce", None, (4, 5))]


WRONG = event("ncclDevKernel_AllReduce", 1, 2, "kernel", **{"In msg nelems": None})
ON_GPU = [event("gemm", 2, 4, "kernel", 5), sent("all_reduce", 4, 5, [10])]
GATHER = {"Collective name": "_allgather_base", "Group size": 2}
COPIED = [
    event("record_param_comms", 1, 2, **GATHER),
    event("Memcpy PtoP (Device -> Device)", 2, 3, "gpu_memcpy", 5),
    event("gemm", 3, 4, "kernel", 6),
]


def test_all_gathers_by_kernels_are_not_by_copy_engines(read):
    alone = event("record_param_comms", 1, 2, **GATHER | {"Group size": 1})
    sizes = {"In msg nelems": 10, "Out msg nelems": 20, "dtype": "Float"}
    kernel = event("ncclDevKernel_AllGather_RING_LL", 4, 5, "kernel", 7, **GATHER, **sizes)
    for events, operations in (([alone, *COPIED[1:]], []), ([*COPIED, kernel], ["all_gather"])):
        assert [call.operation for call in read(*step(0, 1, 6, 10), *events, device="cuda").calls] == operations


@pytest.mark.parametrize(("events", "device", "message"), [
    ([*step(0, 1, 3, 10), *ON_GPU], "cuda", "does not show when a GPU waits for gloo; try backend=nccl"),
    ([*step(0, 1, 3, 10), *COPIED], "cuda", "all-gathers by copy engines look like other copies"),
    ([*step(0, 1, 3, 10), WRONG], "cuda", "is not a trace of torch's profiler"),  # a field of another form
    ([event("aten::mm", 0, 1)], "cpu", "has no profiled step"),
    (step(0, 1, 3, 10), "cuda", "the profiler could not trace the GPU"),
])  # fmt: skip
def test_trace_without_phases_is_refused(read, events, device, message):
    with pytest.raises(ValueError, match=message):
        read(*events, device=device)


def test_large_traces_are_refused(read, monkeypatch):
    monkeypatch.setattr(trace, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"more than the 100 that are read; try profile\.steps=1"):
        read(*step(0, 1, 3, 10))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"traceEvents": [{"ph": "X", "name": "a"}]}', '{"traceEvents": 3}'])
def test_damaged_trace_is_refused(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"t\.json is not a trace of torch's profiler"):
        trace.read(path)


#: Sets of whole seconds, as intervals and as the seconds in them.
INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=8
)


def seconds(intervals) -> set[int]:
    return {second for start, end in intervals for second in range(start, end)}


@given(INTERVALS)
def test_union_is_disjoint_and_sorted(some):
    found = union(some)
    assert seconds(found) == seconds(some)
    assert length(found) == len(seconds(some))
    assert all(before[1] < after[0] for before, after in pairwise(found))


@given(INTERVALS, INTERVALS)
def test_intersection_and_difference_are_those_of_sets(some, others):
    some, others = union(some), union(others)
    assert seconds(intersect(some, others)) == seconds(some) & seconds(others)
    assert seconds(subtract(some, others)) == seconds(some) - seconds(others)
    assert length(intersect(some, others)) + length(subtract(some, others)) == length(some)
