"""Every file of conf/data becomes the object it names, with the options of the model it is used with."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf" / "data"

MODEL = {"sequence_length": 32, "vocabulary": 300, "image_size": 8, "classes": 5, "inputs": 6, "outputs": 4}
#: What each gives to :data:`MODEL`; where the images are what they are, the model is made for them.
SHAPES = {
    "text": ({}, (1, 32)),
    "synthetic_tokens": ({}, (1, 32)),
    "synthetic_images": ({}, (1, 3, 8, 8)),
    "synthetic_vectors": ({}, (1, 6)),
    "digits": ({"model.classes": 10}, (1, 3, 8, 8)),
    "cifar10": ({"model.classes": 10, "model.image_size": 32, "data.download": True}, (1, 3, 32, 32)),
    "image_folder": ({"data.root": "{folder}"}, (1, 3, 8, 8)),
}


@pytest.mark.parametrize("name", [file.stem for file in CONF.iterdir()])
def test_takes_its_shapes_from_the_model(name, tmp_path):
    (tmp_path / "train").mkdir()
    changes, shape = SHAPES[name]
    root = OmegaConf.create({"seed": 1, "model": MODEL, "data": OmegaConf.load(CONF / f"{name}.yaml")})
    assert root.data.pop("name") == name
    for option, value in changes.items():
        OmegaConf.update(root, option, value.format(folder=tmp_path) if isinstance(value, str) else value)
    assert instantiate(root.data).example()[0].shape == shape
