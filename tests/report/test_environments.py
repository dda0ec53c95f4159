"""The environments of a report's runs."""

from __future__ import annotations

import pytest

from ptdbench.report.environments import Environments

ONE = {"host": "n1", "cpu": "a CPU", "torch": "2.11.0", "ptdbench": "1.0", "cores": 2, "cuda": None, "settings": {}}


def of(*environments):
    return Environments([{"environment": one} for one in environments])


def test_each_has_one_number_whatever_the_order_of_its_fields():
    other = ONE | {"cores": 4}
    found = of(ONE, other, dict(reversed(ONE.items())), None)
    assert found.found == [ONE, other]
    runs = [{"environment": one} for one in (dict(reversed(ONE.items())), other, None)]
    assert [found.number(run) for run in [*runs, {}]] == [0, 1, None, None]


def test_one_alone_is_its_machine_and_versions():
    assert of(ONE).titles() == ["n1, a CPU, torch 2.11.0, ptdbench 1.0"]


@pytest.mark.parametrize(
    ("other", "ends"),
    [
        ({"cores": 4}, ("cores 2", "cores 4")),
        ({"cuda": "13.0"}, ("cuda unknown", "cuda 13.0")),
        ({"settings": {"OMP_NUM_THREADS": "1"}}, ("OMP_NUM_THREADS unknown", "OMP_NUM_THREADS 1")),
    ],
)
def test_of_several_it_is_said_what_differs(other, ends):
    titles = of(ONE, ONE | other).titles()
    assert titles == [f"n1, a CPU, torch 2.11.0, ptdbench 1.0, {end}" for end in ends]


def test_what_the_names_say_already_is_not_said_twice():
    assert of(ONE, ONE | {"torch": "2.12.0"}).titles() == [
        "n1, a CPU, torch 2.11.0, ptdbench 1.0",
        "n1, a CPU, torch 2.12.0, ptdbench 1.0",
    ]
