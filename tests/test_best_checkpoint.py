"""The best weights are kept beside the newest, over all starts of a run."""

from pathlib import Path

import pytest

from tests.conftest import run_on_shared_ranks
from tests.daily import cases
from tests.training.test_evaluation import TASK

pytestmark = pytest.mark.ranks

UNLEARNS = (
    *TASK, "parallel=ddp", "lr_schedule._target_=tests.workloads.made_task.Unlearning", "~lr_schedule.warmup_steps",
    "checkpoint.every_steps=4", "checkpoint.keep=1", "eval.every=2",
)  # fmt: skip


def kept(directory: Path) -> dict[str, str]:
    folder = directory / "checkpoints"
    return {path.name: path.readlink().name if path.is_symlink() else "" for path in folder.iterdir()}


def test_best_and_last_are_kept(tmp_path):
    first = run_on_shared_ranks(tmp_path, *UNLEARNS, "train.steps=8")
    assert first["status"] == "ok", first["error"]
    accuracy = {evaluation["step"]: evaluation["top1"] for evaluation in first["evaluations"]}
    assert accuracy[4] > max(accuracy[step] for step in (2, 6, 8))
    assert kept(tmp_path) == {"best": "step-00000004", "step-00000004": "", "step-00000008": ""}

    second = run_on_shared_ranks(tmp_path, *UNLEARNS, "train.steps=12")  # goes on where it was
    assert second["status"] == "ok", second["error"]
    assert [evaluation["step"] for evaluation in second["evaluations"]] == [2, 4, 6, 8, 10, 12]
    assert second["losses"][:8] == first["losses"]
    assert kept(tmp_path) == {"best": "step-00000004", "step-00000004": "", "step-00000012": ""}


def test_better_weights_are_saved_at_once(tmp_path):
    run_on_shared_ranks(tmp_path, *UNLEARNS, "train.steps=7", "checkpoint.every_steps=5")
    assert kept(tmp_path) == {"best": "step-00000004", "step-00000004": "", "step-00000007": ""}


def test_changed_data_are_refused(tmp_path, shared_run):
    run_on_shared_ranks(tmp_path, *UNLEARNS, "train.steps=4")
    record = shared_run(*UNLEARNS, "train.steps=6", f"resume={tmp_path}", "+data.edition=second")
    assert record["status"] == "failed"
    assert "data=synthetic_vectors has changed since" in record["error"]["message"]


@cases("strategy", ["ddp", "fsdp", "pdp"], daily=["fsdp"])
def test_resumed_run_has_the_same_evaluations(shared_run, strategy):
    options = (
        *TASK, f"parallel={strategy}", "lr_schedule=one_cycle", "train.clip_norm=1", "eval.every=2",
        "train.steps=6",
    )  # fmt: skip
    whole = shared_run(*options, "checkpoint.every_steps=6")  # so that it rehearses, as the others do
    begun = shared_run(*options, "train.max_minutes=1e-9", "checkpoint.every_steps=1")  # three steps
    assert len(begun["losses"]) == 3
    gone_on = shared_run(*options, f"resume={begun['directory']}")
    for series in ("losses", "learning_rates", "gradient_norms"):
        assert gone_on[series] == whole[series]
    judged = [
        [{**found, "seconds": None} for found in record["evaluations"] if found["step"] != 3]
        for record in (gone_on, whole)
    ]
    assert judged[0] == judged[1]
