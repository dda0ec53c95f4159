"""Copies in memory that is reused, and what is asked of CUDA for tensors on a GPU."""

import gc
from unittest import mock

import pytest
import torch
from torch import Tensor

from ptdbench.checkpoints import saver
from ptdbench.checkpoints.saver import Staging


def some(value: float = 1.0) -> dict[str, Tensor]:
    return {
        "weight": torch.full((3, 5), value),
        "image weight": torch.full((2, 3, 4, 4), value).contiguous(memory_format=torch.channels_last),
        "half": torch.full((7,), value, dtype=torch.bfloat16),
        "step": torch.tensor(value),
        "nothing": torch.empty(0, 4),
        "generator": torch.arange(9, dtype=torch.uint8),
    }


def test_copies_are_equal_and_independent():
    tensors = some()
    copies = Staging()(tensors)()
    assert copies.keys() == tensors.keys()
    for name, tensor in some().items():
        tensors[name].zero_()
        assert torch.equal(copies[name], tensor)
        assert (copies[name].dtype, copies[name].stride()) == (tensor.dtype, tensor.stride())


def test_memory_is_reused_for_the_same_tensors_until_closed():
    stage, tensors = Staging(), some(1.0)
    first = {name: copy.data_ptr() for name, copy in stage(tensors)().items()}
    for tensor in tensors.values():
        tensor.fill_(2)
    copies = stage(tensors)()
    assert {name: copy.data_ptr() for name, copy in copies.items()} == first
    assert torch.equal(copies["weight"], torch.full((3, 5), 2.0))
    assert stage({"weight": torch.ones(2)})().keys() == {"weight"}
    stage.close()
    assert stage(tensors)()["weight"].data_ptr() != first["weight"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """What staging asks of CUDA, in order."""
    asked, copy = mock.MagicMock(), torch.UntypedStorage.copy_

    def copied(into: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: bool = False) -> object:
        asked.copy(non_blocking)
        return copy(into, source)

    monkeypatch.setattr(saver, "_on_gpu", lambda tensors: True)
    for name in ("Event", "Stream", "stream", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(asked, name))
    monkeypatch.setattr(torch.cuda._pin_memory_utils, "pin_memory", asked.pin)
    monkeypatch.setattr(torch.cuda._pin_memory_utils, "unpin_memory", asked.unpin)
    monkeypatch.setattr(torch.UntypedStorage, "copy_", copied)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return asked


def asked(cuda: mock.MagicMock) -> list[str]:
    return [name for name, *_ in cuda.mock_calls if not name.endswith("__bool__")]


class TestOnAGpu:
    def test_host_waits_for_the_gpu_only_when_asked(self, cuda):
        """What the next forward pass may change is copied before it, and what it leaves as it is beside it."""
        tensors = some()
        stage = Staging()
        when_copied = stage(tensors, {"weight", "step"})
        assert [name for name in asked(cuda) if name != "pin"] == [
            *["copy"] * 4, "Stream", "current_stream", "Stream().wait_stream", "stream",
            "stream().__enter__", "copy", "copy", "Event", "Event().record", "stream().__exit__",
        ]  # fmt: skip
        assert cuda.Stream().wait_stream.call_args.args == (cuda.current_stream(),)
        assert cuda.stream.call_args.args == (cuda.Stream(),)
        assert all(non_blocking for (non_blocking,) in (call.args for call in cuda.copy.call_args_list))
        cuda.reset_mock()
        when_copied()
        stage.settle()
        assert asked(cuda) == ["Event().synchronize", "current_stream", "current_stream().wait_stream"]
        assert cuda.current_stream().wait_stream.call_args.args == (cuda.Stream(),)

    def test_memory_is_pinned_until_closed(self, cuda):
        stage, tensors = Staging(), some(1.0)
        stage(tensors)
        stage(tensors)
        pinned = [call.args[0] for call in cuda.pin.call_args_list]
        assert len(pinned) == len({*pinned}) >= 4
        stage.close()
        gc.collect()
        assert {call.args[0] for call in cuda.unpin.call_args_list} == {*pinned}
