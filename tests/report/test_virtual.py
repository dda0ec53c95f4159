"""What is said of runs on GPUs that are not there."""

import pickle
import shlex

from ptdbench.commands.report import _subtitle
from ptdbench.report import steps, virtual
from ptdbench.report.markup import markdown
from ptdbench.report.page.document import content
from ptdbench.report.remarks import reason
from ptdbench.report.table import of_plans, render
from ptdbench.report.virtual import Allocated, largest_places
from ptdbench.terminal import command
from tests.report.made import loaded, made, run

GIB = 2**30
FIELDS = {
    "kind": "virtual",
    "status": "ok",
    "world_size": 256,
    "virtual": {
        "device": "virtual NVIDIA H200",
        "ranks": [0, 131],
        "allocated_bytes": [3 * GIB, 2 * GIB],
        "reserved_bytes": [4 * GIB, 3 * GIB],
        "context_bytes": GIB // 2,
        "communicators": [3, 3],
        "host_seconds": [0.012, 0.034],
        "kernels": {"product": [10, 8], "copy": [0, 2]},
        "messages": {"all_gather": {"calls": 4.0, "bytes": 1000.0}, "send": {"calls": 2.0, "bytes": None}},
        "reason": None,
    },
    "memory": {"ranks": {"weights": [GIB, GIB], "activations": [2 * GIB, GIB]}},
}
RUN = made(FIELDS)


def test_a_run_and_a_plan_of_some_passes_are_explained_by_kernels_and_messages():
    lines = virtual.explained(RUN, "fsdp", 140).splitlines()
    assert lines[0] == "fsdp on virtual NVIDIA H200, ranks 0, 131 of 256"
    assert lines[3].split() == ["0", "3", "GiB", "4", "GiB", "1", "GiB", "2", "GiB"]
    assert "10 kernels in a step on rank 0: 10 product" in lines
    assert lines[-4].split() == ["all_gather", "4", "1,000"]
    assert lines[-3].split() == ["send", "2", "-"]
    assert lines[-1] == "the host launched a step in 34 ms, beside the other ranks on this machine"
    plan = RUN | {"kind": "planned", "plan": {"accumulation": 2}}
    told = virtual.explained(plan | {"layout": {"accumulation": 8}}, "fsdp", 140)
    for words in ("kernels in ", "messages of ", "the host launched "):
        assert f"{words}2 of 8 passes of a step" in told
        assert f"{words}a step" in virtual.explained(plan | {"layout": {"accumulation": 2}}, "fsdp", 140)


def test_experts_and_convolutions_of_virtual_runs_are_told():
    of_experts = RUN | {"config": {"model": {"router": {"balance": "loss"}}}}
    told = "experts take turns by position, as with model.router.balance=forced"
    assert told in virtual.explained(of_experts, "ep", 140)
    assert sum(told in line for line in virtual.remarks([of_experts, of_experts, RUN])) == 1
    assert told not in virtual.explained(RUN, "fsdp", 140)
    of_images = RUN | {"virtual": {**RUN["virtual"], "kernels": {"convolution": [0, 3]}}}
    told = "convolutions have no workspaces"
    assert told in virtual.explained(of_images, "ddp", 140)
    assert told in of_plans([run() | of_images.written | {"kind": "planned", "plan": {"fits": True}}], 200)
    assert told not in virtual.explained(RUN, "ddp", 140)


def test_what_is_not_known_has_its_reason_and_what_is_over_none():
    ended = [run(name, kind=kind, metrics=None) for name, kind in (("ddp", "virtual"), ("fsdp", "planned"))]
    assert "no reason on record" not in render(ended)
    assert "ddp: ok: no reason on record" in render([run(metrics=None)])
    found = virtual.explained(RUN | {"virtual": {**RUN["virtual"], "reason": "profile.steps=0"}}, "fsdp", 140)
    assert "no kernels and no messages: profile.steps=0" in found
    assert "all_gather" not in found


def test_a_rank_that_fails_may_have_decided_by_values():
    error = {"rank": 1, "type": "AssertionError", "message": "no expert was chosen", "traceback": ""}
    failed = made({"status": "failed", "error": error})
    assert reason(failed) == "failed on rank 1: AssertionError: no expert was chosen"
    assert reason(failed | {"kind": "virtual"}).endswith(
        "; virtual GPUs compute nothing: code that depends on the values of tensors fails there"
    )
    refused = {**error, "rank": -1, "type": "ConfigError", "message": "precision=fp8: no"}
    assert reason(failed | {"kind": "virtual", "error": refused}) == "failed: precision=fp8: no"


