"""The trace of all ranks, and the schedules of pipelines in it."""

import gzip
import json

import pytest

from ptdbench.profiling import perfetto, trace
from ptdbench.profiling.perfetto import lines_of_ranks, read_passes
from tests.profiling.made_trace import EPOCH, event, label, step, write


def merged(tmp_path, *of_ranks, ahead=0.0, later=0):
    """One trace; the clock of rank 1 is so many seconds ahead, and its trace begins so many seconds later."""
    paths = [tmp_path / f"rank{rank}.json.gz" for rank in range(len(of_ranks))]
    for rank, events in enumerate(of_ranks):
        written = write(tmp_path / f"{rank}.json", *events, epoch=EPOCH + rank * later)
        perfetto.compress(written, paths[rank], {"rank": rank})
    names = [f"rank {rank}, stage {rank}" for rank in range(len(of_ranks))]
    perfetto.merge(paths, names, [rank * ahead for rank in range(len(of_ranks))], tmp_path / "trace.json.gz")
    return json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]


def test_ranks_are_named_processes(tmp_path):
    events = merged(tmp_path, step(0, 1, 2, 3), step(0, 1, 2, 3))
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(named.values()) == ["rank 0, stage 0", "rank 1, stage 1"]
    steps = [event for event in events if event["name"].startswith(trace.STEP)]
    assert [named[event["pid"]] for event in steps] == ["rank 0, stage 0", "rank 1, stage 1"]


@pytest.mark.parametrize(("ahead", "later", "microseconds"), [(2e-3, 0, 0), (0.0, 1, 1e6 + 2000)])
def test_clocks_follow_rank_0(tmp_path, ahead, later, microseconds):
    events = merged(tmp_path, [event("a", 5, 6)], [event("b", 7, 8)], ahead=ahead, later=later)
    times = {event["name"]: event["ts"] for event in events if event["ph"] == "X"}
    assert times["b"] - times["a"] == microseconds


def test_ids_of_arrows_are_their_own(tmp_path):
    arrow = {"ph": "s", "id": 3, "pid": 1, "tid": 7, "ts": 0.0, "cat": "fwdbwd", "name": "fwdbwd"}
    events = merged(tmp_path, [arrow], [arrow])
    ids = [event["id"] for event in events if event["ph"] == "s"]
    assert ids[0] != ids[1]
    assert all(isinstance(number, int) for number in ids)  # Perfetto reads no others


def test_events_without_process_are_dropped_and_one_rank_is_readable(tmp_path):
    mark = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 4.0}
    assert mark["name"] not in [event["name"] for event in merged(tmp_path, [mark])]
    merged(tmp_path, step(0, 1, 2, 3))
    written = json.loads(gzip.decompress((tmp_path / "rank0.json.gz").read_bytes()))
    assert written["distributedInfo"] == {"rank": 0}
    (tmp_path / "again.json").write_text(json.dumps(written))
    assert len(trace.read(tmp_path / "again.json").steps) == 1


def chunk(word, start, end):
    return label(f"{perfetto.CHUNK}{word}", start, end)


def test_passes_of_ranks_are_on_one_clock_and_of_the_step_of_median_length(tmp_path):
    rank0 = [*step(0, 1, 2, 9), chunk("0F0", 1, 2), *step(10, 11, 17, 18), chunk("0F0", 11, 13), chunk("0B0", 15, 17)]
    rank0 += [*step(20, 21, 22, 23), chunk("0F0", 21, 22)]  # of 9, 8 and 3 ms
    rank1 = [*step(11, 12, 17, 18), chunk("1F0", 15, 16), event("aten::mm", 15, 16), chunk("1B0", 16, 17)]
    merged(tmp_path, rank0, rank1, ahead=2e-3)
    passes = read_passes(tmp_path / perfetto.NAME)
    assert [(chunk.rank, chunk.stage, chunk.kind, chunk.microbatch) for chunk in passes] == [
        (0, 0, "F", 0), (1, 1, "F", 0), (1, 1, "B", 0), (0, 0, "B", 0),
    ]  # fmt: skip
    assert [round(1e3 * chunk.start, 3) for chunk in passes] == [0, 2, 3, 4]
    assert [*lines_of_ranks(passes)] == ["rank 0: F0 B0, idle 33%", "rank 1: F0 B0, idle 67%"]  # 4 and 2 of 6 ms


def test_a_gpu_has_its_own_times_and_a_rank_with_several_stages_names_them(tmp_path):
    on_gpu = [event(f"{perfetto.CHUNK}{word}", *times, "gpu_user_annotation", thread) for word, times, thread in (
        ("0F0", (2, 4), 7), ("2F0", (4, 6), 7), ("0F0", (2, 3), 20),  # the last in the stream of messages
    )]  # fmt: skip
    merged(tmp_path, [*step(0, 1, 8, 9), chunk("0F0", 1, 1.1), chunk("2F0", 1.1, 1.2), *on_gpu])
    passes = read_passes(tmp_path / perfetto.NAME)
    assert [round(1e3 * chunk.seconds, 3) for chunk in passes] == [2, 2]
    assert [*lines_of_ranks(passes)] == ["rank 0: 0F0 2F0, idle 0%"]


def test_a_trace_without_a_pipeline_or_damaged_has_none(tmp_path):
    merged(tmp_path, step(0, 1, 2, 3))
    assert read_passes(tmp_path / perfetto.NAME) == [*lines_of_ranks([])] == []
    (tmp_path / perfetto.NAME).write_bytes(b"\x1f\x8b cut")
    assert read_passes(tmp_path / perfetto.NAME) == []
