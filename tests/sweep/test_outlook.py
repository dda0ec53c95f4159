"""What a run is called in its sweep, and the estimated time of those to come."""

from __future__ import annotations

import pytest

from ptdbench.setup import config
from ptdbench.sweep.agenda import Agenda
from ptdbench.sweep.outlook import Outlook


@pytest.fixture
def three(asked):
    return [*asked("seed=0,1"), *asked("train.global_batch=32")]


def test_names_and_numbers(three):
    outlook = Outlook(three)
    assert [str(outlook.heading(number)) for number in range(3)] == [
        "[1/3] toy ddp b16 seed=0", "[2/3] toy ddp b16 seed=1", "[3/3] toy ddp b32",
    ]  # fmt: skip


def test_what_is_asked_again_for_each_run_reads_no_configuration_of_those_to_come(asked, monkeypatch):
    (one,) = asked("seed=0")
    requests = [one.in_block(block) for block in range(50)]
    outlook = Outlook(requests)
    outlook.expect(range(50))
    read = []
    monkeypatch.setattr(
        config, "read", lambda composed, read_it=config.read: read.append(composed) or read_it(composed)
    )
    assert [outlook.heading(number).title for number in range(3)] == ["toy ddp"] * 3
    assert len(read) <= 4  # its title, and of each run that begins its own


def test_a_search_does_not_know_how_many_there_will_be(asked, tmp_path):
    requests = asked("seed=0,1")
    agenda = Agenda(tmp_path, requests[:1], searches=True)
    assert str(agenda.outlook.heading(0)) == "[1] toy ddp"
    agenda.requests.append(requests[1])
    assert str(agenda.outlook.heading(1)) == "[2] toy ddp seed=1"


def test_runs_to_come_take_the_mean_of_those_that_ended_well(three):
    outlook = Outlook(three)
    outlook.expect([0, 1, 2])
    outlook.ended(0, 90.0, {"status": "oom"})
    assert outlook.heading(0).later_seconds is None
    outlook.ended(0, 20.0, {"status": "ok"})
    assert outlook.heading(1).later_seconds == 20.0
    assert outlook.heading(0).later_seconds == 40.0
    outlook.ended(1, 30.0, {"status": "ok"})
    assert outlook.heading(0).later_seconds == 50.0
    assert outlook.heading(2).later_seconds is None


def test_only_runs_that_will_be_carried_out_count(asked, tmp_path):
    agenda = Agenda(tmp_path, asked("train.global_batch=16,15,32,64"), queued=frozenset({"2_toy_ddp"}))
    to_do = agenda.to_do(range(4))
    assert to_do == [0, 3]
    agenda.outlook.expect(to_do)
    agenda.outlook.ended(0, 20.0, {"status": "ok"})
    assert agenda.outlook.heading(0).later_seconds == 20.0
