"""What runs and environments are called, and what tells them apart."""

import pytest

from ptdbench.report.labels import Environments, differences, titles
from ptdbench.report.table import render
from tests.report.made import run
from tests.report.test_table import cells

PDP = {"data": 1, "replicate": 1, "pipeline": 2, "microbatches": 4, "accumulation": 1}


def pdp(schedule, **changes):
    return run("pdp", layout=PDP, config={"parallel": {"schedule": schedule}}, **changes)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([pdp("1f1b")], ["gpt_tiny pdp"]),
        ([run("ddp"), pdp("1f1b")], ["gpt_tiny ddp", "gpt_tiny pdp"]),
        ([run("ddp"), run("ddp", model="toy")], ["gpt_tiny ddp", "toy ddp"]),
        (
            [run("ddp"), pdp("1f1b", global_batch=32), pdp("gpipe"), pdp("gpipe", global_batch=32)],
            ["gpt_tiny ddp", "gpt_tiny pdp 1f1b", "gpt_tiny pdp gpipe b16", "gpt_tiny pdp gpipe b32"],
        ),
        ([run("ddp"), run("ddp", world_size=4)], ["gpt_tiny ddp 2 ranks", "gpt_tiny ddp 4 ranks"]),
        ([run("ddp"), run("ddp", precision="bf16")], ["gpt_tiny ddp fp32", "gpt_tiny ddp bf16"]),
        (
            [run(config={"compile": on, "optimizer": {"lr": rate}}) for on in (True, False) for rate in (0.1, 0.2)],
            [
                "gpt_tiny ddp compile=true lr=0.1", "gpt_tiny ddp compile=true lr=0.2",
                "gpt_tiny ddp compile=false lr=0.1", "gpt_tiny ddp compile=false lr=0.2",
            ],
        ),
        ([run(), run()], ["gpt_tiny ddp", "gpt_tiny ddp"]),  # the number tells them apart
        ([run(None, model=None, global_batch=None, workload="p2p")], ["p2p"]),
    ],
)  # fmt: skip
def test_titles_say_what_differs(runs, expected):
    assert titles(runs) == expected


CONFIG = {
    "activations": {"name": "keep", "_target_": "a.Keep"},
    "compile": False,
    "seed": 0,
    "resume": None,
    "sweep": {"resume": None},
    "data": {"name": "text", "seed": 0},
    "optimizer": {"name": "adamw", "_target_": "torch.optim.AdamW", "lr": 0.001, "betas": [0.9, 0.95]},
    "parallel": {"name": "ddp", "bucket_mb": 25},
    "workload": {"name": "train", "label": "toy_ddp"},
}
RECOMPUTE = {"name": "recompute", "_target_": "a.Recompute", "every": 1}


def changed(**groups):
    """The configuration with other options: ``parallel={"bucket_mb": 50}``."""
    return CONFIG | {name: {**CONFIG[name], **of} if isinstance(of, dict) else of for name, of in groups.items()}


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ([CONFIG, CONFIG], ["", ""]),
        (
            [CONFIG, changed(activations=RECOMPUTE)],
            ["activations=keep", "activations=recompute"],
        ),
        ([CONFIG, changed(compile=True), CONFIG], ["compile=false", "compile=true", "compile=false"]),
        ([CONFIG, changed(optimizer={"betas": [0.9, 0.99]})], ["betas=[0.9, 0.95]", "betas=[0.9, 0.99]"]),
        ([CONFIG, changed(compile=None, parallel={"bucket_mb": 1e-9})],
         ["compile=false bucket_mb=25", "compile=null bucket_mb=1e-09"]),
        ([CONFIG, changed(optimizer={"name": "sgd", "_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9})],
         ["optimizer=adamw", "optimizer=sgd"]),  # what else differs follows
        ([CONFIG, changed(seed=1, data={"seed": 1})], ["seed=0", "seed=1"]),  # data.seed is ${seed}
        ([CONFIG, changed(seed=1, data={"seed": 2})], ["seed=0 data.seed=0", "seed=1 data.seed=2"]),
        ([CONFIG, changed(resume="a", sweep={"resume": "b"}, workload={"label": "other"})], ["", ""]),
        ([CONFIG, changed(sweep={"same_nodes": True})], ["", ""]),
        ([CONFIG, {**CONFIG, "extra": {"flag": "x" * 100}}], ["", f"flag={'x' * 40}…"]),
        ([{}, {"a": {}}], ["", "a={}"]),
    ],
)  # fmt: skip
def test_options_that_differ_are_named_and_no_others(configs, expected):
    assert differences([{"config": config} for config in configs]) == expected


def test_they_stand_in_the_rows_that_would_look_alike():
    runs = [
        run("ddp", 100.0, config=CONFIG),
        run("ddp", 90.0, config=changed(activations=RECOMPUTE)),
        run("fsdp", 80.0, config=changed(activations=RECOMPUTE, parallel={"name": "fsdp"})),
    ]
    labels = ["ddp activations=keep", "ddp activations=recompute", "fsdp"]
    assert [row[1] for row in cells(render(runs, 200))] == labels


ONE = {"host": "n1", "cpu": "a CPU", "torch": "2.11.0", "ptdbench": "1.0", "cores": 2, "cuda": None, "settings": {}}


def of(*environments):
    return Environments([{"environment": one} for one in environments])


def test_each_environment_has_one_number_whatever_the_order_of_its_fields():
    other = ONE | {"cores": 4}
    found = of(ONE, other, dict(reversed(ONE.items())), None)
    assert found.found == [ONE, other]
    runs = [{"environment": one} for one in (dict(reversed(ONE.items())), other, None)]
    assert [found.number(run) for run in [*runs, {}]] == [0, 1, None, None]


def test_an_environment_alone_is_its_machine_and_versions():
    assert of(ONE).titles() == ["n1, a CPU, torch 2.11.0, ptdbench 1.0"]


@pytest.mark.parametrize(
    ("other", "ends"),
    [
        ({"cores": 4}, ("2.11.0, ptdbench 1.0, cores 2", "2.11.0, ptdbench 1.0, cores 4")),
        ({"cuda": "13.0"}, ("2.11.0, ptdbench 1.0, cuda unknown", "2.11.0, ptdbench 1.0, cuda 13.0")),
        ({"settings": {"OMP": "1"}}, ("2.11.0, ptdbench 1.0, OMP unknown", "2.11.0, ptdbench 1.0, OMP 1")),
        ({"torch": "2.12.0"}, ("2.11.0, ptdbench 1.0", "2.12.0, ptdbench 1.0")),  # what is said already
    ],
)
def test_of_several_environments_it_is_said_what_differs(other, ends):
    assert of(ONE, ONE | other).titles() == [f"n1, a CPU, torch {end}" for end in ends]
