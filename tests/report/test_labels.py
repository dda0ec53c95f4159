"""What runs and environments are called, and what tells them apart."""

import pytest

from ptdbench.report.labels import Environments, differences, names, title, titles
from tests.report.made import made, run


def pdp(schedule="1f1b", microbatches=4, **changes):
    layout = {"replicate": 1, "pipeline": 2, "microbatches": microbatches}
    return run("pdp", layout=layout, config={"parallel": {"schedule": schedule}}, **changes)


@pytest.mark.parametrize(("runs", "expected"), [
    ([pdp()], ["gpt_tiny pdp"]),
    ([run("ddp"), pdp()], ["gpt_tiny ddp", "gpt_tiny pdp"]),
    ([run("ddp"), run("ddp", model="toy")], ["gpt_tiny ddp", "toy ddp"]),
    (
        [run("ddp"), pdp(global_batch=32), pdp("gpipe"), pdp("gpipe", global_batch=32)],
        ["gpt_tiny ddp", "gpt_tiny pdp 1f1b", "gpt_tiny pdp gpipe b16", "gpt_tiny pdp gpipe b32"],
    ),
    ([run("ddp"), run("ddp", world_size=4)], ["gpt_tiny ddp 2 ranks", "gpt_tiny ddp 4 ranks"]),
    ([run(), run()], ["gpt_tiny ddp", "gpt_tiny ddp"]),  # the number tells them apart
    ([run(None, model=None, global_batch=None, workload="p2p")], ["p2p"]),
])  # fmt: skip
def test_titles_say_what_differs(runs, expected):
    assert titles(runs) == expected


def test_a_title_is_what_all_runs_of_a_model_have_in_common():
    assert title([run(), run("fsdp", parameters=7)]) == "gpt_tiny · 7 to 1,234,567 parameters · fp32"
    assert title([run(parameters=None, precision=None)], ["batch 16"]) == "gpt_tiny · batch 16"
    assert title([run(parameters=None, kernels="torch")]) == "gpt_tiny · fp32 · kernels=torch"
    assert title([run(parameters=None, precision="bf16")]) == "gpt_tiny · bf16 · kernels=fused"
    both = [run(parameters=None, precision="fp16", kernels=kernels) for kernels in ("torch", "fused")]
    assert title(both) == "gpt_tiny · fp16 · kernels=fused,torch"


def layout(parallel, **degrees):
    return run(parallel, layout=degrees)


@pytest.mark.parametrize(("runs", "expected"), [
    ([layout("pdp", replicate=2, pipeline=4, microbatches=8)], ["pdp 2x4 1f1b"]),
    ([run("ddp"), run("ddp", precision="bf16")], ["ddp fp32", "ddp bf16"]),
    ([run("ddp"), run("ddp", kernels="torch")], ["ddp kernels=fused", "ddp kernels=torch"]),
    ([run("ddp"), run("fsdp", precision="bf16")], ["ddp", "fsdp"]),
    ([pdp(), pdp(microbatches=8)], ["pdp 1x2 1f1b m4", "pdp 1x2 1f1b m8"]),
    ([layout("fsdp", replicate=1, shard=4, pipeline=1)], ["fsdp"]),
    (  # a degree that was given: both are sharded
        [
            run(one, layout={"shard": 2}, config={"parallel": {"shard": n}})
            for one, n in (("ddp", 2), ("fsdp", "auto"))
        ],
        ["ddp s2", "fsdp"],
    ),
    ([layout("hsdp", replicate=2, shard=4, pipeline=1)], ["hsdp 2x4"]),
    ([layout("hsdp", replicate=2, shard=4, pipeline=2)], ["hsdp 2x4x2 1f1b"]),
    ([run("ddp"), layout("ddp", replicate=2, accumulation=4)], ["ddp acc1", "ddp acc4"]),
    ([run("ddp"), run("ddp", world_size=4)], ["ddp 2 ranks", "ddp 4 ranks"]),
    (  # one that failed before its ranks were known has no such figure
        [run("ddp", world_size=size, config={"optimizer": {"lr": lr}}) for lr, size in ((0.1, 2), (0.2, None))],
        ["ddp lr=0.1", "ddp lr=0.2"],
    ),
    (  # sweeps of one name
        [run("ddp", directory=f"{machine}/x/{number}_ddp") for number, machine in enumerate("ab", start=2)],
        ["ddp [a/x]", "ddp [b/x]"],
    ),
    ([run("ddp", nodes=["n1"]), run("ddp", nodes=["n1", "n2"])], ["ddp 1 node", "ddp 2 nodes"]),
    (  # one that never learned its nodes
        [run("ddp", nodes=["n1"]), run("ddp", nodes=None, config={"cluster": {"nodes": 2}})],
        ["ddp 1 node", "ddp 2 nodes"],
    ),
    (
        [run(config={"compile": on, "optimizer": {"lr": rate}}) for on in (True, False) for rate in (0.1, 0.2)],
        [f"ddp compile={on} lr={rate}" for on in ("true", "false") for rate in (0.1, 0.2)],
    ),
    (  # a batch that nobody gave: a plan's, of the micro-batch that fits
        [
            run(global_batch=batch, config={"activations": {"name": kept}, "train": {"global_batch": 16}})
            for kept, batch in (("keep", 8), ("recompute", 64))
        ],
        ["ddp activations=keep", "ddp activations=recompute"],
    ),
])  # fmt: skip
def test_names_say_how_a_run_is_parallelized_and_what_tells_it_apart(runs, expected):
    assert names(runs) == expected


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


