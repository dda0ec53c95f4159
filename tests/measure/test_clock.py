from __future__ import annotations

import pytest
import torch

from ptdbench.measure import clock


class Time:
    """A clock on the wall that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall(monkeypatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock.time, "perf_counter", time)
    return time


def test_only_what_lies_between_start_and_stop_counts(wall):
    host = clock.HostClock()
    for inside, outside in ((2.0, 50.0), (0.25, 3.0)):
        host.start()
        wall.now += inside
        host.stop()
        wall.now += outside
    assert host.seconds() == [2.0, 0.25]
    host.forget()
    host.start()
    wall.now += 1.0
    host.stop()
    assert host.seconds() == [1.0]


def test_a_step_is_over_when_it_was_stopped_and_what_was_read_does_not_change_later(wall):
    host = clock.HostClock()
    assert not host.over(0)
    host.start()
    assert not host.over(0)
    host.stop()
    assert (host.over(0), host.over(1), host.finished()) == (True, False, 1)
    seconds = host.seconds()
    host.start()
    host.stop()
    assert (len(seconds), len(host.seconds())) == (1, 2)


def test_a_device_has_the_clock_that_suits_it():
    assert isinstance(clock.for_device(torch.device("cpu")), clock.HostClock)
    assert isinstance(clock.for_device(torch.device("cuda", 0)), clock.DeviceClock)


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

    def query(self) -> bool:
        return self.queued_at is not None and self.queued_at <= Event.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.queued_at is not None
        assert end.queued_at is not None
        return end.queued_at - self.queued_at


def test_a_gpu_is_asked_without_waiting_and_answers_in_seconds(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    device, Event.device_now, Event.reached = clock.DeviceClock(), 0.0, 0.0
    for _ in range(2):
        device.start()
        device.stop()
    assert [device.over(step) for step in range(3)] == [False, False, False]
    Event.reached = 500.0  # the end of the first step
    assert [device.over(step) for step in range(3)] == [True, False, False]
    assert device.finished() == 1
    assert not waited
    assert device.seconds() == [0.25, 0.25]
    assert waited


def test_a_step_that_is_under_way_is_not_finished(monkeypatch):
    """Although CUDA says of an event that was never recorded that it is passed."""

    class Unrecorded(Event):
        def query(self) -> bool:
            return self.queued_at is None or super().query()

    monkeypatch.setattr(torch.cuda, "Event", Unrecorded)
    device, Event.device_now, Event.reached = clock.DeviceClock(), 0.0, 1e9
    device.start()
    assert (device.over(0), device.finished()) == (False, 0)
    device.stop()
    assert (device.over(0), device.finished()) == (True, 1)


def test_finished_steps_are_counted_anew_when_they_are_forgotten(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    device, Event.device_now, Event.reached = clock.DeviceClock(), 0.0, 1e9
    for _ in range(3):
        device.start()
        device.stop()
    assert device.finished() == 3
    device.forget()
    assert device.finished() == 0
    Event.reached = 0.0
    device.start()
    device.stop()
    assert device.finished() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_is_timed_by_its_own_stream():
    device, x = clock.for_device(torch.device("cuda", 0)), torch.ones(4096, 4096, device="cuda")
    for _ in range(2):
        device.start()
        x @ x
        device.stop()
    assert min(device.seconds()) > 0
    assert device.over(1)
