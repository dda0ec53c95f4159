"""Runs that were interrupted go on as if nothing had happened; sweeps do what is missing."""

import re
import signal
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.models.gpt import GPT as GPTModel
from tests import forked
from tests.conftest import ROOT, record_of, run_on_shared_ranks
from tests.daily import cases
from tests.launch.patient import patient
from tests.programs import until

pytestmark = pytest.mark.ranks

TOY = ("model=toy", "train.global_batch=12", "device=cpu")
GPT = (
    "model=gpt_tiny", "model.layers=3", "model.width=32", "model.sequence_length=32", "train.global_batch=12",
    "device=cpu",
)  # fmt: skip


Layout = tuple[str, int]


def on(layout: Layout) -> tuple[str, ...]:
    strategy, ranks = layout
    return (*GPT, *f"parallel={strategy}".split(), f"cluster.ranks_per_node={ranks}", "checkpoint.every_steps=3")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout, int], dict[str, Any]]:
    """The record of a run of a layout that stopped after so many steps; each is run once."""

    @cache
    def begin(layout: Layout, steps: int) -> dict[str, Any]:
        return run_on_shared_ranks(tmp_path_factory.mktemp("begun"), *on(layout), f"train.steps={steps}")

    return begin


LAYOUTS: list[Layout] = [
    ("ddp", 2), ("fsdp", 3), ("pdp", 2), ("ddp", 3), ("tp parallel.sequence=true", 4), ("fsdp parallel.context=2", 4),
    ("hsdp", 4), ("ddp parallel.optimizer=zero1", 2), ("pdp", 3), ("fsdp parallel.pipeline=2", 4),
]  # fmt: skip
CHANGES: list[tuple[Layout, Layout]] = [
    (("ddp", 2), ("fsdp", 2)), (("hsdp", 4), ("pdp", 2)), (("tp", 2), ("fsdp", 4)), (("3d", 8), ("single", 1)),
    (("fsdp parallel.context=2", 4), ("tp", 4)), (("ddp", 2), ("hsdp parallel.pipeline=2", 8)),
    (("ddp parallel.optimizer=zero1", 3), ("fsdp parallel.tensor=2", 4)), (("fsdp", 3), ("ddp", 3)),
    (("pdp optimizer=muon model.layers=4 parallel.schedule=interleaved1f1b", 2),
     ("fsdp optimizer=muon model.layers=4", 3)),
    (("fsdp optimizer=muon parallel.pipeline=2", 4), ("tp optimizer=muon parallel.pipeline=2", 4)),
    (("ddp optimizer=sgd", 3), ("pdp optimizer=sgd", 3)), (("tp optimizer=sgd", 4), ("hsdp optimizer=sgd", 4)),
]  # fmt: skip


@cases("layout", LAYOUTS, daily=[("fsdp", 3)], ids=lambda layout: f"{layout[0]}-{layout[1]}")
def test_resumed_losses_are_those_of_an_uninterrupted_run(shared_run, begun, layout):
    whole, half = begun(layout, 6), begun(layout, 3)
    rest = shared_run(*on(layout), "train.steps=6", f"resume={half['directory']}")
    assert rest["error"] is None
    assert half["losses"] == whole["losses"][:3]
    assert rest["losses"] == whole["losses"]  # bit for bit
    assert [(one["first_step"], one["steps"]) for one in rest["segments"]] == [(0, 3), (3, 3)]
    assert re.fullmatch(r"after step 3, from [^, ]+", rest["remarks"]["resumed"])  # in the shape that it had


