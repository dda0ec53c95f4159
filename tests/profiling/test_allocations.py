"""What memory is for: from made allocations, and from real ones of known size."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pytest
import torch
from torch.autograd.profiler import record_function

from ptdbench.profiling import allocations, trace
from ptdbench.profiling.allocations import Change, Seen, SentBlock, Surroundings, Usage
from ptdbench.profiling.phases import KINDS
from ptdbench.training.profile import profiled

FORWARD = Surroundings("forward", "activations")
BACKWARD = Surroundings("backward", "activations")
FSDP = Surroundings("forward", "communication")
REDUCING = Surroundings("backward", "communication", takes_gradients=True)
BEGIN, INVENTORY, END = 100, 200, 300


def used(
    *changes: Change,
    known: Mapping[int, tuple[str, int]] = MappingProxyType({}),
    sent: Iterable[SentBlock] = (),
    all_counted: bool = False,
) -> list[Usage]:
    return allocations.usage(Seen(BEGIN, END, INVENTORY, sorted(changes), sorted(sent), all_counted), known)


def change(time: int, address: int, size: int, place: Surroundings = FORWARD, allocated: int = 0) -> Change:
    return Change(time, address, size, allocated, place)


def by_kind(at: Usage) -> dict[str, int]:
    return {kind: size for kind, size in at.bytes.items() if size}


def peak(usages: list[Usage]) -> Usage:
    return max(usages, key=lambda at: at.total)


def at_peak(usages: list[Usage]) -> dict[str, int]:
    return by_kind(peak(usages))


def test_peak_has_the_most_memory_of_all_kinds_and_blocks_count_while_they_live():
    blocks = [change(110, 1, 50), change(120, 2, 70), change(130, 1, -50), change(150, 2, -70)]
    usages = used(*blocks, change(140, 3, 40, BACKWARD), known={9: ("weights", 1000), 8: ("optimizer", 2000)})
    assert at_peak(usages) == {"weights": 1000, "optimizer": 2000, "activations": 120}
    assert peak(usages).moment == "forward"
    assert [at.total - 3000 for at in usages] == [0, 50, 120, 70, 110, 40]
    assert list(usages[0].bytes) == list(KINDS)
    usages = used(change(50, 1, 30), change(60, 2, 10), change(70, 2, -10), change(210, 1, -30))
    assert [at.total for at in usages] == [30, 0]
    assert at_peak(used(change(150, 1, 10), change(301, 2, 1000))) == {"activations": 10}
    assert at_peak(used(known={9: ("weights", 1000)})) == {"weights": 1000}


def test_gradients_and_sent_blocks_are_known_by_address_and_caller():
    """Another block may have had that address before."""
    blocks = [change(110, 1, 500), change(120, 1, -500), change(130, 1, 80, BACKWARD)]
    usages = used(*blocks, known={1: ("gradients", 80)})
    assert (at_peak(usages), by_kind(usages[-1])) == ({"activations": 500}, {"gradients": 80})
    sent = [SentBlock(125, 2, 7), SentBlock(126, 3, 11), SentBlock(127, 3, 9), SentBlock(128, 4, 1000)]
    usages = used(change(110, 1, 5, FSDP), change(120, 2, 7), sent=sent, known={4: ("weights", 1000)})
    assert at_peak(usages) == {"weights": 1000, "communication": 5 + 7 + 11}
    blocks = [change(110, 1, 60, BACKWARD), change(111, 2, 8, REDUCING), change(112, 1, -60, REDUCING)]
    assert at_peak(used(*blocks)) == {"gradients": 60, "communication": 8}


def test_unseen_frees_and_uncounted_memory():
    assert [at.total for at in used(change(110, 1, 50), change(120, 1, 20))] == [0, 50, 0, 20]
    usages = used(change(110, 1, 50, allocated=1450), all_counted=True, known={9: ("weights", 1000)})
    assert at_peak(usages) == {"weights": 1000, "activations": 50, "other": 400}


class Doubled(torch.autograd.Function):
    """Keeps one block for the backward pass, and works with another one in it."""

    @staticmethod
    def forward(context, inputs):
        context.kept = torch.empty(1000)
        return inputs * 2

    @staticmethod
    def backward(context, gradient):
        held = torch.empty(5000)
        del held, context.kept
        return gradient * 2


def test_real_allocations_have_their_part_of_the_step():
    weight = torch.ones(100, requires_grad=True)
    known = {}
    with profiled(torch.device("cpu"), with_memory=True) as taken:
        for name in ("warm-up", trace.STEP):
            with record_function(name):
                with record_function(trace.DATA):
                    batch = torch.empty(300)
                with record_function(trace.GRADIENTS):
                    Doubled.apply(weight).backward(torch.ones(100))
                with record_function(allocations.INVENTORY):
                    known = {
                        weight.data_ptr(): ("weights", weight.untyped_storage().nbytes()),
                        weight.grad.data_ptr(): ("gradients", weight.grad.untyped_storage().nbytes()),
                    }
                with record_function(trace.UPDATE):
                    held = torch.empty(200)
                del batch, held
                weight.grad = None
    recording = allocations.usage(allocations.read(taken, "cpu"), known)
    assert peak(recording).moment == "backward"
    by_purpose = at_peak(recording)
    assert by_purpose["weights"] == 400
    assert by_purpose["other"] == 1200  # the batch
    # The kept block, the one in the backward pass, and gradients of 100 numbers: of the result, and what torch makes.
    assert 24000 + 400 <= by_purpose["activations"] <= 24000 + 3 * 400
    in_update = [by_kind(at) for at in recording if at.moment == "optimizer"]
    assert max(amounts["other"] for amounts in in_update) == 1200 + 800
    assert {amounts["gradients"] for amounts in in_update} == {400}


@pytest.mark.parametrize(("names", "place"), [
    (["ptdbench::data"], ("data", "other")),
    (["ptdbench::gradients", "aten::linear"], ("forward", "activations")),
    (["ptdbench::gradients", "FSDP::pre_forward (layers.0)"], ("forward", "communication")),
    (["ptdbench::gradients", "FSDP::cast_forward_inputs"], ("forward", "activations")),
    (["ptdbench::gradients", "FSDP::root_post_backward_callback"], ("backward", "communication")),
    (["ptdbench::gradients", "autograd::engine::evaluate_function: X"], ("backward", "activations")),
    (["autograd::engine::evaluate_function: X", "aten::mm"], ("backward", "activations")),
    (["autograd::engine::evaluate_function: X", "FSDP::pre_backward (0)"], ("backward", "communication")),
    (["autograd::engine::evaluate_function: X", "FSDP::post_backward_reshard (0)"], ("backward", "gradients")),
    (["autograd::engine::evaluate_function: X", "FSDP::post_backward_reduce (0)"], ("backward", "communication")),
    (["ptdbench::update", "aten::sqrt"], ("optimizer", "other")),
])  # fmt: skip
def test_surroundings_follow_from_enclosing_names(names, place):
    surroundings = Surroundings()
    for name in names:
        surroundings = allocations._inside(name, surroundings)
    assert (surroundings.moment, surroundings.kind) == place
