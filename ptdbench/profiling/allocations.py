"""Memory of a step by purpose over time, from the allocations that torch's profiler recorded.

docs/breakdown.md says what each purpose contains. A block that one of gloo's threads frees last is counted until its
address is reused: the profiler does not see those threads.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch._C._profiler import _EventType, _TensorMetadata
from torch.autograd.profiler import profile

from ptdbench.profiling.phases import KINDS
from ptdbench.profiling.trace import BACKWARD, DATA, GRADIENTS, STEP, UPDATE

#: The label of the look-up of the training state's tensors.
INVENTORY = "ptdbench::inventory"

#: FSDP's labels of operations other than communication: their memory counts as activations.
_CASTS = ("FSDP::cast_forward_inputs", "FSDP::cast_forward_outputs", "FSDP::inputs_to_device")

#: FSDP's labels of operations that allocate unsharded gradients in the dtype in which they are accumulated.
_ACCUMULATES = ("FSDP::post_backward_accumulate", "FSDP::post_backward_reshard")


class Surroundings(NamedTuple):
    """The phase, module or operation during which a block was allocated or freed."""

    moment: str = "other"  #: ``data``, ``forward``, ``backward``, ``optimizer`` or ``other``.
    kind: str = "other"  #: Default purpose of a block that is allocated there.
    functional: bool = False  #: Whether it is a functional collective, whose result compute uses.
    takes_gradients: bool = False  #: Whether FSDP accumulates or reduces unsharded gradients.


#: The surroundings in the labeled parts of a step.
_PARTS = {
    DATA: Surroundings("data"),
    GRADIENTS: Surroundings("forward", "activations"),
    UPDATE: Surroundings("optimizer"),
}


class Change(NamedTuple):
    """The allocation or freeing of a block."""

    time: int  #: In nanoseconds since the epoch.
    address: int  #: Address of the block.
    bytes: int  #: Size of the block; negative if it is freed.
    allocated: int  #: Bytes of all blocks afterwards; on a CPU, of blocks allocated since the profiler started.
    around: Surroundings  #: The surroundings of the change.


class SentBlock(NamedTuple):
    """A block that is passed to a communication operation: time, address, and minimum size."""

    time: int
    address: int
    bytes: int


@dataclass(frozen=True)
class Seen:
    """The allocations that the profiler recorded on one rank."""

    begin: int  #: When the step began, in nanoseconds since the epoch.
    end: int  #: When it ended.
    inventory: int  #: When the tensors of the training state were looked up.
    changes: Sequence[Change]  #: In chronological order, including those before the step.
    sent: Sequence[SentBlock]  #: Likewise.
    all_counted: bool  #: Whether :attr:`Change.allocated` includes allocations from before the profiler started.


class Usage(NamedTuple):
    """The memory in use on one rank after a change."""

    moment: str  #: The part of the step.
    bytes: Mapping[str, int]  #: By kind, in the order of :data:`KINDS`.

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes.values())


@dataclass
class _Allocation:
    """A block from its allocation until it is freed."""

    began: int
    bytes: int
    kind: str
    ended: float = math.inf

    def holds(self, time: int) -> bool:
        return self.began <= time < self.ended


def read(taken: profile, device_type: str) -> Seen:
    """Read the allocations on a kind of device; only the last step counts, which contains the inventory.

    The profiler must have recorded memory for at least one whole step before the last one.
    """
    assert taken.kineto_results
    begin = end = inventory = 0
    changes, sent = [], []
    for event, around in _walk(taken.kineto_results.experimental_event_tree()):
        if event.tag == _EventType.Allocation:
            block = event.extra_fields
            if block.device.type == device_type:
                size, allocated = block.alloc_size, block.total_allocated
                changes.append(Change(event.start_time_ns, block.ptr, size, allocated, around))
        elif event.tag == _EventType.TorchOp:
            if event.name.startswith(STEP) and event.start_time_ns > begin:
                begin, end = event.start_time_ns, event.end_time_ns
            elif event.name == INVENTORY:
                inventory = max(inventory, event.start_time_ns)
            elif event.name.startswith("c10d::") and not event.name.startswith("c10d::send") and not around.functional:
                inputs = _tensors(event.extra_fields.inputs, device_type)
                sent += [SentBlock(event.start_time_ns, address, size) for address, size in inputs]
    return Seen(begin, end, inventory, sorted(changes), sorted(sent), device_type != "cpu")


def _walk(roots: Sequence[Any]) -> Iterator[tuple[Any, Surroundings]]:
    waiting = [(event, Surroundings()) for event in roots]
    while waiting:
        event, around = waiting.pop()
        yield event, around
        inner = _inside(event.name, around)
        waiting += [(child, inner) for child in event.children]


def _inside(name: str, around: Surroundings) -> Surroundings:
    if name in _PARTS:
        return _PARTS[name]
    if name.startswith(BACKWARD):  # on a GPU in a separate thread
        kind = around.kind if around.moment in ("forward", "backward") else "activations"
        return around._replace(moment="backward", kind=kind)
    if name.startswith("FSDP::") and not name.startswith(_CASTS):
        # On a GPU autograd's callbacks run in a separate thread.
        is_backward = "backward" in name and around.moment in ("forward", "other")
        moment = "backward" if is_backward else around.moment
        kind = "gradients" if name.startswith(_ACCUMULATES) else "communication"
        return Surroundings(moment, kind, takes_gradients=name.startswith("FSDP::post_backward"))
    if name.startswith("_c10d_functional"):
        return around._replace(functional=True)
    return around


def _tensors(inputs: Any, device_type: str) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of the tensors among an operation's inputs, including those in lists."""
    if isinstance(inputs, _TensorMetadata):
        if inputs.storage_data_ptr and inputs.device.type == device_type:
            yield inputs.storage_data_ptr, math.prod(inputs.sizes) * inputs.dtype.itemsize
    elif isinstance(inputs, (list, tuple)):
        for item in inputs:
            yield from _tensors(item, device_type)


