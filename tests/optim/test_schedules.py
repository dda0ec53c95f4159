"""Schedules against torch's own, whose rates are looked at step by step."""

import pytest
import torch
from torch.optim import lr_scheduler

from ptdbench.optim.schedules import Constant, Cosine, OneCycle
from ptdbench.problems import ConfigError

STEPS = 40


def rates_of(make) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def factors(schedule, steps: int = STEPS) -> list[float]:
    return [schedule.factor(step, steps) for step in range(steps)]


def test_constant_and_cosine_are_torchs_also_after_a_warm_up():
    assert factors(Constant()) == [1.0] * STEPS
    assert factors(Constant(warmup_steps=4))[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    expected = rates_of(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS - 1, eta_min=0.1))
    assert factors(Cosine(final=0.1)) == pytest.approx(expected)
    assert Cosine(final=0.2).factor(100, 10) == pytest.approx(0.2)
    rates = factors(Cosine(warmup_steps=10, final=0.0))
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == factors(Cosine(final=0.0), STEPS - 10)


def test_one_cycle_is_torchs():
    expected = rates_of(
        lambda o: lr_scheduler.OneCycleLR(
            o, max_lr=1.0, total_steps=STEPS + 1, pct_start=0.25, div_factor=20, final_div_factor=1e9,
            cycle_momentum=False,
        )
    )  # fmt: skip
    # One step more than there are, as torch's counts the rate after the last; its top is then at 0.25 * 41 - 1.
    rates = [OneCycle(rise=9.25 / 40, first=0.05, final=0.05 / 1e9).factor(step, STEPS + 1) for step in range(STEPS)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("schedule", [Constant(3), Cosine(3), OneCycle(), Cosine(warmup_steps=5), OneCycle(rise=0.0)])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_rates_too(schedule, steps):
    assert all(0 <= factor <= 1 for factor in factors(schedule, steps))


@pytest.mark.parametrize("make", [
    lambda: Constant(warmup_steps=-1), lambda: Cosine(final=1.5), lambda: OneCycle(rise=-0.1),
    lambda: OneCycle(first=2.0), lambda: Cosine(warmup_steps=-2),
])  # fmt: skip
def test_options_out_of_range_are_refused(make):
    with pytest.raises(ConfigError):
        make()
