"""What was submitted can be read again, and nothing is nothing."""

from __future__ import annotations

from ptdbench.sweep import ledger


def test_jobs_come_back_as_they_were_written(tmp_path):
    jobs = [
        ledger.Job(
            number=number,
            id=f"12{number}_0",
            label="gpt_tiny_ddp",
            shape=f"{number} nodes x 2 ranks",
            overrides=["model=gpt_tiny", "data.path='my books'", "label=ä"],
            directory=f"{number}_gpt_tiny_ddp",
            log=f"/scratch/logs/12{number}_0",
        )
        for number in (1, 0)
    ]
    ledger.write(tmp_path, jobs)
    assert ledger.read(tmp_path) == jobs


def test_the_last_that_was_written_counts(tmp_path):
    ledger.write(tmp_path, [ledger.Job(0, "1", "a", "1 node", [], "0_a", "logs")])
    ledger.write(tmp_path, [])
    assert ledger.read(tmp_path) == []


def test_where_nothing_was_submitted_there_is_nothing(tmp_path):
    assert ledger.read(tmp_path) == []
    assert ledger.read(tmp_path / "not there") == []
