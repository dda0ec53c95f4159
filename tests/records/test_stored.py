"""Records as small runs of one version wrote them, one of each kind: reading and writing them changes no byte."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, to_builtins

from ptdbench.measure.results import Findings
from ptdbench.records import store
from ptdbench.records.schema import Record

#: By kind; a line of the file is as ``results.jsonl`` has it.
STORED = {
    one["kind"]: one["record"]
    for one in map(json.loads, Path(__file__).with_name("stored.jsonl").read_text().splitlines())
}


@pytest.mark.parametrize("kind", STORED)
def test_keys_their_order_and_nulls_stay(tmp_path, kind):
    written = json.dumps(STORED[kind])
    store.write_record(tmp_path, json.loads(written))
    store.write_results(tmp_path, [store.read_record(tmp_path)])
    assert (tmp_path / store.RESULTS).read_text() == f"{written}\n"


def without_unwritten(told: Any, written: Any) -> Any:
    """What a type tells, without the nulls that stand for fields that were not written."""
    if isinstance(told, dict):
        kept = {name: value for name, value in told.items() if value is not None or name in written}
        return {name: without_unwritten(value, written.get(name)) for name, value in kept.items()}
    if isinstance(told, list):
        return [without_unwritten(one, other) for one, other in zip(told, written, strict=True)]
    return told


def as_typed(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the types tell of a record: all of it if they describe each of its fields."""
    told: dict[str, Any] = {}
    for kind in (Record, Findings):
        written = {name: value for name, value in record.items() if name in kind.__struct_fields__}
        told |= without_unwritten(to_builtins(convert(written, kind)), written)
    return told


@pytest.mark.parametrize("kind", STORED)
def test_the_types_lose_nothing_of_what_is_written(kind):
    written = STORED[kind]
    assert as_typed(written) == written
    names = [name for name in written if name not in Findings.__struct_fields__]
    assert names == list(Record.__struct_fields__[: len(names)])  # fields are appended only
