"""How much runs differ: kept by sweeps with repeats, found again for runs as large on the same machine alone."""

from __future__ import annotations

import errno
import json
import math

import pytest

from ptdbench import cache
from ptdbench.measure.comparison import Spread
from ptdbench.records import alternatives, noise
from tests.report.made import failed, repeated, run

MACHINE = {"cpu": "a CPU", "cores": 2, "devices": []}

#: Runs of each differ by 10 % from one to the next, on a logarithmic scale.
RATES = [math.exp(0.1 * step) for step in (-1, 0, 1)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def sweep(blocks=3, names=("ddp", "fsdp")):
    """Runs of these on one machine."""
    return [on(MACHINE, one) for name in names for one in repeated(name, RATES[:blocks])]


def on(machine, one, nodes=("n1",), steps=100):
    config = {**one["config"], "train": {"steps": steps}}
    return {**one, "environment": machine, "nodes": list(nodes), "config": config}


def noisy(name, deviation, runs=3, steps=100, **changes):
    """Runs of one configuration with this standard deviation, on a logarithmic scale."""
    middle = (runs - 1) / 2
    scale = deviation / math.sqrt(sum((place - middle) ** 2 for place in range(runs)) / (runs - 1))
    rates = [1000.0 * math.exp(scale * (place - middle)) for place in range(runs)]
    return [on(MACHINE, one, steps=steps) for one in repeated(name, rates, **changes)]


def keep(runs):
    noise.keep(alternatives.group(runs))


def test_it_is_found_again():
    keep(sweep())
    assert noise.look_up([on(MACHINE, run())]) == Spread(pytest.approx(0.1), 4)


def test_the_latest_counts():
    keep(sweep())
    keep([*noisy("ddp", 0.02), *noisy("fsdp", 0.02)])
    assert noise.look_up([on(MACHINE, run())]).deviation == pytest.approx(0.02)


def test_quiet_alternatives_do_not_hide_a_noisy_one():
    keep([*noisy("ddp", 0.01, runs=5), *noisy("fsdp", 0.05, runs=5), *noisy("pdp", 0.01, runs=5)])
    assert noise.look_up([on(MACHINE, run())]) == Spread(pytest.approx(0.05), 12)


def test_two_runs_of_an_alternative_are_not_taken_for_its_noise():
    keep([*noisy("ddp", 0.5, runs=2), *noisy("fsdp", 0.01, runs=5)])
    assert noise.look_up([on(MACHINE, run())]) == Spread(pytest.approx(0.01), 4)


@pytest.mark.parametrize(
    "changed", [{"model": "gpt_small"}, {"world_size": 4}, {"global_batch": 32}, {"precision": "bf16"}]
)
def test_runs_of_another_size_are_others(changed):
    keep(sweep())
    assert noise.look_up([on(MACHINE, run(**changed))]) is None
    assert noise.look_up([on(MACHINE, run()), on(MACHINE, run(**changed))]) is None


def test_long_runs_say_nothing_of_short_ones():
    keep(sweep())
    assert noise.look_up([on(MACHINE, run(), steps=10)]) is None


def test_each_size_in_a_sweep_has_its_own_and_of_several_the_noisiest_counts():
    long = [*noisy("ddp", 0.01, steps=1000), *noisy("fsdp", 0.01, steps=1000)]
    short = [*noisy("ddp", 0.07, steps=10), *noisy("fsdp", 0.07, steps=10)]
    keep([*long, *short])
    assert noise.look_up(long) == Spread(pytest.approx(0.01), 4)
    assert noise.look_up(short) == Spread(pytest.approx(0.07), 4)
    assert noise.look_up([long[0], short[0]]) == noise.look_up([short[0], long[0]]) == noise.look_up(short)


@pytest.mark.parametrize("runs", [[], sweep(blocks=2), sweep(names=["ddp"]), sweep(blocks=1)])
def test_too_few_runs_say_nothing(runs):
    keep(runs)
    assert noise.look_up([on(MACHINE, run())]) is None


@pytest.mark.parametrize("changed", [{"cpu": "another"}, {"cores": 4}, {"devices": ["H200"]}])
def test_another_machine_is_another(changed):
    keep(sweep())
    assert noise.look_up([on(MACHINE | changed, run())]) is None
    assert noise.look_up([on(MACHINE, run(), nodes=["n2"])]) is None
    assert noise.look_up([run()]) is None


def test_a_run_that_knew_of_no_machine_does_not_hide_it():
    broken = failed("single", "broken")
    keep([broken, *sweep()])
    assert noise.look_up([on(MACHINE, run())])
    assert noise.look_up([broken, on(MACHINE, run())])
    assert noise.look_up([broken]) is None


def test_equal_runs_say_nothing_of_a_machine():
    keep([on(MACHINE, one) for name in ("ddp", "fsdp") for one in repeated(name, [5.0] * 3)])
    assert noise.look_up([on(MACHINE, run())]) is None


def test_a_full_disk_costs_nothing(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "keep", full)
    keep(sweep())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"deviation": null, "freedom": 4}'])
def test_a_damaged_file_is_none(tmp_path, text):
    keep(sweep())
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text)
    assert noise.look_up([on(MACHINE, run())]) is None


@pytest.mark.parametrize(
    "worse",
    [
        {"deviation": "0.1"},
        {"deviation": -0.1},
        {"deviation": math.inf},
        {"freedom": 0},
        {"freedom": 3},
        {"freedom": 4.5},
    ],
)
def test_figures_that_cannot_be_are_none(tmp_path, worse):
    keep(sweep())
    (path,) = tmp_path.rglob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | worse))
    assert noise.look_up([on(MACHINE, run())]) is None
