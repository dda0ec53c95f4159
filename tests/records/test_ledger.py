"""What a sweep was asked for and its jobs can be read again, and a damaged file is told in a line."""

import pytest
from msgspec.structs import replace

from ptdbench.records import ledger
from ptdbench.records.ledger import Ledger
from ptdbench.records.store import Damaged


def job(number, **changes):
    made = ledger.Job(
        number=number, name="ptdbench-sweep-3d737b7c", element=number, id=f"12_{number}",
        shape=f"{number} nodes x 2 ranks", directory=f"{number}_gpt_tiny_ddp", log=f"/scratch/logs/12_{number}",
    )  # fmt: skip
    return replace(made, **changes)


def test_nothing_asked_for_is_nothing_and_an_id_names_the_log(tmp_path):
    assert ledger.read(tmp_path) == Ledger([], [])
    assert ledger.read(tmp_path / "not there") == Ledger([], [])
    told = ledger.with_id(job(0, id=None, log="/scratch/%j"), "12_0")
    assert (told.id, told.log) == ("12_0", "/scratch/12_0")


def test_the_last_job_of_each_run_is_kept_also_when_the_sweep_goes_on(tmp_path):
    ledger.begin(tmp_path, ["model=toy", "seed=0,1,2"])
    ledger.add(tmp_path, [job(2), first := job(0, element=None, id=None)])
    ledger.add(tmp_path, [again := job(2, id="13"), job(1)])
    assert ledger.read(tmp_path) == Ledger(["model=toy", "seed=0,1,2"], [first, job(1), again])
    ledger.begin(tmp_path, ["model=toy"])
    assert ledger.read(tmp_path) == Ledger(["model=toy"], [first, job(1), again])


@pytest.mark.parametrize("content", [
    b"", b"\xff\x00", b"[1]", b'{"jobs": []}', b'{"overrides": [5], "jobs": []}',
    b'{"overrides": [], "jobs": [{"number": "0"}]}',
])  # fmt: skip
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


@pytest.mark.parametrize(("content", "is_ledger"), [
    (b'{"method": "bayes"}', False), (b'{"program": "train.py", "method": "bayes"}', False), (b"[]", False),
    (b"{", True), (b'{"jobs": [], "overrides": [], "of a later version": 1}', True),
])  # fmt: skip
def test_a_file_of_somebody_elses_makes_no_sweep_and_a_damaged_one_does(tmp_path, content, is_ledger):
    (tmp_path / ledger.LEDGER).write_bytes(content)
    assert ledger.sweep_of(tmp_path / "outputs" / "toy") == (tmp_path if is_ledger else None)
