"""What a sweep was asked for and its jobs can be read again, and a damaged file is told in a line."""

import json

import pytest
from msgspec.structs import replace

from ptdbench.records import ledger
from ptdbench.records.ledger import Ledger
from ptdbench.records.store import Damaged


def job(number, **changes):
    made = ledger.Job(
        number=number,
        name="ptdbench-sweep-3d737b7c",
        element=number,
        id=f"12_{number}",
        label="gpt_tiny_ddp",
        shape=f"{number} nodes x 2 ranks",
        overrides=["model=gpt_tiny", "data.path='my books'", "label=ä"],
        directory=f"{number}_gpt_tiny_ddp",
        log=f"/scratch/logs/12_{number}",
    )
    return replace(made, **changes)


def test_a_ledger_comes_back_as_it_was_written(tmp_path):
    written = Ledger(["model=a,b"], [job(1), job(0, element=None, id=None)])
    ledger.write(tmp_path, written)
    assert ledger.read(tmp_path) == written


def test_where_nothing_was_asked_for_there_is_nothing(tmp_path):
    assert ledger.read(tmp_path) == Ledger([], [])
    assert ledger.read(tmp_path / "not there") == Ledger([], [])


def test_jobs_of_other_runs_stay_and_the_last_one_of_a_run_counts(tmp_path):
    ledger.begin(tmp_path, ["model=toy", "seed=0,1,2"])
    ledger.add(tmp_path, [job(2), job(0)])
    ledger.add(tmp_path, [again := job(2, id="13"), job(1)])
    assert ledger.read(tmp_path) == Ledger(["model=toy", "seed=0,1,2"], [job(0), job(1), again])


def test_a_sweep_that_goes_on_keeps_its_jobs(tmp_path):
    ledger.begin(tmp_path, ["model=toy"])
    ledger.add(tmp_path, [job(0)])
    ledger.begin(tmp_path, ["model=toy", "cluster.time_minutes=60"])
    assert ledger.read(tmp_path) == Ledger(["model=toy", "cluster.time_minutes=60"], [job(0)])


def test_an_id_that_is_known_later_names_the_log_too(tmp_path):
    told = ledger.with_id(job(0, id=None, log="/scratch/%j"), "12_0")
    assert (told.id, told.log) == ("12_0", "/scratch/12_0")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\x00", b"{", b"5", b"[1]", b"{}", b'{"jobs": []}', b'{"overrides": null, "jobs": []}',
        b'{"overrides": [5], "jobs": []}', b'{"overrides": [], "jobs": [{}]}', b'{"overrides": [], "jobs": 5}',
        json.dumps({"overrides": [], "jobs": [{"number": "0"}]}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_one_is_told_in_a_line(tmp_path, content):
    (tmp_path / ledger.LEDGER).write_bytes(content)
    with pytest.raises(Damaged, match=r"sweep\.json is damaged: .") as caught:
        ledger.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_run_is_in_the_sweep_above_it_but_for_one_that_only_tries_a_micro_batch(tmp_path):
    sweep = tmp_path / "tries" / "sweep"
    sweep.mkdir(parents=True)
    ledger.begin(sweep, [])
    assert ledger.sweep_of(sweep / "0_toy") == sweep
    assert ledger.sweep_of(sweep / "0_toy" / "tries" / "0_2") is None
    assert ledger.sweep_of(tmp_path / "tries" / "toy") is None


@pytest.mark.parametrize(("content", "is_ledger"), [(b'{"method": "bayes"}', False), (b"[]", False), (b"{", True)])
def test_a_file_of_somebody_elses_makes_no_sweep_and_a_damaged_one_does(tmp_path, content, is_ledger):
    (tmp_path / ledger.LEDGER).write_bytes(content)
    assert ledger.sweep_of(tmp_path / "outputs" / "toy") == (tmp_path if is_ledger else None)
