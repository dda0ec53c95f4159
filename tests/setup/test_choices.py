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
@pytest.mark.parametrize("group", config.CALLS)
@pytest.mark.parametrize("target", ["os.system", "builtins.exec", "subprocess.Popen", "shutil.rmtree"])
def test_what_hydra_refuses_to_call_is_refused_in_every_group(group, target):
    call = config.Call("mine", target, {})
    with pytest.raises(ConfigError) as caught:
        choices.check(call, group)
    assert str(caught.value).startswith(
        f"{group}._target_={target}: Hydra refuses it: Target '{target}' is blocklisted"
    )


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
        ("math.pi", "must be a class or a function"),
        ("", "cannot be imported: Empty path"),
    ],
)
def test_what_is_not_there(target, rule):
    with pytest.raises(ConfigError, match=rule):
        choices.check(config.Call("mine", target, {}), "model")
