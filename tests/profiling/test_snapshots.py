import pickle

from ptdbench.profiling.snapshots import Allocated, largest

OURS = [{"filename": "/usr/torch/nn.py", "line": 1, "name": "inner"}, {"filename": "t.py", "line": 7, "name": "step"}]


def event(action, address, size, frames=()):
    return {"action": action, "addr": address, "size": size, "frames": [*frames]}


def test_largest_places_are_those_alive_at_the_peak(tmp_path):
    """The peak is 60: the first tensor is freed before it, and the last one comes after it."""
    trace = [
        event("alloc", 1, 40), event("free_requested", 1, 40), event("free_completed", 1, 40),
        event("alloc", 1, 20, OURS), event("alloc", 2, 10, OURS), event("alloc", 3, 30),
        event("free_completed", 3, 30), event("alloc", 4, 25),
    ]  # fmt: skip
    (tmp_path / "snapshot").write_bytes(pickle.dumps({"device_traces": [[], trace]}))
    assert largest(tmp_path / "snapshot", 5) == [Allocated(30, 2, ("t.py:7 step",)), Allocated(30, 1, ())]
    assert len(largest(tmp_path / "snapshot", 1)) == 1
