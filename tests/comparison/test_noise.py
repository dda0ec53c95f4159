"""How much runs differ: kept by sweeps with repeats, found again for runs as large on the same machine alone."""

import errno
import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest

from ptdbench import cache
from ptdbench.comparison import alternatives, noise, variation
from ptdbench.comparison.variation import Pool
from tests.report.made import failed, repeated, run

MACHINE = {"cpu": "a CPU", "cores": 2, "devices": []}

#: The directory of a sweep that was before those of which something is asked.
EARLIER = "outputs/earlier"

#: Runs of each differ by 10 % from one to the next, on a logarithmic scale.
RATES = [math.exp(0.1 * step) for step in (-1, 0, 1)]


pytestmark = pytest.mark.usefixtures("cache")


def sweep(blocks=3, names=("ddp", "fsdp")):
    return [on(MACHINE, one) for name in names for one in repeated(name, RATES[:blocks], EARLIER)]


def started(day):
    return [one | {"started": f"2026-11-{day}T12:00:{place:02}"} for place, one in enumerate(sweep())]


def on(machine, one, nodes=("n1",), steps=100):
    config = {**one.config, "train": {"steps": steps}}
    return one | {"environment": machine, "nodes": list(nodes), "config": config}


def noisy(name, deviation, runs=3, steps=100, **changes):
    """Runs of one configuration with this standard deviation, on a logarithmic scale."""
    middle = (runs - 1) / 2
    scale = deviation / math.sqrt(sum((place - middle) ** 2 for place in range(runs)) / (runs - 1))
    rates = [1000.0 * math.exp(scale * (place - middle)) for place in range(runs)]
    return [on(MACHINE, one, steps=steps) for one in repeated(name, rates, EARLIER, **changes)]


def keep(runs):
    noise.keep(alternatives.group(runs))


def deviation(runs):
    """How much earlier runs like these differ."""
    return noise.look_up(runs).unpaired.deviation


def elsewhere(runs, directory):
    return [one | {"directory": f"{directory}/{one.directory.rpartition('/')[2]}"} for one in runs]


def test_sweeps_add_up_and_of_the_same_one_the_latest_table_counts():
    keep(sweep())
    looked_up = noise.look_up([on(MACHINE, run())])
    assert looked_up == variation.noise([one.sample for one in alternatives.group(sweep())])
    keep([*noisy("ddp", 0.02), *noisy("fsdp", 0.02)])
    assert deviation([on(MACHINE, run())]) == pytest.approx(0.02)
    keep(elsewhere([*noisy("ddp", 0.04, runs=5), *noisy("fsdp", 0.04, runs=5)], "outputs/another"))
    pooled = math.sqrt((4 * 0.02**2 + 8 * 0.04**2) / 12)
    assert deviation([on(MACHINE, run())]) == pytest.approx(pooled)


def test_a_sweep_is_not_judged_by_itself(tmp_path, monkeypatch):
    """It would count twice, and its table would be another one when it is shown again, from wherever."""
    monkeypatch.chdir(tmp_path)
    keep(sweep())
    assert noise.look_up(sweep()) is None
    assert noise.look_up(elsewhere(sweep(), f"/home/me/{EARLIER}")) is None
    Path(EARLIER).mkdir(parents=True)
    Path("outputs/latest").symlink_to("earlier")
    assert noise.look_up(elsewhere(sweep(), "outputs/latest")) is None
    monkeypatch.chdir(EARLIER)
    assert noise.look_up(elsewhere(sweep(), ".")) is None
    keep(elsewhere(sweep(), "outputs/another"))
    assert noise.look_up(sweep()).unpaired.freedom == 4
    assert noise.look_up([on(MACHINE, run())]).unpaired.freedom == 8


def test_nor_where_it_was_moved_away_as_in_ci():
    runs = started(26)
    keep(runs)
    moved = elsewhere(runs, "before")
    assert noise.look_up(moved[1:]) is None
    keep(moved)
    assert noise.look_up([on(MACHINE, run())]).unpaired.freedom == 4


def test_a_sweep_of_another_day_in_a_folder_of_the_same_name_is_another():
    keep(elsewhere(started(26), "monday/before"))
    tuesday = elsewhere(started(27), "tuesday/before")
    assert noise.look_up(tuesday).unpaired.freedom == 4
    keep(tuesday)
    assert noise.look_up([on(MACHINE, run())]).unpaired.freedom == 8


def test_the_latest_eight_sweeps_are_kept():
    for number in range(10):
        keep(elsewhere([*noisy("ddp", 0.01 + number), *noisy("fsdp", 0.01 + number)], f"outputs/{number}"))
    assert noise.look_up([on(MACHINE, run())]).unpaired.freedom == 8 * 4
    assert deviation([on(MACHINE, run())]) == pytest.approx(math.sqrt(sum((n + 0.01) ** 2 for n in range(2, 10)) / 8))


