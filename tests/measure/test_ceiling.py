"""The ceilings that are kept: found again for exactly the same device, and for no other."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from ptdbench.measure import ceiling
from ptdbench.measure.ceiling import Key, Measured

GPU = Key("NVIDIA H200", "550.54", "2.15.0", "bf16", None)
FOUND = Measured(7.5e14, "8192x8192x8192", beside_load=False)
ENVIRONMENT = {"cpu": "AMD EPYC", "driver": "550.54", "torch": "2.15.0"}


pytestmark = pytest.mark.usefixtures("cache")


def test_what_is_kept_is_found_again_in_the_users_cache_folder(cache):
    assert ceiling.look_up(GPU) is None
    path = ceiling.store_ceiling(GPU, FOUND)
    assert [entry for entry in cache.rglob("*") if entry.is_file()] == [path]
    assert path.parent == cache / "ceilings"
    assert ceiling.look_up(GPU) == FOUND
    ceiling.store_ceiling(GPU, Measured(7.6e14, "4096x4096x4096", beside_load=True))
    assert ceiling.look_up(GPU) == Measured(7.6e14, "4096x4096x4096", beside_load=True)


def test_of_one_that_an_earlier_version_kept_the_load_is_unknown():
    path = ceiling.store_ceiling(GPU, FOUND)
    text = json.loads(path.read_text())
    del text["beside_load"]
    path.write_text(json.dumps(text))
    assert ceiling.look_up(GPU) == replace(FOUND, beside_load=None)


@pytest.mark.parametrize(
    "change",
    [{"device": "NVIDIA H100 PCIe"}, {"driver": "550.55"}, {"torch": "2.16.0"}, {"dtype": "fp16"}, {"threads": 1}],
)
def test_any_difference_makes_it_another(change):
    ceiling.store_ceiling(GPU, FOUND)
    assert ceiling.look_up(replace(GPU, **change)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"flops_per_second": null}'])
def test_a_broken_file_is_no_ceiling(text):
    ceiling.store_ceiling(GPU, FOUND).write_text(text)
    assert ceiling.look_up(GPU) is None


def test_threads_matter_to_a_cpu_and_the_driver_to_a_gpu_and_people_can_read_it():
    cpu = Key.of(ENVIRONMENT, None, "fp32", 8)
    assert cpu == Key("AMD EPYC", None, "2.15.0", "fp32", 8)
    assert str(cpu) == "AMD EPYC, torch 2.15.0, fp32, 8 threads"
    assert Key.of(ENVIRONMENT, "NVIDIA H200", "bf16", 8) == GPU
    assert str(GPU) == "NVIDIA H200, driver 550.54, torch 2.15.0, bf16"
