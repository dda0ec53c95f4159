"""Replays of logs written by hand, whose times follow from closed forms."""

import time

import pytest

from ptdbench.prediction.replay import Action, Kind, replay

#: Streams: of compute, and of messages.
MAIN, SIDE = 1, 2


def work(seconds, stream=MAIN, host=0.0):
    return Action(Kind.WORK, host, stream, seconds)


def message(key, seconds=0.0, stream=SIDE, host=0.0):
    return Action(Kind.MESSAGE, host, stream, seconds, (key,))


def after(stream, event):
    """Another stream goes on after what is on the first."""
    return [Action(Kind.RECORD, stream=stream, subject=event), Action(Kind.WAIT, stream=3 - stream, subject=event)]


def test_streams_wait_for_events_and_the_host_for_streams():
    log = [
        work(100),
        *after(MAIN, "e"),
        work(50, SIDE),  # after the event, beside the next
        work(20),
        Action(Kind.AWAIT_STREAM, stream=SIDE),
        work(10, host=7),  # 7 after the host has waited until 150
        Action(Kind.AWAIT_EVENT, subject="e"),  # long past
        Action(Kind.AWAIT_DEVICE, host=1),
        Action(Kind.MARK, host=2),
    ]
    (line,) = replay([log])
    assert (line.starts[3], line.ends[3]) == pytest.approx((100, 150), abs=1e-9)
    assert (line.starts[6], line.ends[6]) == pytest.approx((157, 167), abs=1e-9)
    assert line.hosts == pytest.approx([0, 0, 0, 0, 0, 150, 157, 157, 167, 169], abs=1e-9)


#: A made trace of a device, in microseconds: when a call returned, what for, on which stream, and when it ran. The
#: device begins 1 to 3 us after it could, of which a replay knows nothing.
TRACE = [
    (10, Kind.WORK, MAIN, 12, 4_012),
    (15, Kind.RECORD, MAIN, "forward"),
    (16, Kind.WAIT, SIDE, "forward"),
    (30, Kind.MESSAGE, SIDE, 4_013, 7_013),
    (40, Kind.WORK, MAIN, 4_013, 9_013),
    (45, Kind.RECORD, SIDE, "sent"),
    (46, Kind.WAIT, MAIN, "sent"),
    (60, Kind.WORK, MAIN, 9_014, 10_014),
    (10_016, Kind.AWAIT_STREAM, MAIN, None),
    (10_516, Kind.WORK, MAIN, 10_519, 11_519),  # the host was busy, and the device idle
    (10_520, Kind.WORK, SIDE, 10_522, 14_522),
    (10_525, Kind.RECORD, SIDE, "copied"),
    (14_524, Kind.AWAIT_EVENT, MAIN, "copied"),
    (14_600, Kind.WORK, MAIN, 14_602, 19_998),
    (20_000, Kind.AWAIT_DEVICE, MAIN, None),
]


def test_a_trace_of_a_device_is_given_back():
    log, before = [], 0
    for at, kind, stream, *rest in TRACE:
        host = 0 if kind in (Kind.AWAIT_STREAM, Kind.AWAIT_EVENT, Kind.AWAIT_DEVICE) else at - before
        seconds, subject = (rest[1] - rest[0], (at,)) if len(rest) > 1 else (0, rest[0])
        log.append(Action(kind, host, stream, seconds, subject))
        before = at
    (line,) = replay([log])
    assert line.hosts[-1] == pytest.approx(20_000, rel=1e-3)
    starts = {place: row[3] for place, row in enumerate(TRACE) if len(row) > 4}
    assert [line.starts[place] for place in starts] == pytest.approx([*starts.values()], abs=20)


def test_a_message_moves_once_its_last_rank_has_called_it():
    first = [work(100), *after(MAIN, 0), message("m", 30), *after(SIDE, 1), work(5)]
    second = [work(300), *after(MAIN, 0), message("m", 30), work(10), *after(SIDE, 1), work(5)]
    lines = replay([first, second])
    assert [line.starts[3] for line in lines] == [100, 300]
    assert [line.ends[-1] for line in lines] == [335, 335]
    assert [line.ready for line in lines] == [{3: (300, 1)}] * 2
    (alone,) = replay([first])  # one rank that stands for all of them
    assert alone.ends[-1] == 135


def test_work_is_slower_while_messages_move_beside_it():
    log = [message("m", 40), work(30), work(30)]
    (line,) = replay([log], slowdown=0.25)
    assert line.ends[1:] == pytest.approx([37.5, 37.5 + 2.5 + 28], abs=1e-9)  # 2 of the last 30 beside it, in 2.5
    waits = replay([log, [work(20), *after(MAIN, 0), message("m", 40), work(30)]], slowdown=0.25)
    assert waits[0].ends[1:] == pytest.approx([20 + 10 * 1.25, 60 + 30 - 22], abs=1e-9)  # it does not move before 20


