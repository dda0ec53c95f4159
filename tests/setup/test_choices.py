"""What a configuration may call, and GPUs by name or from a file."""

import pytest
from hydra.utils import instantiate
from torch import nn

from ptdbench.problems import ConfigError
from ptdbench.setup import choices, config
from tests.refusals import Abridged, refusal_of

try:
    instantiate({"_target_": "os.system", "_partial_": True})
    HAS_A_LIST = False
except Exception:
    HAS_A_LIST = True
with_list = pytest.mark.skipif(not HAS_A_LIST, reason="this Hydra calls whatever is named")


@with_list
def test_what_hydra_refuses_to_call_is_refused():
    told = "data._target_=os.system: Hydra refuses it: Target 'os.system' is blocklisted…"
    assert refusal_of(choices.check, config.Call("mine", "os.system", {}), "data") == Abridged(told)


@with_list
def test_what_an_optimizer_is_given_is_held_to_the_same():
    nested = {"_target_": "os.system", "command": "true"}
    read = config.Config({"optimizer": {"name": "mine", "_target_": "builtins.dict", "more": [nested]}})
    with pytest.raises(ConfigError, match=r"optimizer=.* cannot be built: Target 'os.system' is blocklisted"):
        choices.bound(read, "optimizer", "params")


def optional(width=8, name=None, label="x"): ...


def required(name, width): ...


TAKEN = "is ptdbench's name for the choice, and is not passed on; wrap the callable in a function with another"


@pytest.mark.parametrize(("target", "options", "told"), [
    (optional, {"name": "optional"}, []),  # as model=custom is called
    (optional, {"name": "mine"}, [f"model.name=mine: {TAKEN} argument name"]),
    (optional, {"name": "optional", "label": 3}, [f"model.label=3: {TAKEN} argument name"]),
    (required, {"name": "required", "width": 3}, [f"model.name=required: {TAKEN} argument name"]),
    (dict, {"name": "mine", "label": 3}, []),
    # What Hydra has of its own.
    (optional, {"name": "optional", "_args_": [3], "_convert_": "none", "_recursive_": False}, []),
    (required, {"name": "mine", "_args_": ["mine"], "width": 3}, []),
    (required, {"name": "mine", "_args_": ["mine"]}, ["model.width=(not set): must be given"]),
    (nn.Sequential, {"name": "mine", "_args_": [{"_target_": "torch.nn.Flatten"}]}, []),
])  # fmt: skip
def test_what_is_beside_the_options_is_held_back(target, options, told):
    call = config.Config({"model": {"_target_": f"{target.__module__}.{target.__name__}", **options}}).call("model")
    if not told:
        choices.check(call, "model")
        return
    assert refusal_of(choices.check, call, "model").splitlines() == told


def test_arguments_without_names_and_conversion_are_those_that_are_given():
    described = {"name": "mine", "_target_": "builtins.dict", "_args_": [{"a": [1]}], "_convert_": "none"}
    assert type(choices.build(config.Config({"data": described}), "data")["a"]) is not list
    made = choices.build(config.Config({"data": {**described, "_convert_": "all", "b": 2}}), "data")
    assert (made, type(made["a"])) == ({"a": [1], "b": 2}, list)


@pytest.mark.parametrize(("target", "rule"), [
    ("gone.away.X", "cannot be imported: No module named 'gone'; it is searched for in the current directory"),
    ("gone", "cannot be imported: No module named 'gone'; it is searched for"),
    ("torch.nn.Linearr", r"torch\.nn has no Linearr; try torch\.nn\.Linear, "),
    ("broken_package.Net", "cannot be imported: no license; it is searched for"),
    ("math.pi", "must be a class or a function"),
    ("os", "must be a class or a function"),
    ("", "cannot be imported: Empty path"),
])  # fmt: skip
def test_what_is_not_there(target, rule, tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise OSError('no license')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rule):
        choices.check(config.Call("mine", target, {}), "model")


OWN = """
defaults: [h100, _self_]
name: mine
gpu:
  name: NVIDIA H100 96GB
  memory: 94GiB
"""


def test_every_gpu_has_its_figures_and_their_source():
    models = {name: choices.gpu(name) for name in choices.gpu_names()}
    assert {"h100", "l4", "gb200", "rtx_4090"} <= {*models}
    assert all(model.source and model.memory > 8 << 30 for model in models.values())
    assert models["h200"].multiprocessors == models["h100"].multiprocessors == 132  # by its defaults


def test_file_of_ones_own_is_a_gpu(tmp_path):
    (tmp_path / "mine.yaml").write_text(OWN)
    model = choices.gpu(str(tmp_path / "mine.yaml"))
    assert (model.name, model.memory, model.l2) == ("NVIDIA H100 96GB", 94 << 30, 52428800)


@pytest.mark.parametrize(
    ("text", "message"),
    [("gpu: {memory: much}", "must be"), ("name: mine", "describes no GPU"), ("{", "describes no GPU")],
)
def test_unusable_file_is_refused(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    assert message in refusal_of(choices.gpu, str(tmp_path / "mine.yaml"))


def test_missing_file_is_named(tmp_path):
    assert "missing.yaml: describes no GPU" in refusal_of(choices.gpu, str(tmp_path / "missing.yaml"))
