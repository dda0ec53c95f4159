"""Loading runs no code, whatever a checkpoint holds."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata

from ptdbench.checkpoints import state
from ptdbench.checkpoints.saver import Saver
from ptdbench.checkpoints.state import load_tensors, stored_tensors
from ptdbench.problems import ConfigError
from tests.refusals import refusal_of

TENSORS = {
    "model.weight": torch.arange(12.0).reshape(3, 4), "model.empty": torch.zeros(0, 2),
    "optimizer.weight.step": torch.tensor(7.0), "model.narrow": torch.ones(5, dtype=torch.bfloat16),
    "rng.cpu.0": torch.arange(256, dtype=torch.uint8),
}  # fmt: skip


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def checkpoint(tmp_path: Path, alone: None) -> Path:
    saver = Saver(tmp_path, keep=1, asynchronous=False)
    saver.save(1, TENSORS, {}, {})
    saver.close()
    return tmp_path / "checkpoints" / "step-00000001"


def wanted() -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 9) for name, tensor in TENSORS.items()}


def refusal(checkpoint: Path) -> str:
    (line,) = refusal_of(load_tensors, checkpoint, wanted()).splitlines()
    assert line.startswith(f"resume={checkpoint}: ")
    return line.removeprefix(f"resume={checkpoint}: ")


def rewrite(checkpoint: Path, of_tensor: Callable[[Any], object]) -> None:
    """Change in the metadata where each tensor lies, as one could who writes checkpoints."""
    path = checkpoint / ".metadata"
    described = pickle.loads(path.read_bytes())
    for place in described.storage_data.values():
        of_tensor(place)
    path.write_bytes(pickle.dumps(described))


def test_tensors_are_loaded_in_place(checkpoint):
    assert stored_tensors(checkpoint) == {name: (tensor.size(), tensor.dtype) for name, tensor in TENSORS.items()}
    tensors = wanted()
    rooms = dict(tensors)
    load_tensors(checkpoint, tensors)
    for name, tensor in TENSORS.items():
        assert torch.equal(rooms[name], tensor)
        assert tensors[name] is rooms[name]
    with pytest.raises(ConfigError, match=r"Missing key in checkpoint state_dict: model\.other"):
        load_tensors(checkpoint, {"model.other": torch.zeros(2)})


def test_metadata_with_code_is_refused(checkpoint, marker):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Touch(marker)))
    assert refusal(checkpoint).startswith("would run code: .metadata refers to posix.system; ")
    with pytest.raises(ConfigError, match="would run code"):
        stored_tensors(checkpoint)
    assert not marker.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert marker.exists()  # the trap is one


@pytest.mark.parametrize("how", ["load", "TypedStorage"])
def test_tensor_file_with_code_is_refused(checkpoint, marker, how, tmp_path):
    torch.save({"load": Touch(marker), "TypedStorage": [torch.zeros(3, 4), Touch(marker)]}[how], tmp_path / "trap")
    trap = (tmp_path / "trap").read_bytes()

    rewrite(checkpoint, lambda place: place.__dict__.update(offset=0, length=len(trap)))
    (checkpoint / "__0_0.distcp").write_bytes(trap)
    assert refusal(checkpoint).startswith("would run code: a tensor's file refers to posix.system; ")
    assert not marker.exists()
    torch.load(tmp_path / "trap", weights_only=False)
    assert marker.exists()


def test_item_that_is_no_tensor_is_refused(checkpoint, marker):
    """As torch itself saves and loads them: without any check."""
    tensors: dict[str, Any] = {**TENSORS, "rng.cpu.0": Touch(marker)}
    (checkpoint / ".metadata").unlink()
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(checkpoint))
    assert refusal(checkpoint).startswith("would run code: rng.cpu.0 is not a tensor and would be unpickled; ")
    assert not marker.exists()
    dcp.load({"rng.cpu.0": 0}, checkpoint_id=checkpoint)
    assert marker.exists()


def moved(field: str, value: object) -> Callable[[Path], object]:
    """Says of each tensor that it lies elsewhere, or in another form."""
    return lambda checkpoint: rewrite(checkpoint, lambda place: setattr(place, field, value))


def described(content: bytes) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / ".metadata").write_bytes(content)


@pytest.mark.parametrize(("damage", "reason"), [
    *(
        (described(f"ctorch\n{name}\n.".encode()), f"would run code: .metadata refers to torch.{name}; ")
        for name in ("load", "nn.Linear", "Size.__class__", "_C._cuda_init", "hub.load_state_dict_from_url")
    ),
    *(
        (moved("relative_path", path), "would run code: .metadata points to a file outside the checkpoint; ")
        for path in ("../elsewhere.distcp", "/etc/passwd", "sub/__0_0.distcp")
    ),
    (
        moved("transform_descriptors", ["stream.zstd/1"]),
        "would run code: .metadata requires a transformation of __0_0.distcp; ",
    ),
    (described(b""), "cannot be read: .metadata: EOFError"),
    (described(b"\x80\x04."), "cannot be read: .metadata: "),
    (
        described(pickle.dumps({"model.weight": 1})),
        "cannot be read: .metadata: TypeError: it does not describe a checkpoint; ",
    ),
    (lambda checkpoint: (checkpoint / "__0_0.distcp").unlink(), "cannot be read: rank 0: FileNotFoundError"),
    (lambda checkpoint: (checkpoint / ".metadata").unlink(), "cannot be read: .metadata: FileNotFoundError"),
])  # fmt: skip
def test_damaged_checkpoint_is_refused_with_the_reason(checkpoint, damage, reason):
    damage(checkpoint)
    assert refusal(checkpoint).startswith(reason)


def test_signal_is_not_taken_for_a_broken_checkpoint(checkpoint, monkeypatch):
    monkeypatch.setattr(torch, "load", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        load_tensors(checkpoint, wanted())


def test_properties_of_a_newer_torch_are_dropped() -> None:
    known = metadata.TensorProperties(dtype=torch.bfloat16)
    read = state._Properties.__new__(state._Properties)
    read.__setstate__((*known.__getstate__(), "of a newer torch"))
    assert type(read) is metadata.TensorProperties
    assert read == known