def test_ranks_that_wait_for_each_other_are_refused():
    there, back = message("there"), message("back")
    assert replay([[there, back], [there, back]])
    with pytest.raises(ValueError, match="2 of 2 ranks wait for messages"):
        replay([[there, back], [back, there]])


def test_messages_in_another_order_on_other_streams_are_no_circle():
    first = [message("a", 1, 5), message("b", 1, 6), work(1)]
    second = [message("b", 1, 6), message("a", 1, 5), work(1)]
    assert [line.ends[2] for line in replay([first, second], slowdown=1.0)] == [1.5, 1.5]  # half of it beside them


def forward_first(ranks, micros, rank):
    """GPipe."""
    return [("F", 0, m) for m in range(micros)] + [("B", 0, m) for m in range(micros)]


def alternating(ranks, micros, rank, warmup=None, chunks=1):
    """1F1B; with several chunks interleaved, as Megatron has it."""
    count = micros * chunks
    warmup = min(count, 2 * (ranks - rank - 1) + (chunks - 1) * ranks if chunks > 1 else ranks - rank - 1)
    chunk = [k % (ranks * chunks) // ranks for k in range(count)]
    micro = [k // (ranks * chunks) * ranks + k % ranks for k in range(count)]
    forwards = [("F", chunk[k], micro[k]) if chunks > 1 else ("F", 0, k) for k in range(count)]
    backwards = [("B", chunks - 1 - chunk[k], micro[k]) if chunks > 1 else ("B", 0, k) for k in range(count)]
    steady = [op for pair in zip(forwards[warmup:], backwards, strict=False) for op in pair]
    return forwards[:warmup] + steady + backwards[count - warmup :]


def zero_bubble(ranks, micros, rank):
    """ZB-H1: gradients of weights wait until the pipeline drains, so that at most ``ranks`` micro-batches are alive."""
    order, weights = [], 0
    for op in alternating(ranks, micros, rank):
        order.append(op)
        if op[0] == "B" and op[2] >= rank:
            order.append(("W", 0, weights))
            weights += 1
    return order + [("W", 0, m) for m in range(weights, micros)]


def pipeline(schedule, ranks, micros, seconds, chunks=1):
    """The logs of a pipeline whose messages take no time, and in which nothing else waits."""
    last, logs = ranks * chunks - 1, []
    for rank in range(ranks):
        log = []
        for op, chunk, micro in schedule(ranks, micros, rank):
            stage, step = chunk * ranks + rank, 1 if op == "F" else -1
            if op != "W" and 0 <= stage - step <= last:
                log.append(message((op, stage - step, micro), stream=("receive", op)))
                log += [
                    Action(Kind.RECORD, 0.0, ("receive", op), 0.0, "r"),
                    Action(Kind.WAIT, stream=MAIN, subject="r"),
                ]
            log.append(work(seconds[op]))
            if op != "W" and 0 <= stage + step <= last:
                log += [Action(Kind.RECORD, stream=MAIN, subject="s"), Action(Kind.WAIT, 0.0, ("send", op), 0.0, "s")]
                log.append(message((op, stage, micro), stream=("send", op)))
        logs.append(log)
    return max(max(line.ends) for line in replay(logs))


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (4, 12)])
def test_pipelines_take_as_long_as_their_formulas_say(ranks, micros):
    both, seconds = 3.0, {"F": 1.0, "B": 2.0}
    for schedule in (forward_first, alternating):
        assert pipeline(schedule, ranks, micros, seconds) == pytest.approx((micros + ranks - 1) * both, abs=1e-9)
    halves = {op: of / 2 for op, of in seconds.items()}
    took = pipeline(lambda *of: alternating(*of, chunks=2), ranks, micros, halves, chunks=2)
    assert took == pytest.approx(micros * both + (ranks - 1) * both / 2, abs=1e-9)
    thirds = dict.fromkeys("FBW", 1.0)
    assert pipeline(zero_bubble, ranks, micros, thirds) == pytest.approx(3 * micros + ranks - 1, abs=1e-9)


def test_a_million_pieces_of_work_take_seconds():
    layer = [work(1e-6, host=1e-6), *after(MAIN, "e"), message("m", 1e-6), work(1e-6), work(1e-6)]
    log = [action._replace(subject=((number, "m"),)) if action.kind == Kind.MESSAGE else action
           for number in range(8_000) for action in layer]  # fmt: skip
    started = time.process_time()
    replay([log], slowdown=0.2)
    assert time.process_time() - started < 10 * len(log) / 1e6 * 5  # 5: machines differ
