"""How much runs differ on a machine: kept by sweeps with repeats, found again on this machine alone."""

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


def on(machine, one, nodes=("n1",)):
    return {**one, "environment": machine, "nodes": list(nodes)}


def keep(runs):
    noise.keep(alternatives.group(runs))


def test_it_is_found_again():
    keep(sweep())
    assert noise.look_up([on(MACHINE, run())]) == Spread(pytest.approx(0.1), 4)


def test_the_latest_counts():
    keep(sweep())
    keep([*sweep(), *sweep(names=["pdp"])])
    assert noise.look_up([on(MACHINE, run())]).freedom == 6


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
