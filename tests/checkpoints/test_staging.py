"""Copies in memory that is reused, and what is asked of CUDA for tensors on a GPU."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def test_copies_are_equal_and_of_their_own():
    tensors = some()
    copies = Staging()(tensors)()
    assert copies.keys() == tensors.keys()
    for name, tensor in some().items():
        tensors[name].zero_()
        assert torch.equal(copies[name], tensor)
        assert (copies[name].dtype, copies[name].stride()) == (tensor.dtype, tensor.stride())
        # torch.save writes the storage
        assert copies[name].untyped_storage().nbytes() == tensor.nbytes


def test_memory_is_reused_while_the_tensors_are_alike():
    stage = Staging()
    places = [{name: copy.data_ptr() for name, copy in stage(some(value))().items()} for value in (1.0, 2.0)]
    assert places[0] == places[1]
    assert torch.equal(stage(some(3.0))()["weight"], torch.full((3, 5), 3.0))
    assert stage({"weight": torch.ones(2)})().keys() == {"weight"}


def test_gaps_between_elements_are_not_copied():
    tensor = torch.arange(12.0).reshape(3, 4)[:, :2]
    copy = Staging()({"part": tensor})()["part"]
    assert torch.equal(copy, tensor)
    assert copy.untyped_storage().nbytes() == 24


class Cuda:
    """What staging asks of CUDA, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.current = "steps"
        cuda, copy = self, Tensor.copy_

        class Event:
            def record(self) -> None:
                cuda.calls.append(f"record in {cuda.current}")

            def synchronize(self) -> None:
                cuda.calls.append("wait for the event")

        class Stream:
            def __init__(self, name: str = "other") -> None:
                self.name = name

            def wait_stream(self, stream: Stream) -> None:
                cuda.calls.append(f"{self.name} waits for {stream.name}")

        @contextmanager
        def within(stream: Stream) -> Iterator[None]:
            cuda.current = stream.name
            yield
            cuda.current = "steps"

        class Runtime:
            def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
                cuda.calls.append(("pin", address, size))
                return 0

            def cudaHostUnregister(self, address: int) -> int:
                cuda.calls.append(("unpin", address))
                return 0

        def copied(into: Tensor, tensor: Tensor, non_blocking: bool = False) -> Tensor:
            cuda.calls.append((f"copy in {cuda.current}", into.data_ptr(), non_blocking))
            return copy(into, tensor)

        def refuse() -> None:
            raise AssertionError("staging must not wait for the whole device")

        monkeypatch.setattr(saver, "_on_gpu", lambda tensors: True)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", within)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(cuda.current))
        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        monkeypatch.setattr(Tensor, "copy_", copied)

    def pinned(self) -> list[Any]:
        """What was pinned and released."""
        return [call for call in self.calls if call[0] in ("pin", "unpin")]


class TestOnAGpu:
    def test_the_host_does_not_wait_before_the_copies_are_asked_for(self, monkeypatch):
        """What the next forward pass may change is copied before it, and what it leaves as it is beside it."""
        cuda = Cuda(monkeypatch)
        tensors = some()
        stage = Staging()
        when_copied = stage(tensors, {"weight", "step"})
        (_, address, size), *asked = cuda.calls
        assert address % mmap.PAGESIZE == 0
        copies = [call for call in asked if call[0].startswith("copy")]
        for _, place, non_blocking in copies:
            assert non_blocking
            assert place == 0 or address <= place < address + size  # an empty tensor is nowhere
        before, beside = ["copy in steps"] * (len(tensors) - 2), ["copy in other"] * 2
        assert [call[0] if isinstance(call, tuple) else call for call in asked] == [
            *before, "other waits for steps", *beside, "record in other"
        ]  # fmt: skip
        del cuda.calls[:]
        when_copied()
        stage.settle()
        assert cuda.calls == ["wait for the event", "steps waits for other"]

    def test_memory_is_pinned_once_and_not_after_close(self, monkeypatch):
        cuda = Cuda(monkeypatch)
        stage = Staging()
        stage(some(1.0))
        stage(some(2.0))
        stage.close()
        stage.close()
        pin, unpin = cuda.pinned()
        assert (pin[0], unpin) == ("pin", ("unpin", pin[1]))

    def test_other_tensors_get_other_memory_and_none_is_left_pinned_by_a_run_that_failed(self, monkeypatch):
        cuda = Cuda(monkeypatch)
        stage = Staging()
        stage(some())
        stage({"weight": torch.ones(2)})
        assert [call[0] for call in cuda.pinned()] == ["pin", "unpin", "pin"]
        del stage
        gc.collect()
        assert [call[0] for call in cuda.pinned()] == ["pin", "unpin"] * 2
