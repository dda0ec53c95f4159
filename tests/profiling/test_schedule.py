"""Schedules of pipelines, from merged traces."""

from ptdbench.profiling import perfetto, schedule
from ptdbench.profiling.schedule import lines, read
from tests.profiling.made_trace import event, label, step
from tests.profiling.test_perfetto import merged


def chunk(word, start, end):
    return label(f"{schedule.CHUNK}{word}", start, end)


def test_passes_of_ranks_are_on_one_clock_and_of_the_step_of_median_length(tmp_path):
    rank0 = [*step(0, 1, 2, 9), chunk("0F0", 1, 2), *step(10, 11, 17, 18), chunk("0F0", 11, 13), chunk("0B0", 15, 17)]
    rank0 += [*step(20, 21, 22, 23), chunk("0F0", 21, 22)]  # of 9, 8 and 3 ms
    rank1 = [*step(11, 12, 17, 18), chunk("1F0", 15, 16), event("aten::mm", 15, 16), chunk("1B0", 16, 17)]
    merged(tmp_path, rank0, rank1, ahead=2e-3)
    passes = read(tmp_path / perfetto.NAME)
    assert [(one.rank, one.stage, one.kind, one.microbatch) for one in passes] == [
        (0, 0, "F", 0), (1, 1, "F", 0), (1, 1, "B", 0), (0, 0, "B", 0),
    ]  # fmt: skip
    assert [round(1e3 * one.start, 3) for one in passes] == [0, 2, 3, 4]
    assert [*lines(passes)] == ["rank 0: F0 B0, idle 33 %", "rank 1: F0 B0, idle 67 %"]  # 4 and 2 of 6 ms


def test_a_gpu_has_its_own_times_and_a_rank_with_several_stages_names_them(tmp_path):
    on_gpu = [event(f"{schedule.CHUNK}{word}", *times, "gpu_user_annotation", thread) for word, times, thread in (
        ("0F0", (2, 4), 7), ("2F0", (4, 6), 7), ("0F0", (2, 3), 20),  # the last in the stream of messages
    )]  # fmt: skip
    merged(tmp_path, [*step(0, 1, 8, 9), chunk("0F0", 1, 1.1), chunk("2F0", 1.1, 1.2), *on_gpu])
    passes = read(tmp_path / perfetto.NAME)
    assert [round(1e3 * one.seconds, 3) for one in passes] == [2, 2]
    assert [*lines(passes)] == ["rank 0: 0F0 2F0, idle 0 %"]


def test_a_trace_without_a_pipeline_or_damaged_has_none(tmp_path):
    merged(tmp_path, step(0, 1, 2, 3))
    assert read(tmp_path / perfetto.NAME) == [*lines([])] == []
    (tmp_path / perfetto.NAME).write_bytes(b"\x1f\x8b cut")
    assert read(tmp_path / perfetto.NAME) == []
