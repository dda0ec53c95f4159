import re
from dataclasses import fields
from functools import partial

import pytest

from ptdbench.parallel.strategy import Strategy
from ptdbench.setup import config
from tests.conftest import composed, read
from tests.refusals import Abridged, refusal_of


def problems_of(part: str, *overrides: str) -> list[str]:
    asked = read(*overrides)
    ask = asked.call if part in config.CALLS else partial(getattr, asked)
    return refusal_of(ask, part).splitlines()


def test_the_defaults_are_typed():
    asked = read()
    assert asked.train == config.Train(16, "auto", 60, 3, 10, clip_norm=None, decay="matrices")
    assert asked.eval == config.Eval(every=None, micro_batch=64)
    assert asked.cluster == config.Cluster("local", "auto", "auto", "auto")
    assert asked.general == config.General(
        "fp32", "fused", False, "none", 0, "auto", "auto", None, False, 10, "throughput", 0.1
    )
    assert asked.checkpoint == config.Checkpoint(None, 3, True)
    call = asked.call("parallel")
    assert (call.name, call.target) == ("ddp", "ptdbench.parallel.strategy.Strategy")
    assert set(call.options) == {field.name for field in fields(Strategy)}  # conf/ shows every option


@pytest.mark.parametrize(("value", "said"), [
    ("7", """7: must be a name; try "model.name='7'\""""),
    ("true", """true: must be a name; try "model.name='true'\""""),
    ("null", "null: must be a name"),
    ("''", ": must be a name"),
    ("[a]", "[a]: must be a name"),
])  # fmt: skip
def test_a_name_is_a_text(value, said):
    assert problems_of("model", f"model.name={value}") == [f"model.name={said}"]


@pytest.mark.parametrize("message", [
    "precision=fp4: must be fp32, tf32, bf16, fp16, fp8 or fp8_tensorwise",
    "compile=yes: must be false, layers, blocks, whole or autotune",
    "seed=-1: must be at least 0",
    *(
        f"memory_reserve={part}: must be at least 0 and less than 1, or null to start a run whatever it needs; "
        "try 0.1"
        for part in (1, -0.1)
    ),
    "objective=speed: must be throughput, held_out_loss or held_out_accuracy",
    "profile.steps=-1: must be at least 0",
    "train.steps=0: must be at least 1",
    "train.micro_batch=half: must be a whole number, auto, max or best",
    "train.warmup_steps=-1: must be at least 0",
    *(f"train.max_minutes={limit}: must be greater than 0, or null for no limit" for limit in (0, "nan")),
    *(f"train.clip_norm={norm}: must be greater than 0, or null for no clipping" for norm in (0, "nan")),
    "eval.every=0: must be at least 1",
    "eval.micro_batch=0: must be at least 1",
    "cluster.ranks_per_node=0: must be at least 1",
    "model._target_=???: must name a class or a function, as in my_package.MyModel",
    "model._target_=5: must name a class or a function, as in my_package.MyModel",
    "model.heads=???: must be given",
])  # fmt: skip
def test_one_wrong_value_is_one_message(message):
    override = message.partition(": ")[0]
    group, dot, _ = override.partition(".")
    assert problems_of(group if dot and group in config.GROUPS else "general", override) == [message]


@pytest.mark.parametrize(("part", "override", "message"), [
    ("general", "+unknown.option=1", "unknown={option:1}: there is no such option"),
    ("general", "+precission=bf16", "precission=bf16: there is no such option; try precision"),
    ("train", "+train.stepz=1", "train.stepz=1: there is no such option; try train.steps"),
    ("train", "~train.steps", "train.steps=(not set): must be given"),
    (
        "model",
        "~model._target_",
        f"model=gpt_tiny: its file names no class or function (_target_); {config._INHERIT}",
    ),
    ("cluster", "~cluster.name", f"cluster.name=(not set): must be given; {config._INHERIT}"),
])  # fmt: skip
def test_what_is_there_is_what_is_declared(part, override, message):
    assert problems_of(part, override) == [message]


def test_all_that_is_wrong_in_a_part_comes_at_once():
    found = problems_of("train", "train.steps=0", "train.global_batch=0")
    assert [line.partition("=")[0] for line in found] == ["train.global_batch", "train.steps"]


@pytest.mark.parametrize("option", ["modules", "setup", "srun_args", "container.args", "container.mounts"])
def test_lists_of_a_job_hold_text(option):
    """A version that YAML reads as a number, and commands that it reads as truth values."""
    rule = """must be a list of text; quote numbers, true, false and null, as in "['3.10','true']\""""
    for value in ("[a,3.1]", "[false]", "[null]"):
        assert problems_of("cluster", "cluster=slurm", f"cluster.{option}={value}") == [
            f"cluster.{option}={value}: {rule}"
        ]
    assert read("cluster=slurm", f"cluster.{option}=['3.10','true']").cluster


@pytest.mark.parametrize(("option", "value"), [
    *((field.name, "a\nb") for field in fields(config.Slurm) if "str" in str(field.type)),
    ("qos", "q\n#"), ("partition", "\x1b[1m"), ("account", "a\tb"), ("gres", "a\x85"), ("constraint", "\udcff"),
    ("extra", {"res\ntouch": "v"}), ("extra", {"comment": "a\rb"}), ("extra", {"a": {"b": ["c\n"]}}),
    ("container.image", "a\n"), ("container.mounts", ["/a\n"]), ("modules", ["m\n"]), ("srun_args", ["a\0b"]),
])  # fmt: skip
def test_no_text_of_a_cluster_breaks_a_line_of_its_script(option, value):
    asked = read("cluster=slurm").changed({f"cluster.{option}": value})
    (line,) = refusal_of(getattr, asked, "cluster").splitlines()
    assert line == Abridged(f"cluster.{option}…: must not contain control characters, such as line breaks")


def test_only_commands_of_the_users_own_have_several_lines():
    assert read("cluster=slurm").changed({"cluster.setup": ["if true\nthen\n\techo\nfi"]}).cluster.setup


@pytest.mark.parametrize("override", ["train=5", "~train", "train=null"])
def test_a_group_that_is_not_one_is_explained(override):
    (line,) = problems_of("train", override)
    assert re.fullmatch(r"train=\w+: is a group of options; .* --cfg job --package train", line)


class TestResolve:
    def test_interpolations_become_values_unless_they_lead_nowhere(self):
        found = config.resolve(composed("model=toy", "model.inputs=5", "seed=3"))
        assert (found["data"]["inputs"], found["data"]["outputs"], found["data"]["seed"]) == (5, 8, 3)
        assert (type(found["optimizer"]), type(found["optimizer"]["betas"])) == (dict, list)
        # A run that is refused has a record too, and that holds the configuration.
        resolved = config.resolve(composed("seed=${sead}", "optimizer.betas=['${nowhere}',1]", "model.heads=???"))
        assert resolved["seed"] == "${sead}"
        assert resolved["data"]["seed"] == "${seed}"  # which is there, and leads on to nowhere
        assert resolved["optimizer"]["betas"] == ["${nowhere}", 1]
        assert resolved["model"]["heads"] == "???"
