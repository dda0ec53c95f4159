"""The acceptance run of one GPU: its verdicts on runs that a test makes up, and what it keeps."""

import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import instantiate

from benchmarks.gpu_check import __main__ as main
from benchmarks.gpu_check import parts, session
from benchmarks.gpu_check.session import Session
from tests.report.made import made

H100 = "NVIDIA H100 80GB HBM3"


class Scripted(Session):
    def __init__(self, *records: dict[str, Any], device: str = H100, **options: Any) -> None:
        super().__init__("cuda", {"devices": [device]}, Path("nowhere"), **options)
        self.records = list(records)
        self.typed: list[tuple[str, ...]] = []

    def run(self, name: str, *overrides: str) -> dict[str, Any]:
        self.typed.append(overrides)
        return self.records.pop(0)

    def launched(self, name: str, *overrides: str) -> list[dict[str, Any]]:
        count = 5 if name == "together" else 1
        taken, self.records = self.records[:count], self.records[count:]
        return taken


def trained(losses: tuple[float, ...] = (5.0, 4.0, 3.0, 2.0, 1.0), mfu: float = 0.5, rate=100.0, peak=2**30):
    metrics = {
        "tokens_per_second": rate, "samples_per_second": rate, "mfu": mfu, "peak_memory_bytes": peak,
        "step_seconds": {"median": 0.1},
    }  # fmt: skip
    return {"status": "ok", "losses": list(losses), "metrics": metrics, "overrides": []}


def failed(status: str = "failed", message: str = "no\nmore") -> dict[str, Any]:
    error = {"rank": 0, "type": "RuntimeError", "message": message}
    return made({"status": status, "error": error}).written


def part(name: str) -> Any:
    return instantiate(yaml.safe_load(main.PARTS.read_text())[name])["run"]


def verdicts(of: Session) -> dict[str, bool]:
    return {check["name"]: check["passed"] for check in of.checks}


def test_a_reference_that_learns_nothing_is_none() -> None:
    of = Scripted(trained((5.0, 5.0, 5.0, 5.0, 4.9)), trained())
    assert of.reference("idle") == []
    of.follows("after it", [], 1e-4)
    assert verdicts(of) == {"idle": False, "after it": False}
    for losses in ((5.0, 4.0, 3.0, 2.0), (5.0, 4.0, float("nan"), 2.0, 1.0)):
        of = Scripted(trained(losses))
        of.follows("cut short", [5.0, 4.0, 3.0, 2.0, 1.0], 1e-4)
        assert verdicts(of) == {"cut short": False}


def test_an_mfu_of_1_or_more_fails_and_running_out_of_memory_is_a_result() -> None:
    of = Scripted(trained(mfu=1.2), failed("oom"), failed())
    for name in ("too fast", "too large", "broken"):
        of.measured(name)
    assert verdicts(of) == {"too fast": False, "too large": True, "broken": False}
    assert of.checks[2]["said"] == "failed on rank 0: RuntimeError: no more"


def test_products_above_or_far_below_the_peak_fail() -> None:
    rates = [("bf16", 700.0), ("bf16", 300.0), ("tf32", 480.0), ("fp16", 500.0), ("fp32", 64.0)]
    products = [{"dtype": dtype, "median": rate * 1e12} for dtype, rate in rates]
    of = Scripted(
        {"status": "ok", "matmul": {"ranks": [{"products": products}]}}, {"status": "ok", "check": {"verdict": "sound"}}
    )
    parts.ceilings(of)
    assert verdicts(of) == {
        "matmul bf16": True, "matmul tf32": False, "matmul fp16": False, "matmul fp32": True, "check": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fresh", "together", "fast", "small"),
    [(trained(rate=104.0), trained(), False, True), (trained(), trained(peak=2**30 + 2**26), True, False)],
)
def test_runs_of_one_process_must_be_as_fast_and_as_small_as_fresh_ones(fresh, together, fast, small) -> None:
    of = Scripted(*[together] * 5, *[fresh] * 5)
    parts.processes(of)
    assert verdicts(of) == {"throughput": fast, "peak memory": small}


def test_on_a_gpu_that_is_not_there_memory_is_judged_and_numbers_and_times_are_not() -> None:
    idle = trained((0.0,) * 5, rate=80.0, peak=2**30 + 2**26)
    of = Scripted(*[idle] * 7, *[trained()] * 5, failed(), device=f"virtual {H100}")
    of.follows("ddp", of.reference("single"), 1e-4)
    parts.processes(of)
    of.follows("fsdp", [], 1e-4)
    assert verdicts(of) == {"single": True, "ddp": True, "throughput": True, "peak memory": False, "fsdp": False}
    skipped = [check["name"] for check in of.checks if check["said"].startswith("virtual: not compared: ")]
    assert skipped == ["single", "ddp", "throughput"]


