"""What a record says was asked for."""

from __future__ import annotations

import math

import pytest

from ptdbench.records import record, store
from tests.sweep.made import CONFIG


@pytest.mark.parametrize(("norm", "written"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), (None, None)])
def test_an_option_that_json_has_not_is_written_as_it_is_typed(tmp_path, norm, written):
    """Else ``clip_norm=inf`` and ``null`` would be one configuration, and a resumed run not that of its record."""
    asked = {**CONFIG, "train": {**CONFIG["train"], "clip_norm": norm}}
    store.write_record(tmp_path, record.begin(asked, tmp_path, {}))
    found = store.load_record(tmp_path)
    assert found["config"]["train"]["clip_norm"] == written
    assert record.same_work(found["config"], asked)
    assert found["fingerprint"] == record.fingerprint(found["config"])


def test_options_that_differ_in_such_a_number_are_not_the_same_work(tmp_path):
    works = set()
    for norm in (None, math.inf, math.nan, 1e30):
        asked = {**CONFIG, "train": {**CONFIG["train"], "clip_norm": norm}}
        store.write_record(tmp_path, record.begin(asked, tmp_path, {}))
        works.add(record.work(store.load_record(tmp_path)["config"]))
    assert len(works) == 4
