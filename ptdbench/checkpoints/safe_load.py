"""Loading tensors from a checkpoint without running code from it.

torch reads the tensors with ``weights_only``. Two ways to run code remain in its distributed checkpoints: ``.metadata``
is a pickle, and an item that is not a tensor is unpickled unchecked. Here the pickle may refer only to classes of
metadata, and other items are rejected.
"""

import pickle
import re
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.serialization import _get_layout  # type: ignore[attr-defined]  # how torch pickles a layout

from ptdbench.problems import ConfigError, Problem

METADATA = ".metadata"


class _Properties(TensorProperties):
    """Properties of a tensor; a newer torch adds strides that loading does not need."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        count = len(TensorProperties().__getstate__())  # type: ignore[no-untyped-call]
        super().__setstate__(state[:count])  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]


#: The classes of metadata, other than dtypes such as ``torch.float32``. All of them only hold values.
_CLASSES: tuple[Any, ...] = (
    torch.Size, _get_layout, filesystem._StorageInfo, Metadata, TensorStorageMetadata, metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING,
)  # fmt: skip
_ALLOWED = {
    **{(allowed.__module__, allowed.__name__): allowed for allowed in _CLASSES},
    (TensorProperties.__module__, "TensorProperties"): _Properties,
    # The path that the checkpoint was written to, unused.
    **{
        (module, name): PurePath
        for module in ("pathlib", "pathlib._local")  # Python 3.13 and newer
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


def load(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Fill ``tensors`` in place from the checkpoint in ``path``; called in all ranks, with a CPU ``group``.

    The tensors must have the sizes that :func:`names` returns; a DTensor gets its shards, however it was saved. Ranks
    may pass different names, and all fail if one does.

    Raises:
        ConfigError: The checkpoint cannot be read, does not have a name, or would run code.
    """
    reader = _Reader(path, _read_metadata(path))
    try:
        dcp.load(
            tensors,  # type: ignore[arg-type]  # a dict of any values
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as failure:
        reason = reasons(failure)
        needed = re.search(r"GLOBAL (\S+)", reason)
        if needed and "UnpicklingError" in reason:  # torch's own message advises loading without checks
            raise _refusal(path, f"would run code: a tensor's file refers to {needed[1]}") from None
        raise _refusal(path, f"cannot be read: {reason.partition(chr(10))[0]}") from None


def names(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return size and dtype of every tensor by name; raise ConfigError if they cannot be read, or would run code."""
    items = _read_metadata(path).state_dict_metadata
    return {
        name: (item.size, item.properties.dtype)
        for name, item in items.items()
        if isinstance(item, TensorStorageMetadata)
    }


def reasons(failure: CheckpointException) -> str:
    """Return every rank's error in one line; re-raise what is not an error, such as a signal."""
    errors = {rank: wrapped[0] for rank, wrapped in sorted(failure.failures.items())}
    for error in errors.values():
        if not isinstance(error, Exception):
            raise error
    return "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items())


class _Reader(dcp.FileSystemReader):
    """torch's reader, with metadata that has already been read."""

    def __init__(self, path: Path, read: Metadata) -> None:
        super().__init__(path)
        self._read = read

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._read


class _Unpickler(pickle.Unpickler):
    """Unpickles only the classes of metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Forbidden(f"{METADATA} refers to {module}.{name}")


class _Forbidden(Exception):
    """A checkpoint contains what it must not."""


def _read_metadata(path: Path) -> Metadata:
    try:
        with (path / METADATA).open("rb") as file:
            read = _Unpickler(file).load()
        _check(read)
    except _Forbidden as error:
        raise _refusal(path, f"would run code: {error}") from None
    except Exception as error:  # broken bytes may raise anything
        raise _refusal(path, f"cannot be read: {METADATA}: {type(error).__name__}: {error}") from None
    return read


def _check(read: Any) -> None:
    """Raise _Forbidden if anything would be unpickled later or read elsewhere, TypeError if it is not metadata."""
    if not isinstance(read, Metadata) or not isinstance(read.storage_data, dict):
        raise TypeError("it does not describe a checkpoint")
    for name, item in read.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            raise _Forbidden(f"{name} is not a tensor and would be unpickled")
    for place in read.storage_data.values():
        if not isinstance(place, filesystem._StorageInfo) or PurePath(place.relative_path).name != place.relative_path:
            raise _Forbidden(f"{METADATA} points to a file outside the checkpoint")
        if getattr(place, "transform_descriptors", None):
            raise _Forbidden(f"{METADATA} requires a transformation of {place.relative_path}")


def _refusal(path: Path, rule: str) -> ConfigError:
    return ConfigError([Problem("resume", path, rule, "give a checkpoint written by ptdbench")])
