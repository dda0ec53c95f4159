import gzip
import json

import pytest

from ptdbench.profiling import perfetto, trace
from tests.profiling.made_trace import EPOCH, event, step, write


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