def changed(**groups):
    """The configuration with other options: ``parallel={"bucket_mb": 50}``."""
    return CONFIG | {name: {**CONFIG[name], **of} if isinstance(of, dict) else of for name, of in groups.items()}


@pytest.mark.parametrize(("configs", "expected"), [
    ([CONFIG, CONFIG], ["", ""]),
    ([CONFIG, changed(activations={"name": "recompute", "_target_": "a.Recompute", "every": 1})],
     ["activations=keep", "activations=recompute"]),
    ([CONFIG, changed(compile=True), CONFIG], ["compile=false", "compile=true", "compile=false"]),
    ([CONFIG, changed(optimizer={"betas": [0.9, 0.99]})], ["betas=[0.9, 0.95]", "betas=[0.9, 0.99]"]),
    ([CONFIG, changed(compile=None, parallel={"bucket_mb": 1e-9})],
     ["compile=false bucket_mb=25", "compile=null bucket_mb=1e-09"]),
    ([CONFIG, changed(optimizer={"name": "sgd", "_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9})],
     ["optimizer=adamw", "optimizer=sgd"]),  # what else differs follows
    ([CONFIG, changed(seed=1, data={"seed": 1})], ["seed=0", "seed=1"]),  # data.seed is ${seed}
    ([CONFIG, changed(seed=1, data={"seed": 2})], ["seed=0 data.seed=0", "seed=1 data.seed=2"]),
    ([CONFIG, changed(resume="a", sweep={"resume": "b", "same_nodes": True}, workload={"label": "other"})],
     ["", ""]),
    ([CONFIG, {**CONFIG, "extra": {"flag": "x" * 100}}], ["", f"flag={'x' * 40}…"]),
    ([{}, {"a": {}}], ["", "a={}"]),
])  # fmt: skip
def test_options_that_differ_are_named_and_no_others(configs, expected):
    assert differences([made({"config": config}) for config in configs]) == expected


ONE = {"host": "n1", "cpu": "a CPU", "torch": "2.11.0", "ptdbench": "1.0", "cores": 2, "cuda": None, "settings": {}}


def of(*environments):
    return Environments([made({"environment": one}) for one in environments])


def test_each_environment_has_one_number_whatever_the_order_of_its_fields():
    other = ONE | {"cores": 4}
    found = of(ONE, other, dict(reversed(ONE.items())), None)
    assert found.distinct == [ONE, other]
    runs = [made({"environment": one}) for one in (dict(reversed(ONE.items())), other, None)]
    assert [found.number(run) for run in [*runs, made({})]] == [0, 1, None, None]


@pytest.mark.parametrize(("other", "differing", "titles"), [
    ({"cores": 4}, [{"cores": "2"}, {"cores": "4"}], [", cores 2", ", cores 4"]),
    ({"devices": ["A", "B", "A"]}, [{}, {"devices": "2 x A, B"}], ["", ", devices 2 x A, B"]),  # unknown: left out
    ({"settings": {"OMP": "1"}}, [{}, {"settings.OMP": "1"}], ["", ", OMP 1"]),
    ({"host": "n2"}, [{"host": "n1"}, {"host": "n2"}], ["", ""]),  # what the title says already
])  # fmt: skip
def test_an_environment_is_what_differs_from_others_after_what_all_share(other, differing, titles):
    known = {"host": "n1", "cpu": "a CPU", "torch": "2.11.0", "ptdbench": "1.0", "cores": "2"}
    assert of(ONE).described() == {"environment: n1, a CPU, torch 2.11.0, ptdbench 1.0": known}
    (shared, *rest) = of(ONE, ONE | other).described().items()
    assert shared == ("common to all environments", {name: known[name] for name in known if name not in other})
    hosts = ["n1", other.get("host", "n1")]
    assert [title for title, _ in rest] == [
        f"environment {place + 1}: {hosts[place]}, a CPU, torch 2.11.0, ptdbench 1.0{titles[place]}" for place in (0, 1)
    ]
    assert [fields for _, fields in rest] == differing
