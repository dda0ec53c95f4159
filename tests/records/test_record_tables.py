"""docs/record.md: it describes whatever stands in a real record."""

import ptdbench
from docs import record_tables
from ptdbench.records import record, schema
from tests.conftest import ROOT
from tests.daily import cases
from tests.records.test_stored import as_typed
from tests.training.test_evaluation import TASK


def test_the_page_has_a_place_and_every_field_a_text_and_a_row():
    assert (ROOT / "docs" / "record.md").read_text().endswith("\n<!-- record -->\n")
    page = record_tables.markdown()
    for name in record.FIELDS:
        assert record_tables.fields(schema.Record)[name].text
        assert f"\n| `{name}` |" in page


def test_a_run_that_trains_and_is_resumed_has_no_other_fields(shared_run):
    every_part = ("checkpoint.every_steps=2", "eval.every=2", "train.clip_norm=1", "profile.steps=2")
    options = (*TASK, "parallel=ddp", *every_part)
    begun = shared_run(*options, "train.steps=2")
    found = ptdbench.load(shared_run(*options, "train.steps=4", f"resume={begun['directory']}")["directory"])
    assert found["status"] == "ok", found["error"]
    assert (found["schema"], found["steps"], len(found["segments"]), len(found["evaluations"])) == (2, 4, 2, 2)
    assert found.keys() == set(record.FIELDS)
    assert as_typed(found) == dict(found)


BRIEF = {
    "hello": (),
    "matmul": ("workload.shapes=[64]", "workload.seconds=0.01"),
    "p2p": ("workload.max_bytes=1024",),
    "collectives": ("workload.max_bytes=1024", "workload.ops=[all_reduce,barrier]"),
    "check": ("workload.tolerance=0.99", "workload.attempts=1"),
}


@cases("workload", BRIEF, daily=["hello", "collectives"])
def test_a_workload_that_does_not_train_has_no_other_fields(shared_run, workload):
    found = ptdbench.load(shared_run(f"workload={workload}", "device=cpu", *BRIEF[workload])["directory"])
    assert found.keys() == {*record.FIELDS, workload}, found["error"]
    assert as_typed(found) == dict(found)