@cases(("first", "then"), CHANGES, daily=CHANGES[:3])
def test_other_layout_resumes_with_the_same_losses(shared_run, begun, first, then):
    same = " ".join(word for word in first[0].split() if word.startswith(("optimizer=", "model.")))
    whole, half = begun((f"single {same}".strip(), 1), 6), begun(first, 3)
    rest = shared_run(*on(then), "train.steps=6", f"resume={half['directory']}")
    assert rest["error"] is None
    assert rest["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert rest["world_size"] == then[1]
    ranks = [f"{size} rank{'s' * (size > 1)}" for _, size in (then, first)]
    assert re.search(rf", with {ranks[0]}( \(.*\))? instead of {ranks[1]}( \(.*\))?$", rest["remarks"]["resumed"])


def test_documented_lines_read_weights_of_any_layout(begun, tmp_path, monkeypatch):
    page = (ROOT / "docs/checkpoints.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    taken = []
    for layout in (("single", 1), ("fsdp", 3), ("pdp", 2)):
        checkpoint = Path(begun(layout, 6)["directory"], "checkpoints/step-00000006")
        model = GPTModel(layers=3, heads=4, width=32, sequence_length=32, vocabulary=256)
        exec(lines.replace("outputs/<run>/checkpoints/step-00000100", str(checkpoint)), found := {"model": model})
        assert model.state_dict().keys() - found["weights"].keys() == {"head.projection.weight"}  # tied
        taken.append(found["weights"])
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in taken[-1].items())
    for other in taken[1:]:
        assert other.keys() == taken[0].keys()
        assert all(torch.allclose(weight, other[name], rtol=1e-4, atol=1e-5) for name, weight in taken[0].items())


def test_loss_scale_is_resumed(shared_run):
    """Its value shows in no loss: the one in the checkpoint is exchanged for another."""
    scaled = (*TOY, "parallel=ddp", "precision=fp16", "checkpoint.every_steps=2")
    half = shared_run(*scaled, "train.steps=2")
    checkpoint = Path(half["directory"]) / "checkpoints" / "step-00000002"
    written = checkpoint_dir.read_manifest(checkpoint)
    scaler = {**written.facts["scaler"], "scale": 512.0}
    assert scaler != written.facts["scaler"]
    checkpoint_dir.write_manifest(checkpoint, replace(written, facts={**written.facts, "scaler": scaler}))
    rest = shared_run(*scaled, "train.steps=4", f"resume={half['directory']}")
    assert rest["error"] is None
    last = checkpoint_dir.read_manifest(Path(rest["directory"]) / "checkpoints" / "step-00000004")
    assert last.facts["scaler"]["scale"] == 512.0


def saved(directory: Path) -> list[int]:
    """The steps of which there are whole checkpoints, and 0."""
    found = directory.glob("checkpoints/step-????????/manifest.json")
    return [0, *sorted(int(path.parent.name.removeprefix("step-")) for path in found)]


SIGNALS = [["SIGUSR2", "SIGTERM"], ["SIGINT", "SIGINT"]]


def test_stopped_run_saves_and_resumes_in_its_directory(tmp_path):
    """Twice, by other signals each, and then to its end."""
    run, waits = tmp_path / "run", tmp_path / "waits"
    words = (*patient(waits), "parallel=ddp", "train.steps=2000", "train.max_minutes=null")
    words += ("checkpoint.every_steps=100",)
    stops = [0]
    losses: list[float] = []
    for signals in SIGNALS:
        with forked.started(*(["resume=run"] if losses else [*words, "hydra.run.dir=run"]), cwd=tmp_path) as process:
            until(lambda: saved(run)[-1] > stops[-1] or process.poll() is not None)
            assert process.poll() is None, process.said()
            for name in signals:
                process.send_signal(getattr(signal, name))
            ended = process.communicate()
        assert ended.returncode == 128 + getattr(signal, signals[0])
        stopped = record_of(run)
        done = len(stopped["losses"])
        assert (stopped["status"], stopped["error"]["type"]) == ("preempted", "Stopped"), ended
        assert stops[-1] < done < 2000
        assert stopped["losses"][: stops[-1]] == losses
        assert f"after step {done} of 2000; it has saved: python train.py resume=" in stopped["error"]["message"]
        assert saved(run)[-1] == done
        stops.append(done)
        losses = stopped["losses"]

    waits.unlink()
    again = forked.with_ranks("resume=run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    finished = record_of(run)
    assert (finished["status"], len(finished["losses"])) == ("ok", 2000)
    assert finished["losses"][: stops[-1]] == losses
    assert [one["steps"] for one in finished["segments"]] == [b - a for a, b in pairwise([*stops, 2000])]
    assert finished["fingerprint"] == stopped["fingerprint"]

    complete = forked.train_py("resume=run", cwd=tmp_path)
    assert complete.returncode == 1
    assert complete.stderr.strip() == (
        "resume=run: is complete, with 2000 of 2000 steps; try train.steps=4000, to train on from there"
    )