def test_every_part_is_there() -> None:
    assert all(callable(part(name)) for name in yaml.safe_load(main.PARTS.read_text()))


def test_the_large_model_runs_at_every_micro_batch_and_tells_its_goal() -> None:
    of = Scripted(trained(mfu=0.4), trained(mfu=0.55), failed("oom"))
    part("large-fp8")(of)
    batches = [word for typed in of.typed for word in typed if "global_batch" in word]
    assert batches == [f"train.global_batch={size}" for size in (8, 16, 32)]
    assert all({"precision=fp8", "compile=layers"} <= set(typed) for typed in of.typed)
    assert of.checks[-1]["name"] == "goal"
    assert "MFU 55.0%" in of.checks[-1]["said"]
    assert "missed by 5.0%" in of.checks[-1]["said"]
    part("large-layers")(none := Scripted(*[failed("oom")] * 3))
    assert (verdicts(none)["goal"], none.checks[-1]["said"]) == (False, "no size ran")


def test_only_what_gloo_refuses_may_be_missing_of_two_ranks_on_one_gpu() -> None:
    lacking = failed(message="no support for reduce_scatter in Gloo process group")
    of = Scripted(*[trained()] * 2, lacking, failed(), *[trained()] * 3)
    parts.two_ranks(of)
    passed = ["single", "ddp of 2", "fsdp of 2", "tp of 2", "ulysses of 2", "ring of 2"]
    assert verdicts(of) == {**dict.fromkeys(passed, True), "pdp of 2": False}


def test_each_check_is_kept_at_once_and_a_part_replaces_what_it_found_before(tmp_path: Path) -> None:
    path = tmp_path / "results" / "H100.json"
    assert "no results" in session.on_record(path.parent)
    for part, passed in (("numbers", False), ("images", False), ("numbers", True)):
        of = Scripted(results=path, part=part)
        of.report("loss", passed, "a figure")
        assert json.loads(path.read_text())["parts"][part]["checks"] == of.checks
    shown = session.on_record(path.parent)
    assert "| numbers | loss | ok | a figure |\n| images | loss | FAIL | a figure |" in shown


def test_an_error_of_a_part_is_a_failed_check() -> None:
    of = Scripted(part="broken")
    of.watched(lambda _: {}["metrics"])
    assert verdicts(of) == {"broken": False, "duration": True}


def test_a_process_that_stays_on_the_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RELEASE_SECONDS", 0.3)
    looks = [{1: "1 mine", 2: "2 old"}, {2: "2 old"}]
    monkeypatch.setattr(session, "holders", lambda: looks.pop(0))
    assert session.wait_until_released({2}) == []
    monkeypatch.setattr(session, "holders", lambda: {1: "1 mine", 2: "2 old"})
    assert session.wait_until_released({2}) == ["1 mine"]


def test_parts_beside_each_other_say_which_failed(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, int(command[-1] == "narrow"), f"{command[-1]} done\n")

    monkeypatch.setattr(main.subprocess, "run", run)
    args = Namespace(device="cuda", outputs=Path("outputs"), results=None)
    assert main.each(["numbers", "narrow"], args, jobs=2) == ["narrow"]
    assert capsys.readouterr().out == "numbers done\nnarrow done\n"


def profiled(other: float = 0.001, weights: int = 51, activations: int = 40, unknown: int = 9) -> dict[str, Any]:
    """A record of a run whose two ranks have steps of 0.1 s, and whose peak of memory is 100 bytes."""
    kinds = {"weights": [weights], "activations": [activations], "other": [unknown]}
    phases = {"steps": 5, "step_seconds": 0.1, "ranks": {"other": [0.001, other]}}
    return {**trained(peak=100), "phases": phases, "memory": {"ranks": kinds}}


@pytest.mark.parametrize(("record", "passed", "text"), [
    (profiled(0.004), [True, True], ""), (profiled(0.006), [False, True], ""),
    (profiled(0.004, weights=48, unknown=12), [True, False], ""),
    (profiled(weights=31, unknown=4), [True, False], ""), (profiled(activations=0, weights=60), [True, False], ""),
    ({**profiled(), "memory": {"reason": "no allocation was seen"}}, [False], "no allocation was seen"),
    ({**trained(), "phases": {"steps": 0, "reason": "no trace"}}, [False], "no trace"),
    (failed(), [False], "failed"),
])  # fmt: skip
def test_what_is_not_explained_of_a_step_is_limited(record: dict[str, Any], passed: list[bool], text: str) -> None:
    of = Scripted(*[record] * len(parts.LAYOUTS))
    parts.explained(of)
    assert [check["passed"] for check in of.checks] == passed * len(parts.LAYOUTS)
    assert text in of.checks[0]["said"]
