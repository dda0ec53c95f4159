"""Whatever stands in the files of a run and a sweep: they are read without an exception, and shown in whole lines."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ptdbench.files import strict
from ptdbench.launch import slurm
from ptdbench.records import ledger, record, schema, store
from ptdbench.records.ownership import PROGRESS
from ptdbench.report import table
from ptdbench.sweep import status, watch
from ptdbench.training.metrics import metrics
from tests.refusals import Abridged
from tests.sweep.made import CONFIG, DONE
from tests.training.test_metrics import MEASURED

#: What a run that went well has left.
WHOLE = json.loads(json.dumps(record.begin(CONFIG, Path("outputs/sweep/0_toy_ddp"), {}) | DONE))

#: The same of schema 1.
OLD = {name: value for name, value in WHOLE.items() if name != "schema"}


def shown(directory: Path) -> str:
    """What a person sees of a sweep, in the status and in the table at its end."""
    seen = status.settle(directory)
    for width in (40, 80):
        watch.table_text(seen, width)
    told: list[str] = []
    table.render(store.read_results(directory, told.append))
    assert all("\n" not in line for line in told)
    table.render([run.record for run in seen.runs])
    return watch.table_text(seen)


@pytest.fixture(autouse=True)
def _nothing_in_the_queue(monkeypatch):
    """SLURM has forgotten all jobs."""
    monkeypatch.setattr(slurm, "queue", lambda ids: {})
    monkeypatch.setattr(status, "GRACE", 0.0)


def sweep_of(written: bytes, progress: bytes = b"") -> str:
    """Two runs, of which one is as it should be and both were submitted."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("0_toy_ddp", written), ("1_toy_fsdp", json.dumps(WHOLE).encode())):
            path = Path(folder) / "sweep" / name
            path.mkdir(parents=True)
            (path / store.RECORD).write_bytes(text)
            (path / PROGRESS).write_bytes(progress)
        names = ("0_toy_ddp", "1_toy_fsdp")
        jobs = [ledger.Job(0, "ptdbench-x", None, "7", "", name, folder) for name in names]
        ledger.write(Path(folder) / "sweep", ledger.Ledger([], jobs))
        return shown(Path(folder) / "sweep")


@pytest.mark.parametrize(("text", "wrong"), [
    (b"", "not JSON (Expecting value at character 0)"),
    (b"\xff\xfe\x00", "codec can't decode"),
    (b"[1]", "Expected `object`, got `array`"),
    (b"{}", "Object missing required field `status`"),
    (b"[" * 100_000, "nested too deeply"),
    (OLD, "its schema is 1, of an earlier version of ptdbench than this one, which reads 2; run it again"),
    (WHOLE | {"nodes": "none"}, "Expected `array | null`, got `str` - at `$.nodes`"),
    (WHOLE | {"nodes": ["n1", 2]}, "Expected `str`, got `int` - at `$.nodes[1]`"),
    (WHOLE | {"metrics": {"mfu": True}}, "Expected `float | null`, got `bool` - at `$.metrics.mfu`"),
    (WHOLE | {"error": {"rank": 0}}, "Object missing required field `type` - at `$.error`"),
    (WHOLE | {"world_size": 10**30}, "Expected `int` <= 9223372036854775807 - at `$.world_size`"),
    (WHOLE | {"final_loss": float("nan")}, "NaN is not JSON"),
])  # fmt: skip
def test_damage_is_one_line(tmp_path, text, wrong):
    written = text if isinstance(text, bytes) else json.dumps(text).encode()
    assert "toy ddp" in sweep_of(written, written)
    (tmp_path / store.RECORD).write_bytes(written)
    with pytest.raises(store.Damaged) as caught:
        store.load_record(tmp_path)
    (said,) = str(caught.value).splitlines()
    assert said.startswith(f"{tmp_path / store.RECORD} is damaged: ")
    assert wrong in said


def test_a_record_as_it_is_written_is_not_damaged():
    """Nor its figures, of enough steps that each is known."""
    msgspec.convert(WHOLE | {"something": "of a later version"}, schema.Record)
    measured = replace(MEASURED, seconds=[0.5 + step % 7 for step in range(60)])
    figures = metrics(measured)
    assert figures.step_seconds.ci95
    msgspec.convert(WHOLE | {"metrics": strict(figures)}, schema.Record)


def test_a_damaged_record_is_kept_aside_and_counts_for_nothing(sweep, capsys):
    path = sweep.begin(0)
    config = sweep.end(0)["config"]
    assert record.is_done(path, config)
    assert store.load_or_set_aside(path).status == "ok"
    for number in ("", "-2"):
        (path / store.RECORD).write_bytes(b"\x00garbage")
        assert not record.is_done(path, config)
        assert store.load_or_set_aside(path) is None
        assert (path / f"record.json.damaged{number}").read_bytes() == b"\x00garbage"
        end = f"it is kept as record.json.damaged{number}, and the run is repeated\n"
        assert capsys.readouterr().err == Abridged(f"{path / store.RECORD} is damaged: not JSON…; {end}")
        assert store.load_or_set_aside(path) is None  # there is none any more
