"""Every file of conf/data becomes the object it names, with the options of the model it is used with."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf" / "data"

MODEL = {
    "sequence_length": 32,
    "vocabulary": 300,
    "image_size": 8,
    "classes": 5,
    "inputs": 6,
    "outputs": 4,
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("text", (1, 32)),
        ("synthetic_tokens", (1, 32)),
        ("synthetic_images", (1, 3, 8, 8)),
        ("synthetic_vectors", (1, 6)),
    ],
)
def test_takes_its_shapes_from_the_model(name, shape):
    root = OmegaConf.create({"seed": 1, "model": MODEL, "data": OmegaConf.load(CONF / f"{name}.yaml")})
    assert root.data.pop("name") == name
    assert instantiate(root.data).example()[0].shape == shape


def test_a_model_without_such_keys_leaves_the_options_to_the_command_line():
    data = OmegaConf.load(CONF / "text.yaml")
    root = OmegaConf.create({"seed": 1, "model": {}, "data": data})
    root.merge_with_dotlist(["data.sequence_length=128", "data.vocabulary=256"])
    root.data.pop("name")
    assert instantiate(root.data).tokens_per_sample == 128


def test_the_files_above_are_all_there_are():
    assert {file.stem for file in CONF.iterdir()} == {
        "text",
        "synthetic_tokens",
        "synthetic_images",
        "synthetic_vectors",
    }
