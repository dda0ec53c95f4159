"""Copies in memory that is reused, and what is asked of CUDA for tensors on a GPU."""

import gc
import mmap
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
        # torch.save writes the storage
        assert copies[name].untyped_storage().nbytes() == tensor.nbytes


def test_memory_is_reused_for_equal_layouts_and_copies_have_no_gaps():
    stage = Staging()
    places = [{name: copy.data_ptr() for name, copy in stage(some(value))().items()} for value in (1.0, 2.0)]
    assert places[0] == places[1]
    assert torch.equal(stage(some(3.0))()["weight"], torch.full((3, 5), 3.0))
    assert stage({"weight": torch.ones(2)})().keys() == {"weight"}
    tensor = torch.arange(12.0).reshape(3, 4)[:, :2]
    copy = Staging()({"part": tensor})()["part"]
    assert torch.equal(copy, tensor)
    assert copy.untyped_storage().nbytes() == 24


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """What staging asks of CUDA, in order."""
    asked, copy = mock.MagicMock(), Tensor.copy_

    def copied(into: Tensor, tensor: Tensor, non_blocking: bool = False) -> Tensor:
        asked.copy(into.data_ptr(), non_blocking)
        return copy(into, tensor)

    monkeypatch.setattr(saver, "_on_gpu", lambda tensors: True)
    for name in ("Event", "Stream", "stream", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(asked, name))
    monkeypatch.setattr(torch.cuda._pin_memory_utils, "pin_memory", asked.pin)
    monkeypatch.setattr(torch.cuda._pin_memory_utils, "unpin_memory", asked.unpin)
    monkeypatch.setattr(Tensor, "copy_", copied)
    return asked


def asked(cuda: mock.MagicMock) -> list[str]:
    return [name for name, *_ in cuda.mock_calls if not name.endswith("__bool__")]


class TestOnAGpu:
    def test_host_waits_for_the_gpu_only_when_asked(self, cuda):
        """What the next forward pass may change is copied before it, and what it leaves as it is beside it."""
        tensors = some()
        stage = Staging()
        when_copied = stage(tensors, {"weight", "step"})
        assert asked(cuda) == [
            "pin", *["copy"] * (len(tensors) - 2), "Stream", "current_stream", "Stream().wait_stream", "stream",
            "stream().__enter__", "copy", "copy", "Event", "Event().record", "stream().__exit__",
        ]  # fmt: skip
        assert cuda.Stream().wait_stream.call_args.args == (cuda.current_stream(),)
        assert cuda.stream.call_args.args == (cuda.Stream(),)
        address, size = cuda.pin.call_args.args
        assert address % mmap.PAGESIZE == 0
        for place, non_blocking in (call.args for call in cuda.copy.call_args_list):
            assert non_blocking
            assert place == 0 or address <= place < address + size  # an empty tensor is nowhere
        cuda.reset_mock()
        when_copied()
        stage.settle()
        assert asked(cuda) == ["Event().synchronize", "current_stream", "current_stream().wait_stream"]
        assert cuda.current_stream().wait_stream.call_args.args == (cuda.Stream(),)

    def test_memory_is_pinned_until_closed(self, cuda):
        stage = Staging()
        stage(some(1.0))
        stage(some(2.0))
        stage.close()
        stage.close()
        assert cuda.pin.call_count == 1
        assert [call.args for call in cuda.unpin.call_args_list] == [cuda.pin.call_args.args[:1]]

    def test_dropped_memory_is_unpinned(self, cuda):
        stage = Staging()
        stage(some())
        stage({"weight": torch.ones(2)})
        assert [name for name in asked(cuda) if "pin" in name] == ["pin", "unpin", "pin"]
        del stage
        gc.collect()
        assert [name for name in asked(cuda) if "pin" in name] == ["pin", "unpin"] * 2
