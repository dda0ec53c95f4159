"""Whether plans are fast and right: what counts as an answer, and as confirmed at once."""

import json
import sys
from dataclasses import replace

import pytest

from benchmarks import plan_truth
from benchmarks.plan_truth import Plan


def planned(*sizes, largest=0, status="ok"):
    """The record of a plan that has tried these micro-batches, of which negative ones were too large."""
    tries = [{"micro_batch": abs(size), "fits": size > 0} for size in sizes]
    return {"status": status, "plan": {"tries": tries, "largest_micro_batch": largest}}


@pytest.mark.parametrize(("record", "at_once"), [
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
])  # fmt: skip
def test_a_proposal_is_confirmed_at_once(record, at_once):
    assert plan_truth.is_at_once(record) is at_once


@pytest.mark.parametrize(("changed", "is_met"), [
    ({}, True), ({"seconds": 2.1}, False), ({"pss": 11}, False), ({"records": []}, False),
    ({"records": [planned(-1, status="oom")]}, True), ({"records": [planned(1, status="failed")]}, False),
    ({"records": [{"status": "ok", "plan": {"reason": "no compiler"}}]}, False),
])  # fmt: skip
def test_a_plan_is_judged_by_its_answers_time_and_memory(changed, is_met):
    assert replace(Plan(2.0, 3.0, 10, [planned(1, largest=1)]), **changed).judged("", 1, 2.0, 10) is is_met


@pytest.mark.parametrize(("script", "records"), [
    (f"echo '{json.dumps([planned(1)])}'; exit 0", 1),
    (f"echo '{json.dumps([planned(-1, status='oom')])}'; exit 1", 1),
    ("exit 1", 0),  # refused
    ("echo '[{'; exit 137", 0),  # killed
])  # fmt: skip
def test_what_a_command_prints_counts_if_it_came_to_its_end(script, records, monkeypatch, tmp_path):
    command = tmp_path / "python"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    assert len(plan_truth.plan([]).records) == records
