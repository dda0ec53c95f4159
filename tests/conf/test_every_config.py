"""Every file of conf/ is composed and becomes what it names; so does every command that a file shows."""

import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from ptdbench.launch.slurm import Partition
from ptdbench.launch.world import World
from ptdbench.nested import first_tensor
from ptdbench.parallel.pipeline_schedules import SPLITS_SINCE
from ptdbench.problems import ConfigError
from ptdbench.setup import config, run_spec
from ptdbench.setup.compose import compose_all
from ptdbench.sweep import requests
from tests.conftest import ROOT, composed, read
from tests.daily import cases
from tests.data import tiny_tokenizer
from tests.parallel.splitting import is_refused
from tests.shown import PAGES, commands

CONF = ROOT / "conf"
FILES = sorted(CONF.glob("[!h]*/*.yaml"))  # Hydra's own folder is looked at below
#: What a choice needs beside its name, where it does not suit the defaults.
COMPANIONS = {
    "data/synthetic_images": ("model=resnet18", "model.image_size=64"),
    "data/synthetic_tokens": ("model.sequence_length=32",),
    "data/synthetic_vectors": ("model=toy", "model.inputs=6"),
    "data/text": ("model.sequence_length=32",),
    "data/digits": ("model=resnet18", "data=digits", "model.stem=small", "model.image_size=8", "model.classes=10"),
    "data/cifar10": ("experiment=cifar10_resnet18", "data.root={images}"),
    "data/custom": (
        "data._target_=tests.setup.test_run_spec.Duck", "+data.seed=0", "model=toy", "model.inputs=4",
        "model.outputs=2",
    ),
    "data/synthetic_inputs": ("model=hf_t5_tiny",),
    "data/image_folder": ("model=resnet18", "model.image_size=64", "data=image_folder", "data.root={images}"),
    "parallel/ep": ("model=moe_tiny",),
    "experiment/cifar10_resnet18": ("data.root={images}",),
    "experiment/imagefolder_resnet50": ("data.root={images}",),
    "experiment/text_gpt_small": ("data.path={texts}", "data.tokenizer={texts}/tokenizer.json"),
}  # fmt: skip
#: A sample of each data set, as it suits the model that it is used with.
SHAPES = {
    "synthetic_images": (3, 64, 64), "synthetic_tokens": (32,), "synthetic_vectors": (6,), "text": (32,),
    "digits": (3, 8, 8), "cifar10": (3, 32, 32), "image_folder": (3, 64, 64), "custom": (4,), "synthetic_inputs": (64,),
}  # fmt: skip
#: What SLURM would say on the clusters that the headers of conf/cluster describe.
PARTITIONS = [
    Partition("batch", is_default=True, gpus=(0,)),
    Partition("gpu", is_default=False, gpus=(8,)),
    Partition("volta", is_default=False, gpus=(2,)),
]


def identity(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


TEXTS = [path.read_text() for path in [*CONF.glob("**/*.yaml"), *PAGES]]
SHOWN = sorted({command for text in TEXTS for command in commands(text)})


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "train").mkdir()
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("some words")
    tiny_tokenizer.words(folder / "tokenizer.json", {"some": 1, "words": 2})
    return folder


def spec(read: config.Config) -> run_spec.RunSpec:
    """A run, specified: on this machine, or in a job of the shape that it would be given."""
    if not isinstance(read.cluster, config.Slurm):
        return run_spec.specify(read, None)
    shape = requests.shape_of(read, PARTITIONS)
    world = World(0, shape.world_size, 0, shape.ranks_per_node, "SLURM", nodes=shape.nodes)
    return run_spec.specify(read, world, shape.gpus_per_node)


def test_the_groups_and_the_commands_are_there():
    chosen = {path.parent.name for path in FILES} - {"experiment"}  # which is other groups' choices
    assert chosen == set(config.GROUPS) - {"train", "eval", "checkpoint", "profile", "sweep", "repeat"}
    assert {"", "-m model=gpt_tiny parallel=ddp,pdp,fsdp"} <= set(SHOWN)


@pytest.mark.parametrize("path", FILES, ids=identity)
class TestFile:
    def test_bears_its_own_name(self, path):
        if path.parent.name == "experiment":
            return  # what it consists of bears names
        own = OmegaConf.load(path)
        if path.read_text().startswith("# @package _global_\n"):  # its group is a part of what it says
            own = own[path.parent.name]
        by_class = "${class_name:${._target_}}"  # of a class of the user's own
        assert own._get_node("name")._value() in (path.stem, by_class)

    def test_begins_with_what_it_is_and_the_command_that_takes_it(self, path):
        header = re.match(r"(#.*\n)+", path.read_text())
        assert any(f"{path.parent.name}={path.stem}" in command.split() for command in commands(header[0]))

    def test_can_run(self, path, images, texts, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_arch_list", list)  # as if torch had kernels for each GPU
        group, name = path.parent.name, path.stem
        companions = [word.format(images=images, texts=texts) for word in COMPANIONS.get(identity(path), ())]
        virtual = group == "virtual" and name != "none"
        made = spec(config.read(composed(f"{group}={name}", *companions, *([] if virtual else ["device=cpu"]))))
        if group != "experiment" and f"{group}={name}" != "virtual=none":
            call = made.config.resolved[group]
            assert call["name"] in (name, call.get("_target_", "").rpartition(".")[2])
        assert made.world_size in (1, 2)
        if group == "data":
            assert first_tensor(made.training.data.example()).shape == (1, *SHAPES[name])


def test_numbers_are_numbers():
    """Plain YAML reads 1e-3 as text; the loader of Hydra does not."""
    weight = [("head.norm.bias", torch.nn.Parameter(torch.ones(1)))]
    for options, rate, decay in (["optimizer=adamw"], 1e-3, 0.1), (["optimizer=sgd", "optimizer.lr=3e-4"], 3e-4, 1e-4):
        made = run_spec.specify(read(*options), None).training.optimizer(weight)
        assert (made.defaults["lr"], made.defaults["weight_decay"]) == (rate, decay)


@cases("command", SHOWN, daily=commands((ROOT / "README.md").read_text()))
def test_commands_that_are_shown_compose(command):
    words = shlex.split(command)
    if "--cfg" in words:
        del words[words.index("--cfg") :]
    overrides = [word for word in words if not word.startswith("-")]
    found = compose_all(overrides, multirun="-m" in words)
    assert found.configs
    if not re.search(r"my_package|\bmy/|/data/", command):  # examples of what only the reader has
        for read in found.configs:
            with pytest.raises(ConfigError, match=rule) if (rule := lacking(command)) else nullcontext():
                spec(read)


def lacking(command: str) -> str | None:
    """What the installed torch lacks for a command, as a pattern of the refusal."""
    if is_refused(command):
        return rf"parallel\.schedule=\w+: needs torch {SPLITS_SINCE}"
    if "virtual=v100" in command and torch.version.cuda and "sm_70" not in torch.cuda.get_arch_list():
        return r"virtual=v100: torch .* has no kernels for compute capability 7\.0"
    return None


def test_the_primary_config_explains_every_option_it_sets():
    """An option without a comment is an option that a newcomer has to guess."""
    text = (CONF / "config.yaml").read_text()
    options = re.findall(r"^(?:  )?(\w+): \S+.*$", text.partition("\ntrain:")[2].partition("\nhydra:")[0], re.MULTILINE)
    assert {"steps", "precision", "seed"} <= set(options)
    for option in options:
        assert re.search(rf"^\s*{option}: \S+\s+# \w", text, re.MULTILINE), option
