"""What a configuration may call."""

import pytest
from hydra.utils import instantiate

from ptdbench.problems import ConfigError
from ptdbench.setup import choices, config

try:
    instantiate({"_target_": "os.system", "_partial_": True})
except Exception:
    HYDRA_HAS_A_LIST = True
else:
    HYDRA_HAS_A_LIST = False


@pytest.mark.skipif(not HYDRA_HAS_A_LIST, reason="this Hydra calls whatever is named")
def test_what_hydra_refuses_to_call_is_refused():
    with pytest.raises(ConfigError) as caught:
        choices.check(config.Call("mine", "os.system", {}), "data")
    said = "data._target_=os.system: Hydra refuses it: Target 'os.system' is blocklisted"
    assert str(caught.value).startswith(said)


@pytest.mark.skipif(not HYDRA_HAS_A_LIST, reason="this Hydra calls whatever is named")
def test_what_an_optimizer_is_given_is_held_to_the_same():
    nested = {"_target_": "os.system", "command": "true"}
    read = config.Config({"optimizer": {"name": "mine", "_target_": "builtins.dict", "more": [nested]}})
    with pytest.raises(ConfigError, match=r"optimizer=.* cannot be built: Target 'os.system' is blocklisted"):
        choices.bound(read, "optimizer", "params")


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("gone.away.X", "cannot be imported: No module named 'gone'; it is looked for in the current directory"),
        ("torch.nn.Linearr", "cannot be imported: No module named 'torch.nn.Linearr'; it is looked for"),
        ("broken_package.Net", "cannot be imported: no license; it is looked for"),
        ("math.pi", "must be a class or a function"),
        ("os", "must be a class or a function"),
        ("", "cannot be imported: Empty path"),
    ],
)
def test_what_is_not_there(target, rule, tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise OSError('no license')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rule):
        choices.check(config.Call("mine", target, {}), "model")