def usage(seen: Seen, state: Mapping[int, tuple[str, int]]) -> list[Usage]:
    """Return the memory in use during the step; ``state``: kind and bytes of the training state by address."""
    blocks = _blocks(seen.changes)
    present = dict.fromkeys(KINDS, 0)
    for kind, size in _assign_kinds(seen, blocks, state):
        present[kind] += size
    edges: list[tuple[float, _Allocation, int]] = []
    for block in chain.from_iterable(blocks.values()):
        if block.began < seen.begin <= block.ended:
            present[block.kind] += block.bytes
        ends = ((block.began, 1), (block.ended, -1))
        edges += [(time, block, sign) for time, sign in ends if seen.begin <= time <= seen.end]
    edges.sort(key=lambda edge: (edge[0], edge[2]))  # an unrecorded free comes before the next allocation
    first = next((change for change in seen.changes if change.time >= seen.begin), None)
    if seen.all_counted and first:  # the purpose of the other memory allocated when the step began is unknown
        present["other"] += max(0, first.allocated - first.bytes - sum(present.values()))
    usages = [Usage("data", dict(present))]
    moment_at = {change.time: change.around.moment for change in seen.changes}
    for time, block, sign in edges:
        present[block.kind] += sign * block.bytes
        usages.append(Usage(moment_at[int(time)], dict(present)))
    return usages


def _blocks(changes: Sequence[Change]) -> dict[int, list[_Allocation]]:
    """Return the blocks by address in chronological order; ignore frees of blocks from before the recording."""
    blocks: defaultdict[int, list[_Allocation]] = defaultdict(list)
    for change in changes:
        earlier = blocks[change.address]
        if earlier and earlier[-1].ended == math.inf:  # also if it was freed in a thread that the profiler does not see
            earlier[-1].ended = change.time
            if change.bytes < 0 and change.around.takes_gradients and earlier[-1].kind == "activations":
                earlier[-1].kind = "gradients"
        if change.bytes > 0:
            earlier.append(_Allocation(change.time, change.bytes, change.around.kind))
    return blocks


def _assign_kinds(
    seen: Seen, blocks: Mapping[int, list[_Allocation]], state: Mapping[int, tuple[str, int]]
) -> Iterator[tuple[str, int]]:
    """Assign kinds to blocks; yield kind and bytes of memory that was allocated before the profiler started."""

    def block_at(address: int, time: int) -> _Allocation | None:
        return next((block for block in blocks.get(address, ()) if block.holds(time)), None)

    older: dict[int, int] = {}
    for sent in seen.sent:
        if block := block_at(sent.address, sent.time):
            block.kind = "communication"
        elif sent.address not in state:
            older[sent.address] = max(older.get(sent.address, 0), sent.bytes)
    for address, (kind, size) in state.items():
        if block := block_at(address, seen.inventory):
            block.kind = kind
        else:
            yield kind, size
    yield from (("communication", size) for size in older.values())
