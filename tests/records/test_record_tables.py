"""docs/record.md: it describes whatever stands in a real record."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

import ptdbench
from docs import record_tables
from ptdbench.records import record, schema, workload_results
from tests.conftest import ROOT
from tests.daily import cases
from tests.training.test_evaluation import TASK


def undocumented(value: Any, kind: Any, name: str = "record") -> Iterator[str]:
    """The fields in a value that its type does not declare. Every option is described in conf/, and not here."""
    if get_origin(kind) in (Union, UnionType):
        kind = next((one for one in get_args(kind) if get_origin(one) is list or is_part(one)), Any)
    if get_origin(kind) is list:
        for item in value or []:
            yield from undocumented(item, get_args(kind)[0], f"{name}[]")
    elif is_part(kind) and isinstance(value, Mapping):
        described, types = record_tables.fields(kind), get_type_hints(kind)
        for field in value:
            if field not in described:
                yield f"{name}.{field}"
            else:
                yield from undocumented(value[field], types[field], f"{name}.{field}")


def is_part(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def of_record(found: Mapping[str, Any]) -> list[str]:
    own = {name: value for name, value in found.items() if name in workload_results.Findings.__struct_fields__}
    rest = {name: value for name, value in found.items() if name not in own}
    return [*undocumented(rest, schema.Record), *undocumented(own, workload_results.Findings)]


def test_the_page_has_a_place_for_the_tables():
    assert (ROOT / "docs" / "record.md").read_text().endswith("\n<!-- record -->\n")


def test_every_field_has_a_text_and_a_row():
    page = record_tables.markdown()
    for name in record.FIELDS:
        assert record_tables.fields(schema.Record)[name].text
        assert f"\n| `{name}` |" in page


def test_a_field_that_nobody_has_described_is_found():
    assert of_record({"status": "ok", "metrics": {"news": 1}, "more": 2}) == ["record.metrics.news", "record.more"]


@pytest.mark.ranks
def test_a_run_that_trains_and_is_resumed_has_no_other_fields(run):
    options = (*TASK, "parallel=ddp", "checkpoint.every_steps=2", "eval.every=2", "train.clip_norm=1")
    begun = run(*options, "train.steps=2")
    found = ptdbench.load(run(*options, "train.steps=4", f"resume={begun['directory']}")["directory"])
    assert found["status"] == "ok", found["error"]
    assert (found["schema"], found["steps"], len(found["segments"]), len(found["evaluations"])) == (2, 4, 2, 2)
    assert found.keys() == set(record.FIELDS)
    assert of_record(found) == []


BRIEF = {
    "hello": (),
    "matmul": ("workload.shapes=[64]", "workload.seconds=0.01"),
    "p2p": ("workload.max_bytes=1024", "workload.overlap_bytes=[1024]"),
    "collectives": ("workload.max_bytes=1024", "workload.ops=[all_reduce,barrier]"),
    "check": ("workload.tolerance=0.99", "workload.attempts=1"),
}


@pytest.mark.ranks
@cases("workload", BRIEF, daily=["hello", "collectives"])
def test_a_workload_that_does_not_train_has_no_other_fields(run, workload):
    found = ptdbench.load(run(f"workload={workload}", "device=cpu", *BRIEF[workload])["directory"])
    assert found.keys() == {*record.FIELDS, workload}, found["error"]
    assert of_record(found) == []
