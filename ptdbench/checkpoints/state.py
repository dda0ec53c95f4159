"""The state of a run in a checkpoint, as tensors by name, and how these are read without running code from it.

The state are weights, optimizer state and random generators. Names are full names in the model under every layout: a
weight is one entry, whether it is in pipeline stages, DDP replicas or FSDP shards, and can be loaded under another
layout and on another number of ranks.

torch reads the tensors with ``weights_only``. Two ways to run code remain in its distributed checkpoints: ``.metadata``
is a pickle, and an item that is not a tensor is unpickled unchecked. Here the pickle may refer only to classes of
metadata, and other items are rejected.
"""

import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.serialization import _get_layout  # type: ignore[attr-defined]  # how torch pickles a layout

from ptdbench.grouping import grouped
from ptdbench.launch.collect import gather
from ptdbench.local_part import device_of, local_part, unwrapped, without_repeats
from ptdbench.models.protocol import Tied
from ptdbench.parallel.replicas import checksums, differing
from ptdbench.problems import ConfigError, Problem

METADATA = ".metadata"

#: Number of differences shown in an error.
_SHOWN = 3

#: Size and dtype of a tensor.
Shape = tuple[torch.Size, torch.dtype]


class TrainingState:
    """The training state of one rank, in the form of a checkpoint.

    Args:
        module: The module with this rank's weights and buffers.
        optimizer: The optimizer of its parameters.
        tied: Pairs of names that share one weight; copies in different stages become one entry, under the first name.
        rank: The rank, for its random generators and buffers.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, tied: Tied, rank: int) -> None:
        self._module, self._optimizer, self._tied, self._rank = module, optimizer, tied, rank
        self.differed: str | None = None  #: The first buffer that differed between ranks in the restored checkpoint.
        self._built: dict[str, int] = {}

    def note_buffers(self) -> None:
        """Note the buffers before the first step: non-persistent ones that change are saved."""
        self._built = dict(checksums(self._module.named_buffers()))

    def own_buffers(self, *, first_replica: bool) -> dict[str, Tensor]:
        """Return the buffers to save in addition to the model's, as ``buffer.<name>``; called in all ranks.

        Those that differ between ranks, and on the ``first_replica`` non-persistent ones that have changed.
        """
        now, persistent = dict(checksums(self._module.named_buffers())), self._module.state_dict().keys()
        kept = {*differing(now.items())}
        if first_replica:
            kept |= {name for name in now.keys() - persistent if now[name] != self._built.get(name)}
        named = ((name, local_part(buffer)) for name, buffer in self._module.named_buffers() if name in kept)
        return {f"buffer.{name}": without_repeats(buffer) for name, buffer in named}

    def collect(self, *, with_buffers: bool, local: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return this rank's tensors by their names in a checkpoint, without copying them.

        Only between two steps: within a step, FSDP holds all-gathered weights instead of shards.

        Args:
            with_buffers: Whether to include this rank's buffers; on one replica only, as batch norm statistics differ.
            local: Buffers that only this rank has, from :meth:`own_buffers`.

        Returns:
            ``model.<name>``, ``optimizer.<name>.<key>``, ``rng.cpu.<rank>`` and, on a GPU, ``rng.cuda.<rank>``;
            ``own.<rank>.<name>``.

        Raises:
            ConfigError: The optimizer has state that is not a tensor.
        """
        tensors = self._trained(with_buffers) | {f"rng.cpu.{self._rank}": torch.get_rng_state()}
        tensors |= {f"own.{self._rank}.{name}": tensor for name, tensor in (local or {}).items()}
        if (device := device_of(self._module)).type == "cuda":
            tensors[f"rng.cuda.{self._rank}"] = torch.cuda.get_rng_state(device)
        return tensors

    def steady(self, names: Iterable[str]) -> set[str]:
        """Return the names of trained weights and optimizer state, which only an update changes.

        A forward pass may change buffers and frozen weights, as in a momentum encoder.
        """
        weights = {f"model.{name}" for name, weight in self._weights() if weight.requires_grad}
        return {name for name in names if name in weights or name.startswith("optimizer.")}

    def restore(self, path: Path, *, same_layout: bool, group: dist.ProcessGroup | None = None) -> None:
        """Load a checkpoint into a run before its first step, when the optimizer has no state; called in all ranks.

        The layout and the number of ranks may have changed. Random generators are restored only in the
        ``same_layout``: in another one, this rank may be in a tensor-parallel group, whose ranks must draw the same
        random numbers. ``group``: a CPU group of all ranks.

        Raises:
            ConfigError: The checkpoint is of another model or optimizer (with the differences), cannot be read, or
                would run code; raised in all ranks.
        """
        stored, device = stored_tensors(path), device_of(self._module)
        self._make_optimizer_state(stored)
        tensors = self._trained(with_buffers=True)
        _require_same(path, tensors, stored, group)
        buffers, self.differed = _kept_buffers(stored, self._rank if same_layout else -1)
        kinds = ("cpu", "cuda") if device.type == "cuda" else ("cpu",)
        generators = [f"rng.{kind}.{self._rank}" for kind in kinds] if same_layout else []
        names = {*buffers.values(), *(name for name in generators if name in stored)}
        of_rank = {name: torch.empty(stored[name][0], dtype=stored[name][1]) for name in names}
        load_tensors(path, tensors | of_rank, group)
        self._copy_to_second()
        self._put_back({name: of_rank.pop(full) for name, full in buffers.items()})
        for name, state in of_rank.items():
            if name.startswith("rng.cuda."):
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)

    @torch.no_grad()
    def _put_back(self, values: Mapping[str, Tensor]) -> None:
        for prefix, part in self._module.named_modules():
            for leaf, buffer in part._buffers.items():
                value = values.get(f"{prefix}.{leaf}".lstrip("."))
                if value is not None and buffer is None:
                    part._buffers[leaf] = value.to(device_of(self._module))
                elif value is not None and (target := without_repeats(local_part(buffer))).shape == value.shape:
                    target.copy_(value)  # otherwise it belongs to samples, as a mask does

    def _trained(self, with_buffers: bool) -> dict[str, Tensor]:
        """Return weights, buffers and optimizer state by name, as detached tensors that share memory with the run."""
        persistent = self._module.state_dict().keys() if with_buffers else ()
        trained = {f"model.{name}": buffer for name, buffer in self._module.named_buffers() if name in persistent}
        for name, weight in self._weights():
            # A second copy on this rank may have state where the first has none, as ZeRO-1 shards stages separately.
            trained.setdefault(f"model.{name}", unwrapped(weight))
            for key, value in self._optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor):
                    trained.setdefault(f"optimizer.{name}.{key}", unwrapped(value))
                elif value is not None:
                    rule = f"keeps {key} as {type(value).__name__}, but checkpoints hold only tensors"
                    raise ConfigError([Problem("optimizer", type(self._optimizer).__name__, rule, "try adamw, sgd")])
        return trained

    def _weights(self) -> Iterable[tuple[str, nn.Parameter]]:
        first_of = {second: first for first, second in self._tied}
        return ((first_of.get(name, name), weight) for name, weight in self._module.named_parameters())

    @torch.no_grad()
    def _copy_to_second(self) -> None:
        """Copy each loaded tied weight, with its state, to its copy in another stage of this rank, if any."""
        named, state = dict(self._module.named_parameters()), self._optimizer.state
        for first, second in ((named.get(first), named.get(second)) for first, second in self._tied):
            if first is None or second is None:
                continue
            second.copy_(first)
            for key, value in state.get(first, {}).items():
                if isinstance(value, Tensor) and key in state.get(second, {}):
                    state[second][key].copy_(value)

    def _make_optimizer_state(self, stored: Mapping[str, Shape]) -> None:
        """Create optimizer state, with arbitrary values, for the weights whose state is in the checkpoint.

        Only the optimizer knows the form of its state, so it steps on zero gradients; loading undoes the effect on the
        weights.
        """
        kept = {name.rpartition(".")[0] for name in stored}
        stepped = [weight for name, weight in self._weights() if f"optimizer.{name}" in kept]
        for weight in stepped:
            weight.grad = torch.zeros_like(weight)
        if stepped:
            self._optimizer.step()
        if not type(self._optimizer).__module__.startswith(("torch.", "ptdbench.")):
            self._make_later_state(stored)
        for weight in stepped:
            weight.grad = None

    def _make_later_state(self, stored: Mapping[str, Shape]) -> None:
        """Create the state of later steps of a user's optimizer, if all the state of its first step is stored."""
        kept = grouped((prefix, key) for prefix, _, key in (full.rpartition(".") for full in stored))
        for name, weight in self._weights():
            state, keys = self._optimizer.state.get(weight), {*kept.get(f"optimizer.{name}", ())}
            if not state or not {key for key, value in state.items() if value is not None} <= keys:
                continue  # another replica's, under ZeRO-1, or another optimizer's
            for key in keys - {*state}:
                size, dtype = stored[f"optimizer.{name}.{key}"]
                alike = torch.empty_like(weight, dtype=dtype)  # sharded as the weight is
                state[key] = alike if size == weight.size() else torch.empty(size, dtype=dtype, device=weight.device)


