"""Records as small runs of one version wrote them, one of each kind: reading and writing them changes no byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptdbench.records import store

STORED = sorted((Path(__file__).parent / "stored").glob("*.json"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_keys_their_order_and_nulls_stay(tmp_path, path):
    (tmp_path / store.RECORD).write_bytes(path.read_bytes())
    store.write_record(tmp_path, store.load_record(tmp_path))
    assert (tmp_path / store.RECORD).read_bytes() == path.read_bytes()


def test_there_are_some():
    assert len(STORED) > 10
