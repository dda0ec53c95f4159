from typing import Any

import pytest
import torch
from torch import nn

from ptdbench.measure import hardware
from ptdbench.parallel.precision import arithmetic, cast_inputs
from tests.models.assembled import assembled


@pytest.mark.parametrize(("precision", "device", "on", "name"), [
    ("fp32", "cuda", False, "fp32"),
    ("tf32", "cuda", True, "tf32"),
    ("fp32", "cuda", True, "tf32"),  # not as asked for, but as it is
    ("fp32", "cpu", True, "fp32"),
    ("bf16", "cuda", True, "bf16"),
    ("fp16", "cuda", False, "fp16"),
])  # fmt: skip
def test_arithmetic_of_products(precision, device, on, name):
    with hardware.tf32_allowed(on):
        assert arithmetic(precision, device) == name


def remembers(self: Any, inputs: Any, targets: Any = None, **options: Any) -> Any:
    self.seen = {"inputs": inputs, "targets": targets, **options}
    return inputs


def test_inputs_are_cast_except_targets():
    module, floats = assembled(remembers), torch.ones(2)
    cast_inputs(module, [], "bf16")
    tokens = torch.ones(2, dtype=torch.int64)
    for by_place, by_name in (((floats,), {}), ((), {"targets": floats})):
        module((floats, [tokens]), *by_place, mask=floats, size=3, **by_name)
        (inputs, (kept,)), targets = module.seen["inputs"], module.seen["targets"]
        assert inputs.dtype == module.seen["mask"].dtype == torch.bfloat16
        assert targets is floats
        assert kept is tokens
        assert module.seen["size"] == 3


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_fp32_tensors_leave_the_forward_alone(precision):
    layer = nn.Linear(4, 4)
    cast_inputs(layer, [layer], precision)
    assert "forward" not in vars(layer)
    assert type(layer) is nn.Linear
