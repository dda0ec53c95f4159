"""What a run is called in its sweep, and what the time of those to come is estimated from."""

from __future__ import annotations

import pytest

from ptdbench.report.heading import Rest
from ptdbench.setup import config
from ptdbench.sweep.agenda import Agenda
from ptdbench.sweep.outlook import Outlook
from tests.conftest import composed
from tests.sweep.test_agenda import TEMPLATE

MINUTES = 10.0  # train.max_minutes


def ended(asked_for, steps=60, status="ok", rate=None):
    metrics = {"model_flops_per_second": rate}
    return {"status": status, "steps": steps, "config": asked_for.config.resolved, "metrics": metrics}


@pytest.fixture
def three(asked):
    """Runs of 60, 60 and 30 steps, the last one of twice the batch: all have the same work."""
    one, two = asked("seed=0,1")
    (three,) = asked("train.global_batch=32", "train.steps=30")
    return [one, two, three]


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


def test_a_search_does_not_know_how_many_there_will_be(asked):
    requests = asked("seed=0,1")
    agenda = Agenda(requests[:1], searches=True)
    assert str(agenda.outlook.heading(0)) == "[1] toy ddp"
    agenda.requests.append(requests[1])
    assert str(agenda.outlook.heading(1)) == "[2] toy ddp seed=1"


def test_what_is_known_of_those_to_come(three):
    outlook, work = Outlook(three), 60 * three[0].summary.flops_per_step
    outlook.expect([0, 1, 2])
    assert outlook.heading(0).rest == Rest(0.0, 0.0, work, [(work, 60 * MINUTES)] * 2)
    outlook.ended(0, 20.0, ended(three[0]))
    assert outlook.heading(1).rest == Rest(20.0, work, work, [(work, 60 * MINUTES)])
    assert outlook.heading(2).rest is None


def test_a_run_that_failed_says_nothing_and_one_that_was_cut_short_less(three):
    outlook, work = Outlook(three), 60 * three[0].summary.flops_per_step
    outlook.expect([0, 1, 2])
    outlook.ended(0, 20.0, ended(three[0], status="oom"))
    assert outlook.heading(1).rest == Rest(0.0, 0.0, work, [(work, 60 * MINUTES)])
    outlook.ended(0, 20.0, ended(three[0], steps=15))
    assert outlook.heading(1).rest == Rest(20.0, work / 4, work, [(work, 60 * MINUTES)])


def test_only_runs_that_will_be_carried_out_count(asked, tmp_path):
    agenda = Agenda(asked("train.global_batch=16,15,32,64"), queued=frozenset({"2_toy_ddp"}))
    to_do = agenda.to_do(tmp_path, TEMPLATE, range(4))
    assert to_do == [0, 3]
    agenda.outlook.expect(to_do)
    assert len(agenda.outlook.heading(0).rest.waiting) == 1


def test_the_rate_of_a_run_of_the_same_model_and_precision(asked):
    requests = asked("precision=fp32,bf16", "seed=0,1")
    outlook = Outlook(requests)
    outlook.ended(0, 20.0, ended(requests[0], rate=5e9))
    assert [outlook.heading(number).flops_per_second for number in (1, 2, 3)] == [5e9, None, None]


def test_runs_without_a_model_count_alike():
    from ptdbench.sweep.requests import of_machine

    jobs = [composed("workload=hello", "device=cpu", f"seed={seed}") for seed in (0, 1)]
    outlook = Outlook(of_machine(jobs, [[], []], None))
    outlook.expect([0, 1])
    assert outlook.heading(0).rest == Rest(0.0, 0.0, 1.0, [(1.0, None)])
    assert str(outlook.heading(1)) == "[2/2] hello seed=1"