def _require_same(
    path: Path,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, Shape],
    group: dist.ProcessGroup | None,
) -> None:
    """Raise a ConfigError in all ranks if the tensors of any of them differ from those stored."""
    shapes = gather({name: (tensor.size(), tensor.dtype) for name, tensor in tensors.items()}, group)
    expected = {name: shape for of_rank in shapes for name, shape in of_rank.items()}
    of_ranks = {name for name in stored if name.startswith(("rng.", "own."))}
    differences = {
        name: f"{name} is {_described(stored, name)} there and {_described(expected, name)} here"
        for name in sorted((expected.keys() | stored.keys()) - of_ranks)
        if expected.get(name) != stored.get(name)
    }
    if not differences:
        return
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    rule = f"is of another model or optimizer: {'; '.join([*differences.values()][:_SHOWN])}{more}"
    raise ConfigError([Problem("resume", path, rule, "resume with its model and optimizer")])


def _described(items: Mapping[str, Shape], name: str) -> str:
    if name not in items:
        return "missing"
    size, dtype = items[name]
    return f"{list(size)} {str(dtype).removeprefix('torch.')}"


def _kept_buffers(stored: Iterable[str], rank: int) -> tuple[dict[str, str], str | None]:
    """Return the entries of a checkpoint's additional buffers, of this rank, else of the first rank with them.

    And the first buffer that differed between ranks, so that several kept it.
    """
    kept: dict[str, dict[int, str]] = {}
    for full in stored:
        if match := re.fullmatch(r"own\.(\d+)\.buffer\.(.+)", full):
            kept.setdefault(match[2], {})[int(match[1])] = full
    differed = next((name for name, ranks in kept.items() if len(ranks) > 1), None)
    return {name: ranks.get(rank, ranks[min(ranks)]) for name, ranks in kept.items()}, differed


def load_tensors(path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Fill ``tensors`` in place from the checkpoint in ``path``; called in all ranks, with a CPU ``group``.

    The tensors must have the sizes of :func:`stored_tensors`; a DTensor gets its shards, however it was saved. Ranks
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
        reason = errors_in(failure)
        needed = re.search(r"GLOBAL (\S+)", reason)
        if needed and "UnpicklingError" in reason:  # torch's own message advises loading without checks
            raise _refusal(path, f"would run code: a tensor's file refers to {needed[1]}") from None
        raise _refusal(path, f"cannot be read: {reason.partition(chr(10))[0]}") from None


def stored_tensors(path: Path) -> dict[str, Shape]:
    """Return size and dtype of every tensor by name; raise ConfigError if they cannot be read, or would run code."""
    items = _read_metadata(path).state_dict_metadata
    return {
        name: (item.size, item.properties.dtype)
        for name, item in items.items()
        if isinstance(item, TensorStorageMetadata)
    }


def errors_in(failure: CheckpointException) -> str:
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