def test_pairs_of_each_model_are_judged_together():
    groups = alternatives.group(
        [one for model in ("gpt_tiny", "toy") for name in ("ddp", "fsdp", "pdp")
         for one in noisy(name, 0.05, model=model)]
    )  # fmt: skip
    pairs = [(groups[0], groups[1]), (groups[3], groups[4])]
    pools = [Pool([one.sample for one in pair]) for pair in pairs]
    expected = [pool.difference(one.sample, other.sample) for pool, (one, other) in zip(pools, pairs, strict=True)]
    assert noise.differences(pairs) == expected
    few = alternatives.group([*noisy("ddp", 0.1, runs=2), *noisy("fsdp", 0.1, runs=2)])
    assert noise.differences([(few[0], few[1])]) == [None]


@pytest.mark.parametrize(
    "other",
    [
        *(on(MACHINE, run(**size)) for size in ({"model": "gpt_small"}, {"world_size": 4}, {"global_batch": 32})),
        *(on(MACHINE, run(**chosen)) for chosen in ({"precision": "bf16"}, {"kernels": "torch"})),
        *(on(MACHINE, run(**size)) for size in ({"parameters": 2345}, {"tokens_per_sample": 64})),
        on(MACHINE, run(), steps=10),
        on(MACHINE, run(), nodes=["n2"]),
        *(on(MACHINE | machine, run()) for machine in ({"cpu": "another"}, {"cores": 4}, {"devices": ["H200"]})),
        run(),
    ],
)
def test_runs_of_another_size_and_other_machines_are_others(other):
    keep(sweep())
    assert noise.look_up([other]) is None
    assert noise.look_up([on(MACHINE, run()), other]) is None


def test_each_size_in_a_sweep_has_its_own_and_of_several_the_noisiest_counts():
    few = noisy("pdp", 0.5, runs=2, steps=1000)  # too few to be taken for noise
    long = [*noisy("ddp", 0.01, steps=1000), *noisy("fsdp", 0.01, steps=1000), *few]
    short = [*noisy("ddp", 0.07, steps=10), *noisy("fsdp", 0.07, steps=10)]
    keep([*long, *short])
    long, short = elsewhere(long, "outputs/now"), elsewhere(short, "outputs/now")
    assert (deviation(long), deviation(short)) == (pytest.approx(0.01), pytest.approx(0.07))
    assert noise.look_up([long[0], short[0]]) == noise.look_up([short[0], long[0]]) == noise.look_up(short)


@pytest.mark.parametrize("runs", [[], sweep(blocks=2), sweep(names=["ddp"]), noisy("ddp", 0.0) + noisy("fsdp", 0.0)])
def test_too_few_runs_or_equal_ones_say_nothing(runs):
    keep(runs)
    assert noise.look_up([on(MACHINE, run())]) is None
    assert noise.look_up([]) is None


def test_a_run_that_knew_of_no_machine_does_not_hide_it():
    broken = failed("single", "broken")
    keep([broken, *sweep()])
    assert noise.look_up([on(MACHINE, run())])
    assert noise.look_up([broken, on(MACHINE, run())])
    assert noise.look_up([broken]) is None


def test_a_run_that_measures_nothing_does_not_hide_it():
    keep(sweep())
    virtual = on({**MACHINE, "cpu": "another"}, run(kind="virtual", metrics=None))
    assert noise.look_up([virtual, on(MACHINE, run())])


def test_a_full_disk_costs_nothing(monkeypatch):
    monkeypatch.setattr(cache, "keep", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    keep(sweep())
    cache.keep.assert_called_once()


KNOWN = {kind: {"squares": 0.1, "freedom": 4} for kind in ("paired", "unpaired")}


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"sweeps": {"a": 1}}',
        *(
            json.dumps({"sweeps": {"a": KNOWN | {kind: KNOWN[kind] | worse}}})
            for kind, worse in [
                ("unpaired", {"squares": "0.1"}), ("unpaired", {"squares": -0.1}), ("paired", {"squares": math.inf}),
                ("unpaired", {"squares": 0.0}), ("unpaired", {"freedom": 3}), ("paired", {"freedom": None}),
            ]
        ),
    ],
)  # fmt: skip
def test_a_damaged_file_and_figures_that_cannot_be_are_none(tmp_path, text):
    keep(sweep())
    (path,) = tmp_path.rglob("*.json")
    path.write_text(json.dumps({"sweeps": {"a": KNOWN}}))
    assert noise.look_up([on(MACHINE, run())])
    path.write_text(text)
    assert noise.look_up([on(MACHINE, run())]) is None
    keep(sweep())
    assert noise.look_up([on(MACHINE, run())])
