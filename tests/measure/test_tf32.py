from __future__ import annotations

import pytest
import torch

from ptdbench.measure import hardware

SWITCHES = {"products": torch.backends.cuda.matmul, "convolutions": torch.backends.cudnn.conv}


@pytest.fixture(autouse=True)
def _as_before():
    with hardware.tf32_allowed(True):
        yield


@pytest.mark.parametrize("on", [False, True])
def test_both_switches_are_set_in_both_of_torchs_interfaces(on):
    """The newer one speaks of ieee, or of none where nothing else is set."""
    hardware.allow_tf32(on)
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == hardware.is_tf32_allowed() == on
    assert {name: switch.fp32_precision == "tf32" for name, switch in SWITCHES.items()} == dict.fromkeys(SWITCHES, on)
    assert torch.get_float32_matmul_precision() == ("high" if on else "highest")  # what the compiler reads


def test_torchs_own_default_is_not_fp32():
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    assert hardware.is_tf32_allowed()
    with hardware.tf32_allowed(False):
        assert not hardware.is_tf32_allowed()
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32
