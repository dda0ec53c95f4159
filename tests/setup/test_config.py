import re
from dataclasses import fields

import pytest

from ptdbench.parallel.strategy import Strategy
from ptdbench.problems import ConfigError
from ptdbench.setup import config
from tests.conftest import composed


def problems_of(part: str, *overrides: str) -> list[str]:
    """What is told when a part of the configuration is asked for."""
    read = config.read(composed(*overrides))
    with pytest.raises(ConfigError) as caught:
        read.call(part) if part in config.CALLS else getattr(read, part)
    return str(caught.value).splitlines()


def test_the_defaults_are_typed():
    read = config.read(composed())
    assert read.train == config.Train(16, "auto", 60, 3, 10, clip_norm=None, decay="matrices", ema=None)
    assert read.eval == config.Eval(every=None, micro_batch=64)
    assert read.cluster == config.Cluster("local", "auto", "auto", "auto")
    assert read.general == config.General(
        "fp32", False, "none", 0, "auto", "auto", None, False, 10, False, "throughput", 0.1
    )
    assert read.checkpoint == config.Checkpoint(None, 3, True)
    call = read.call("parallel")
    assert (call.name, call.target) == ("ddp", "ptdbench.parallel.strategy.Strategy")
    assert set(call.options) == {field.name for field in fields(Strategy)}  # conf/ shows every option


@pytest.mark.parametrize("group", config.CALLS)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("7", """7: must be a name; try "{}.name='7'\""""),
        ("true", """true: must be a name; try "{}.name='true'\""""),
        ("null", "null: must be a name"),
        ("''", ": must be a name"),
        ("[a]", "['a']: must be a name"),
        ("{a:1}", "{{'a': 1}}: must be a name"),
    ],
)
def test_a_name_is_a_text(group, value, said):
    assert problems_of(group, f"{group}.name={value}") == [f"{group}.name={said}".format(group)]
    assert config.read(composed(f"{group}.name='7'")).call(group).name == "7"


@pytest.mark.parametrize("group", config.CALLS)
def test_what_makes_a_choice_what_it_is_is_not_passed_on(group):
    chosen = ["virtual=h100"] if group == "virtual" else []  # else the configuration has no such group
    assert not {"name", "_target_", "_partial_"} & set(config.read(composed(*chosen)).call(group).options)


@pytest.mark.parametrize(
    ("part", "override", "message"),
    [
        ("general", "precision=fp4", "precision=fp4: must be fp32, tf32, bf16, fp16, fp8 or fp8_tensorwise"),
        ("general", "compile=yes", "compile=yes: must be false, layers, whole or autotune"),
        ("general", "seed=-1", "seed=-1: must be at least 0"),
        ("general", "seed=1e3", "seed=1000.0: must be a whole number"),
        ("general", "+unknown.option=1", "unknown={'option': 1}: there is no such option"),
        ("general", "+precission=bf16", "precission=bf16: there is no such option; try precision"),
        ("train", "train.steps=abc", "train.steps=abc: must be a whole number"),
        ("train", "train.steps=true", "train.steps=true: must be a whole number"),
        ("profile", "profile.steps=-1", "profile.steps=-1: must be at least 0"),
        ("train", "train.steps=0", "train.steps=0: must be at least 1"),
        ("train", "train.micro_batch=half", "train.micro_batch=half: must be a whole number, auto, max or best"),
        ("train", "train.warmup_steps=-1", "train.warmup_steps=-1: must be at least 0"),
        ("train", "train.max_minutes=0", "train.max_minutes=0: must be greater than 0, or null for no limit"),
        ("train", "train.clip_norm=0", "train.clip_norm=0: must be greater than 0, or null for no clipping"),
        ("train", "train.clip_norm=nan", "train.clip_norm=nan: must be greater than 0, or null for no clipping"),
        ("train", "train.max_minutes=nan", "train.max_minutes=nan: must be greater than 0, or null for no limit"),
        ("train", "train.ema=1", "train.ema=1: must be between 0 and 1, or null for no average; try 0.999"),
        ("eval", "eval.every=0", "eval.every=0: must be at least 1"),
        ("eval", "eval.micro_batch=0", "eval.micro_batch=0: must be at least 1"),
        ("train", "+train.stepz=3", "train.stepz=3: there is no such option; try steps"),
        ("train", "~train.steps", "train.steps=(not set): must be given"),
        ("cluster", "cluster.ranks_per_node=0", "cluster.ranks_per_node=0: must be at least 1"),
        (
            "model",
            "model._target_=???",
            "model._target_=???: must name a class or a function, as in my_package.MyModel",
        ),
        ("model", "model._target_=5", "model._target_=5: must name a class or a function, as in my_package.MyModel"),
        ("model", "model.heads=???", "model.heads=???: must be given"),
    ],
)
def test_one_wrong_value_is_one_message(part, override, message):
    assert problems_of(part, override) == [message]


def test_all_that_is_wrong_in_a_part_comes_at_once():
    found = problems_of("train", "train.steps=1.5", "train.global_batch=big", "train.max_minutes=true")
    assert [line.partition("=")[0] for line in found] == ["train.global_batch", "train.steps", "train.max_minutes"]
    found = problems_of("train", "train.steps=0", "train.global_batch=0")
    assert [line.partition("=")[0] for line in found] == ["train.global_batch", "train.steps"]


def test_a_part_is_judged_while_another_is_wrong():
    read = config.read(composed("precision=fp4", "train.steps=7"))
    assert read.train.steps == 7


@pytest.mark.parametrize("override", ["train=5", "~train", "train=null"])
def test_a_group_that_is_not_one_is_explained(override):
    (line,) = problems_of("train", override)
    assert re.fullmatch(r"train=\w+: is a group of options; .* --cfg job --package train", line)


class TestResolve:
    def test_interpolations_become_values(self):
        data = config.resolve(composed("model=toy", "model.inputs=5", "seed=3"))["data"]
        assert (data["inputs"], data["outputs"], data["seed"]) == (5, 8, 3)

    def test_containers_are_plain_and_values_keep_their_types(self):
        optimizer = config.resolve(composed())["optimizer"]
        assert type(optimizer) is dict
        assert optimizer["betas"] == [0.9, 0.95]
        assert type(optimizer["betas"]) is list

    def test_what_leads_nowhere_stays_as_it_is_written(self):
        """A run that is refused has a record too, and that holds the configuration."""
        resolved = config.resolve(composed("seed=${sead}", "optimizer.betas=['${nowhere}',1]", "model.heads=???"))
        assert resolved["seed"] == "${sead}"
        assert resolved["data"]["seed"] == "${seed}"  # which is there, and leads on to nowhere
        assert resolved["optimizer"]["betas"] == ["${nowhere}", 1]
        assert resolved["model"]["heads"] == "???"
