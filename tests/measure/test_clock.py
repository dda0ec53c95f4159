import pytest
import torch

from ptdbench.measure import timing


def test_host_clock_counts_between_start_and_stop(monkeypatch):
    now = iter([100.0, 102.0, 150.0, 150.25, 160.0, 161.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    host = timing.clock_for(torch.device("cpu"))
    for done in range(2):
        host.start()
        assert host.finished() == done, "a step that is under way"
        host.stop()
    seconds = host.seconds()
    assert host.finished() == 2
    host.forget()
    host.start()
    host.stop()
    assert (seconds, host.seconds()) == ([2.0, 0.25], [1.0])


class Event:
    """Stands for an event of a GPU: the device comes to it when the test says so."""

    device_now = 0.0
    reached: float

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.queued_at: float | None = None

    def record(self) -> None:
        Event.device_now += 250  # milliseconds of work queued since the last event
        self.queued_at = Event.device_now

    def elapsed_time(self, end: "Event") -> float:
        return end.queued_at - self.queued_at


class Count:
    """Stands for the count that a GPU writes: what was marked up to where it is."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def mark(self, number: int) -> None:
        self.marks.append((Event.device_now, number))

    def number(self) -> int:
        return max((number for at, number in self.marks if at <= Event.reached), default=0)


@pytest.fixture
def device(monkeypatch) -> timing.Clock:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "DeviceCount", Count)
    Event.device_now, Event.reached = 0.0, 0.0
    return timing.clock_for(torch.device("cuda", 0))


def test_device_clock_counts_without_waiting(monkeypatch, device):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    for _ in range(2):
        device.start()
        device.stop()
    assert device.finished() == 0
    Event.reached = 500.0  # the end of the first step
    assert device.finished() == 1
    assert not waited
    assert device.seconds() == [0.25, 0.25]
    assert waited


def test_forgotten_steps_are_not_counted(device):
    Event.reached = 1e9
    for done in range(3):
        device.start()
        assert device.finished() == done, "a step that is under way"
        device.stop()
    assert device.finished() == 3
    device.forget()
    assert device.finished() == 0
    Event.reached = Event.device_now
    device.start()
    device.stop()
    assert device.finished() == 0


@pytest.mark.gpu
def test_real_gpu_is_timed_by_its_stream():
    device, x = timing.clock_for(torch.device("cuda", 0)), torch.ones(4096, 4096, device="cuda")
    for _ in range(2):
        device.start()
        x @ x
        device.stop()
    assert min(device.seconds()) > 0
    assert device.finished() == 2