def test_a_plan_is_the_rank_that_needs_most_by_kind_of_memory():
    found = {
        "fits": True, "rank": 131, "stands_for": [128, 128], "largest_micro_batch": 8, "allocated_bytes": 4 * GIB,
        "reserved_bytes": 5 * GIB, "outside": {"CUDA": GIB // 2, "NCCL": GIB // 2}, "needed_bytes": 6 * GIB,
        "room_bytes": 9 * GIB, "capacity_bytes": 10 * GIB, "capacity_of": "an H200",
    }  # fmt: skip
    memory = {"ranks": {"weights": [GIB, 2 * GIB], "communication": [0, GIB]}}
    of_plan = {"kind": "planned", "model": "gpt", "parallel": "fsdp", "memory": memory, "plan": found}
    planned = RUN | of_plan | {"directory": "a/0"}
    state = {"weights": 3 * GIB, "gradients": GIB, "optimizer": 6 * GIB}
    plan = {"state": [state], "reason": "no GPU"}
    unknown = planned | {"virtual": None, "parallel": "ddp", "plan": plan, "directory": "a/1"}
    title, headings, _, fsdp, ddp, *told = of_plans([planned, unknown], 300).splitlines()
    assert title == "gpt · planned, GiB on the most heavily loaded rank"
    assert headings.split("  ")[-1] == "max mb"
    assert " ".join(fsdp.split()) == "fsdp 256 131 2.00 - - 1.00 4.00 5.00 1.00 10.0 3.00 yes 8"
    assert " ".join(ddp.split()) == "ddp 256 - 3.00 1.00 6.00 - - - - - - ? -"
    assert told[0] == "ddp: only the training state is known: no GPU"
    assert told[1].startswith("left: of 9.0 GiB usable (10.0 GiB of an H200 less memory_reserve), after torch's")
    assert told[2].endswith("simulated: rank 0 (stands for 128 ranks) and rank 131 (stands for 128 ranks)")
    one_more = planned | {"plan": {**found, "stands_for": [255, 1]}}
    assert "simulated: rank 0 (stands for 255 ranks) and rank 131\n" in of_plans([one_more], 300) + "\n"
    assert "evaluation" not in "".join(told)
    evaluates = planned | {"config": {"eval": {"every": 100}}}
    assert "evaluation (eval.every) is left out" in of_plans([evaluates], 300)
    assert "samples that wait" not in "".join(told)
    waits = planned | {"plan": {**found, "outside": {"samples": GIB}}}
    assert "memory, the samples that wait for their pass and the" in of_plans([waits], 300)
    assert max(map(len, of_plans([planned, unknown, evaluates, waits], 80).splitlines())) == 80


def test_below_plans_stands_how_to_measure_those_that_fit():
    def plan(fits, *typed):
        words = [*typed, "train.micro_batch=max", "virtual=h100", "cluster.nodes=2"]
        return run(kind="planned", plan={"fits": fits}, overrides=words, global_batch=16 if fits else 128)

    plans = [plan(True, "parallel=fsdp"), plan(False, "parallel=ddp"), plan(True, "parallel=pdp", "model.name='a b'")]
    assert virtual.measuring(plans[1:2]) == ""
    lines = virtual.measuring(plans).split(" \\\n")
    assert max(map(len, lines)) <= 78
    assert shlex.split(" ".join(lines).removeprefix(command())) == [
        "-m", "cluster=slurm", "parallel=fsdp,pdp", "train.micro_batch=best", "cluster.nodes=2", "model.name='a b'",
        "train.global_batch=16", "repeat=5",
    ]  # fmt: skip


def test_a_report_of_plans_has_their_columns_and_what_does_not_fit_is_no_failed_run():
    found = {"room_bytes": 9 * GIB, "needed_bytes": 6 * GIB, "fits": True, "largest_micro_batch": 8}
    fits = {**FIELDS, "kind": "planned", "metrics": None, "plan": found, "layout": {"micro_batch": 4}}
    lack = {"rank": -1, "type": "DoesNotFit", "message": "micro-batch 4 needs 12.0 GiB", "traceback": ""}
    too_large = {**fits, "plan": {**found, "needed_bytes": 12 * GIB, "fits": False, "largest_micro_batch": 0}}
    plans = loaded(run(**fits), run("fsdp", **{**too_large, "status": "oom", "error": lack}))
    head, _, *rows = [line.split(" | ") for line in markdown("a", "b", plans).splitlines() if line.startswith("| ")]
    wanted = [head.index(name) for name in ("parallel", "mb", "left", "fits", "max mb")]
    cells = [[row[place] for place in wanted] for row in rows]
    assert cells == [["ddp", "4", "3.0 GiB", "yes", "8"], ["fsdp", "4", "-3.0 GiB", "no", "none"]]
    shown = [run for row in content(plans)["models"][0]["rows"] for run in row["runs"]]
    assert [(one["failed"], one["reason"]) for one in shown] == [
        (False, None), (False, "does not fit: micro-batch 4 needs 12.0 GiB"),
    ]  # fmt: skip
    assert markdown("a", "b", plans).startswith("**Fits in memory: ddp (micro-batch up to 8). Does not fit: fsdp.**\n")
    assert _subtitle(plans).startswith("2 plans, 1 too large · ")
    broken = loaded(run(status="oom"), run(**{**fits, "status": "failed"}))
    assert _subtitle([*plans, *broken]).startswith("3 plans, 1 run, 1 too large, 1 oom, 1 failed · ")


def test_predicted_steps_order_plans_in_tables_and_lines():
    """Rows without a time stay, below the others; what is surely slower needs no run on a GPU."""

    def plan(layout, seconds):
        fields = {"kind": "planned", "plan": {"fits": bool(seconds)}, "overrides": [f"parallel={layout}"]}
        if not seconds:
            return run(layout, **fields)
        parts = {"products": seconds, "host": 0.0}
        step = {
            "step_seconds": seconds, "low": seconds / 1.25, "high": seconds * 1.25,
            "tokens_per_second": 1e3 / seconds,
        }  # fmt: skip
        step |= {"mfu": 0.05 / seconds, "bound_by": "products", "parts": parts, "errors": {"products": 0.1}}
        return run(layout, **fields, predicted=step)

    records = [plan("tp", 0.2), plan("cp", 0), plan("fsdp", 0.1), plan("ddp", 0.101)]
    table = of_plans(records, 120)
    cells = [line.split()[:9] for line in table.splitlines()[3:7]]
    assert cells[0] == ["fsdp", "2", "1-2", "1.00x", "10,000", "100", "50.0%", "products", "yes"]
    assert cells[2][:6] == ["tp", "2", "3", "0.50x", "(0.48-0.52)", "5,000"]
    assert (cells[3][0], cells[3][-1]) == ("cp", "no")
    assert "times predicted, not measured" in table
    assert virtual.measuring(records).endswith("parallel=fsdp,ddp repeat=5")
    assert "Predicted, not measured: fsdp and ddp may be the fastest of 3" in virtual.answer(
        [(r.parallel, r) for r in records]
    )
    lines = virtual.explained(records[0], "tp", 140).splitlines()
    assert "predicted: a step of 200 ms (160 ms to 250 ms), bound by products" in lines


def test_a_measured_run_says_how_far_its_prediction_was_off():
    predicted = {"step_seconds": 0.1, "samples_per_second": 200.0, "anchor": "outputs/b"}  # measured: 250 samples/s
    text = "the predicted step, 100 ms (level set by outputs/b), is 25.0% longer than measured"
    assert virtual.as_predicted(run(predicted=predicted)) == text
    assert f"ddp: {text}" in steps.step_remarks(run(predicted=predicted), "ddp")
    assert virtual.as_predicted(run()) is None


OURS = [{"filename": "/usr/torch/nn.py", "line": 1, "name": "inner"}, {"filename": "t.py", "line": 7, "name": "step"}]


def entry(action, address, size, frames=()):
    return {"action": action, "addr": address, "size": size, "frames": [*frames]}


def test_largest_places_are_those_alive_at_the_peak(tmp_path):
    """The peak is 60: the first tensor is freed before it, and the last one comes after it."""
    trace = [
        entry("alloc", 1, 40), entry("free_requested", 1, 40), entry("free_completed", 1, 40),
        entry("alloc", 1, 20, OURS), entry("alloc", 2, 10, OURS), entry("alloc", 3, 30),
        entry("free_completed", 3, 30), entry("alloc", 4, 25),
    ]  # fmt: skip
    (tmp_path / "snapshot").write_bytes(pickle.dumps({"device_traces": [[], trace]}))
    assert largest_places(tmp_path / "snapshot") == [Allocated(30, 2, ("t.py:7 step",)), Allocated(30, 1, ())]
