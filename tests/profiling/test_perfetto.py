import gzip
import json

from ptdbench.profiling import perfetto, trace
from tests.profiling.made_trace import EPOCH, MAIN, called, event, sent, step, write


def merged(tmp_path, *of_ranks, names=("rank 0", "rank 1"), ahead=(0.0, 0.0)):
    paths = []
    for rank, events in enumerate(of_ranks):
        written = write(tmp_path / f"{rank}.json", *events)
        paths.append(tmp_path / f"rank{rank}.json.gz")
        perfetto.compress(written, paths[-1], {"rank": rank})
    perfetto.merge(paths, names, ahead, tmp_path / "trace.json.gz")
    return json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]


def test_ranks_are_processes_of_their_own_by_name(tmp_path):
    events = merged(tmp_path, step(0, 1, 2, 3), step(0, 1, 2, 3), names=("rank 0, stage 0", "rank 1, stage 1"))
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(named.values()) == ["rank 0, stage 0", "rank 1, stage 1"]
    steps = [event for event in events if event["name"].startswith(trace.STEP)]
    assert [named[event["pid"]] for event in steps] == ["rank 0, stage 0", "rank 1, stage 1"]


def test_all_ranks_are_on_the_clock_of_rank_0(tmp_path):
    events = merged(tmp_path, [event("a", 5, 6)], [event("b", 7, 8)], ahead=(0.0, 2e-3))
    times = {event["name"]: event["ts"] for event in events if event["ph"] == "X"}
    assert times["b"] - times["a"] == 0


def test_a_rank_whose_trace_begins_at_another_time_is_moved(tmp_path):
    for rank, name in enumerate("ab"):
        made = {"baseTimeNanoseconds": (EPOCH + rank) * 10**9, "traceEvents": [event(name, 5, 6)]}
        (tmp_path / f"{rank}.json").write_text(json.dumps(made))
        perfetto.compress(tmp_path / f"{rank}.json", tmp_path / f"{rank}.json.gz", {})
    perfetto.merge([tmp_path / "0.json.gz", tmp_path / "1.json.gz"], "ab", (0, 0), tmp_path / "t.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    times = {event["name"]: event["ts"] for event in events if event["ph"] == "X"}
    assert times["b"] - times["a"] == 1e6


def test_arrows_stay_inside_of_their_rank(tmp_path):
    arrow = {"ph": "s", "id": 3, "pid": 1, "tid": 7, "ts": 0.0, "cat": "fwdbwd", "name": "fwdbwd"}
    events = merged(tmp_path, [arrow], [arrow])
    ids = [event["id"] for event in events if event["ph"] == "s"]
    assert ids[0] != ids[1]
    assert all(isinstance(number, int) for number in ids)  # Perfetto reads no others


def test_a_message_that_outlasts_what_began_it_has_a_row_of_its_own(tmp_path):
    """Perfetto drops what ends after what it is drawn in."""
    call, message = called("send", 1, 2, [8]), {**sent("send", 1.5, 5, [8]), "tid": MAIN}
    events = merged(tmp_path, [call, message, event("aten::mm", 3, 4)], names=["rank 0"], ahead=[0.0])
    assert [event["name"] for event in events if event["ph"] == "X"] == ["c10d::send", "aten::mm"]
    begin, end = (event for event in events if event["name"] == "gloo:send")
    assert (begin["ph"], end["ph"], begin["id"] == end["id"], end["ts"] - begin["ts"]) == ("b", "e", True, 3500)


def test_what_belongs_to_no_process_is_left_out(tmp_path):
    mark = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 4.0}
    assert mark["name"] not in [event["name"] for event in merged(tmp_path, [mark], names=["rank 0"], ahead=[0.0])]


def test_the_trace_of_one_rank_says_which_and_can_still_be_read(tmp_path):
    merged(tmp_path, step(0, 1, 2, 3), names=["rank 0"], ahead=[0.0])
    written = json.loads(gzip.decompress((tmp_path / "rank0.json.gz").read_bytes()))
    assert written["distributedInfo"] == {"rank": 0}
    (tmp_path / "again.json").write_text(json.dumps(written))
    assert len(trace.read(tmp_path / "again.json").steps) == 1
