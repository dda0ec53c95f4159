"""The data of a report: what is in records, and nothing else."""

import json

import pytest

from ptdbench.profiling.phases import KINDS
from ptdbench.report.page.document import content, document
from tests.report.made import DDP, FSDP, failed, loaded, repeated, run


def rows(found):
    return [row for model in found["models"] for row in model["rows"]]


def test_rows_are_numbered_over_all_models_and_options_have_a_value_for_each():
    toys = [
        run(model="toy", config={"optimizer": {"lr": lr}, "seed": 0}, tokens_per_second=rate)
        for lr, rate in ((0.1, 3.0), (0.2, 1.0), (0.3, 2.0))
    ]
    found = content(loaded(*toys, run(config={"optimizer": {"lr": 0.4}, "seed": 0})))
    assert [model["title"].split(" · ")[0] for model in found["models"]] == ["toy", "gpt_tiny"]
    assert [row["number"] for row in rows(found)] == [0, 1, 2, 3]
    assert [row["rate"] for row in rows(found)] == [3.0, 2.0, 1.0, 1000.0]
    assert found["options"] == {"optimizer.lr": ["0.1", "0.3", "0.2", "0.4"]}
    assert found["common"] == {"seed": "0"}


def test_a_row_has_the_figures_of_its_typical_run_and_all_its_runs():
    one, *others = repeated("ddp", [1000.0, 1300.0, 1100.0])
    odd = {**one["metrics"], "step_seconds": {"mean": 0.25, "median": 0.2}, "peak_memory_bytes": 7}
    (row,) = rows(content(loaded(one, others[0], others[1] | {"metrics": {**odd, "tokens_per_second": 1100.0}})))
    assert row["rate"] == pytest.approx((1000.0 * 1300 * 1100) ** (1 / 3))
    assert (row["step"], row["step_p5"], row["memory"]) == (0.25, None, 7)
    assert [(one["rate"], one["block"]) for one in row["runs"]] == [(1000.0, 0), (1300.0, 1), (1100.0, 2)]
    assert row["low"] < row["rate"] < row["high"]


def test_a_run_that_failed_has_its_reason_and_no_figure():
    ok, bad = rows(content(loaded(run(), failed("fsdp", "no room", "oom"))))
    assert (ok["runs"][0]["reason"], bad["rate"], bad["rank"]) == (None, None, None)
    assert bad["runs"][0]["reason"].startswith("oom on rank 1: RuntimeError: no room; try ")


def test_the_best_rows_are_those_that_nothing_is_known_to_beat_if_something_is_beaten():
    steady = [1000.0, 1010.0, 990.0]
    slower = [0.5 * rate * (1 + place / 1000) for place, rate in enumerate(steady)]
    known = loaded(*repeated("ddp", steady), *repeated("fsdp", slower))
    assert [row["best"] for row in rows(content(known))] == [True, False]
    assert [row["best"] for row in rows(content(loaded(run(), run("fsdp"))))] == [False, False]


def test_plans_are_in_the_order_of_their_predicted_steps_and_have_no_measured_rate():
    steps = {"ddp": 0.5, "fsdp": 0.25, "pdp": None}
    plans = [
        run(name, kind="planned", metrics=None, predicted=of and {"step_seconds": of, "tokens_per_second": 1 / of})
        for name, of in steps.items()
    ]
    found = content(loaded(*plans))
    assert [row["parallel"] for row in rows(found)] == ["fsdp", "ddp", "pdp"]
    figures = [[row[name] for name in ("rank", "ratio", "rate", "predicted_rate")] for row in rows(found)]
    assert figures == [[(1, 1), 1.0, None, 4.0], [(2, 2), 0.5, None, 2.0], [None, None, None, None]]
    assert found["models"][0]["answer"].startswith("Predicted, not measured: fsdp may be the fastest of 2")


def test_runs_of_two_sweeps_are_two_rows_which_their_names_tell_apart():
    found = content([*loaded(run(), sweep="outputs/a"), *loaded(run(), sweep="outputs/b")])
    assert [(row["name"], row["sweep"]) for row in rows(found)] == [("ddp [a]", "outputs/a"), ("ddp [b]", "outputs/b")]
    assert found["sweeps"] == {"outputs/a": "a", "outputs/b": "b"}
    assert "sweep" in found["models"][0]["usual"]


def test_weak_scaling_goes_on_in_the_section_of_another_batch():
    runs = [run(world_size=n, global_batch=n, config={"train": {"global_batch": n}}) for n in (1, 2)]
    models = content(loaded(*runs))["models"]
    assert [[row["ratio"] for row in model["rows"]] for model in models] == [[1.0], [1.0]]
    assert [[(curve.kind, curve.rows) for curve in model["scaling"]] for model in models] == [[("weak", [0, 1])], []]


def test_each_environment_once():
    one, other = {"host": "a", "torch": "2.11"}, {"host": "b", "torch": "2.11"}
    found = content(
        loaded(run(environment=one), run("fsdp", environment=other), run("pdp", environment=one), run("tp"))
    )
    assert found["environments"] == {
        "common to all environments": {"torch": "2.11"},
        "environment 1: a, torch 2.11": {"host": "a"}, "environment 2: b, torch 2.11": {"host": "b"},
    }  # fmt: skip
    assert [row["runs"][0]["environment"] for row in rows(found)] == [0, 1, 0, None]


def test_phases_and_memory_are_those_of_the_record():
    memory = {"ranks": {kind: [1, 2] for kind in KINDS} | {"weights": [9, 3]}, "moments": ["forward", "backward"]}
    ddp, fsdp = rows(content(loaded(DDP | {"memory": memory}, FSDP)))
    assert ddp["phases"] == pytest.approx([0.0, 0.024, 0.039, 0.006, 0.0, 0.0, 0.0, 0.0, 0.004, 0.003])
    assert (ddp["kinds"], fsdp["kinds"]) == ([9, 1, 1, 1, 1, 1], None)
    assert rows(content(loaded(DDP | {"kind": "virtual"})))[0]["phases"] is None  # its times are no measured ones


def test_energy_is_that_of_gpus():
    hardware = [{"gpu": {"joules_per_sample": 2.0}}, {"gpu": {"reason": "NVML does not tell"}}, None]
    found = rows(content(loaded(*(run(str(place), hardware=one) for place, one in enumerate(hardware)))))
    assert [row["joules"] for row in found] == [2.0, None, None]


def test_runs_of_nothing_else_are_no_models():
    found = content(loaded(run(model=None, workload="hello", config={"workload": {"_target_": "gone"}})))
    assert (found["models"], found["options"], len(found["others"])) == ([], {}, 1)
    assert found["others"][0]["text"] == "hello: ok, without a result to show: its outcome has no field hello"


def test_the_document_holds_strict_json_and_no_text_that_could_end_it():
    page = document(
        "<b>\u202e", "&", {"text": "</script><!--", "number": float("nan"), "\u2066\\u": "\u202e\udcff\x7f\n"}
    )
    data = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data) == {
        "text": "</script><!--", "number": None, "\\u2066\\u": "\\u202e\\udcff\\x7f\n",
    }  # fmt: skip
    assert "<h1>&lt;b&gt;\\u202e</h1>" in page
