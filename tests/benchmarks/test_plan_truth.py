"""Whether plans are fast and right: what counts as an answer, as confirmed at once, and as the largest that fits."""

import json
import sys
from dataclasses import replace

import pytest

from benchmarks import plan_truth
from benchmarks.plan_truth import RANKS, Carried
from ptdbench.measure.memory import HostMemory

ROOM = 1000


def planned(*sizes, largest=0, status="ok"):
    """The record of a plan that has tried these micro-batches, of which negative ones were too large."""
    tries = [{"micro_batch": abs(size), "fits": size > 0} for size in sizes]
    return {"status": status, "plan": {"tries": tries, "largest_micro_batch": largest}}


@pytest.mark.parametrize(
    ("record", "at_once"),
    [
        (planned(1, 8, -30, 10, -12, largest=10), True),
        (planned(1, 8, 30, 90, largest=90), True),
        (planned(1, -8, 3, -4, largest=3), True),
        (planned(1, 8, 30, -36, largest=30), True),  # the line had seen no room for 36
        (planned(1, 8, 30, -40, -36, largest=30), False),
        (planned(1, 8, -30, -12, 10, largest=10), False),
        (planned(1, 8, -30, 10, 12, -15, largest=12), False),
        (planned(1, 8, -30, largest=8), False),  # no line has proposed anything
        ({"status": "failed", "plan": None}, False),
        ({"status": "ok", "plan": {"reason": "no compiler"}}, False),
    ],
)
def test_a_proposal_is_confirmed_at_once(record, at_once):
    assert plan_truth.is_at_once(record) is at_once


def test_an_answer_is_of_ranks_that_were_carried_out():
    fits, fits_not = planned(1, -8, largest=1), planned(-1, status="oom")
    other = [planned(1, status="failed"), {"status": "failed"}, {"status": "ok", "plan": {"reason": "no compiler"}}]
    assert Carried(1.0, 0, 0, [fits, fits_not, *other]).answers == 2


@pytest.mark.parametrize(
    ("changed", "is_met"),
    [({}, True), ({"seconds": 2.1}, False), ({"pss": 11}, False), ({"records": []}, False)],
)
def test_a_command_is_judged_by_its_answers_time_and_memory(changed, is_met):
    carried = replace(Carried(2.0, 10, 99, [planned(1, largest=1)]), **changed)
    assert plan_truth._told("", carried, 1, 2.0, 10) is is_met


def ended(status, peak=None):
    return {"status": status, "metrics": {"peak_memory_bytes": peak}, "micro_batch": {"room_bytes": ROOM}}


@pytest.mark.parametrize(
    ("status", "larger", "is_right"),
    [
        ("ok", ended("oom"), True),
        ("ok", ended("ok", ROOM // RANKS + 1), True),
        ("ok", ended("ok", ROOM // RANKS), False),
        ("ok", ended("failed", ROOM), False),
        ("ok", {"status": "failed", "metrics": None}, False),
        ("ok", None, False),
        ("oom", ended("oom"), False),
    ],
)
def test_the_largest_is_found_if_the_next_one_does_not_fit(status, larger, is_right):
    assert plan_truth.is_found(ended(status), larger) is is_right


def test_every_run_has_to_find_it(monkeypatch, capsys):
    found, lost = (ended("ok"), ended("oom")), (ended("failed") | {"micro_batch": None}, None)
    monkeypatch.setattr(plan_truth, "searched", lambda: runs.pop(0))
    runs = [found, found]
    assert plan_truth._found(2)
    assert capsys.readouterr().out.splitlines()[-1] == "found: 2 of 2 runs, all required: PASS"
    runs = [lost, found]
    assert not plan_truth._found(2)
    first, _, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("found  1: failed, 0 tries: none: wrong", "found: 1 of 2 runs, all required: MISS")


def test_the_next_one_is_run_with_what_was_left(monkeypatch):
    monkeypatch.setattr(plan_truth, "host_memory", lambda: HostMemory(4 * plan_truth.ROOM, 2 * plan_truth.ROOM))
    monkeypatch.setattr(plan_truth, "train", lambda *words: {"words": words, "micro_batch": {"found": 32}})
    (reserve, *_), (same, size, *_) = (one["words"] for one in plan_truth.searched())
    assert (reserve, same, size) == ("memory_reserve=0.250000",) * 2 + ("train.micro_batch=64",)


def test_too_little_memory_is_one_line(monkeypatch):
    monkeypatch.setattr(plan_truth, "host_memory", lambda: HostMemory(8 * 10**9, 10**9))
    with pytest.raises(SystemExit, match=r"^found: 1\.0 GB of memory available, more than 2\.5 GB needed$"):
        plan_truth.searched()


@pytest.mark.parametrize(
    ("script", "answers"),
    [
        (f"echo '{json.dumps([planned(1)])}'; exit 0", 1),
        (f"echo '{json.dumps([planned(-1, status='oom')])}'; exit 1", 1),
        ("exit 1", 0),  # refused
        ("echo '[{'; exit 137", 0),  # killed
    ],
)
def test_what_a_command_prints_counts_if_it_came_to_its_end(script, answers, monkeypatch, tmp_path):
    command = tmp_path / "python"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    assert plan_truth.plan([]).answers == answers
