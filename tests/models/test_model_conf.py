"""Every file of conf/model, on the meta device: nothing here allocates a weight, up to a trillion."""

from functools import cache
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ptdbench.models.materialize import parameter_count
from ptdbench.models.protocol import Model

FILES = sorted((Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
RUNNABLE = [path.stem for path in FILES if path.stem != "custom" and not path.stem.startswith("hf_")]


def options(name):
    loaded = OmegaConf.to_container(OmegaConf.load(FILES[0].parent / f"{name}.yaml"))
    assert loaded.pop("name") == name
    loaded.pop("defaults", None)
    return loaded


#: Which experts a token goes to is in the data, and the meta device has none: their FLOPs are in test_moe.py.
DENSE = [name for name in RUNNABLE if not options(name)["_target_"].endswith("MoE")]

# layers, width, sequence length, vocabulary
GPTS = {
    "gpt_tiny": (4, 128, 128, 256), "gpt_small": (12, 768, 1024, 50304), "gpt_medium": (24, 1024, 1024, 50304),
    "gpt_large": (24, 1536, 1024, 50304), "gpt_xl": (24, 2048, 1024, 50304), "gpt_xl_24h": (24, 2064, 1024, 50304),
    "gpt_2_7b": (32, 2560, 2048, 50304), "gpt_6_7b": (32, 4096, 2048, 50304), "gpt_13b": (40, 5120, 2048, 50304),
    "gpt_175b": (96, 12288, 2048, 50304), "gpt_1t": (128, 25600, 2048, 50304),
}  # fmt: skip


@cache
def on_meta(name):
    with torch.device("meta"):
        return hydra.utils.instantiate(options(name))


def count_of_gpt(name):
    """Embeddings V·D + T·D; a block 12 D² weights, 9 D biases and 4 D of norms; the final norm 2 D."""
    layers, width, length, vocabulary = GPTS[name]
    return vocabulary * width + length * width + layers * (12 * width**2 + 13 * width) + 2 * width


#: Those of transformers' models of these configurations, 46.7B, 30.5B and 15.7B; a token meets 12.9B, 3.3B and 2.7B.
MOES = {"mixtral_8x7b": 46_702_792_704, "qwen3_30b_a3b": 30_532_122_624, "deepseek_v2_lite": 15_706_484_224}
#: As Meta and torchvision have published them, and as Meta's model cards name them.
LLAMAS = {"llama_1b": 1_235_814_400, "llama_8b": 8_030_261_248, "llama_70b": 70_553_706_496}
RESNETS = {"resnet18": 11_689_512, "resnet50": 25_557_032, "resnet152": 60_192_808}


PUBLISHED = {**{name: count_of_gpt(name) for name in GPTS}, **LLAMAS, **MOES, **RESNETS}
assert PUBLISHED.keys() <= set(RUNNABLE)


@pytest.mark.parametrize("name", RUNNABLE)
def test_parameters_are_as_published(name):
    model = on_meta(name)
    assert isinstance(model, Model)
    if name in PUBLISHED:
        assert parameter_count(model) == PUBLISHED[name]


def test_a_token_meets_what_names_and_papers_say():
    models = {name: on_meta(name) for name in MOES}
    active = {name: (parameter_count(model) - model._unmet(model)) / 1e9 for name, model in models.items()}
    assert active == pytest.approx({"mixtral_8x7b": 12.9, "qwen3_30b_a3b": 3.3, "deepseek_v2_lite": 2.7}, rel=0.02)


@pytest.mark.parametrize("name", DENSE)
def test_flops_are_those_that_pytorch_counts(name):
    chosen = options(name)
    if name.startswith(("gpt", "llama")):
        chosen["layers"] = min(chosen["layers"], 4)  # all are alike, as is tested below, and 128 take seconds
        # Longer ones have their loss in chunks, which are added up by addmm_, and torch's counter does not know that.
        chosen["sequence_length"] = min(chosen["sequence_length"], 1024)
    with torch.device("meta"):
        model = hydra.utils.instantiate(chosen)
        if name.startswith(("gpt", "llama")):
            inputs = targets = torch.empty(1, chosen["sequence_length"], dtype=torch.int64)
        elif name.startswith("resnet"):
            side = chosen["image_size"]
            inputs, targets = torch.empty(1, 3, side, side), torch.empty(1, dtype=torch.int64)
        else:
            inputs, targets = torch.empty(1, chosen["inputs"]), torch.empty(1, chosen["outputs"])
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(inputs, targets).backward()
    assert sum(model.train_flops().values()) == counter.get_total_flops() > 0
    of_attention = counter.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0)
    assert model.masked_flops() == of_attention / 2


@pytest.mark.parametrize("name", [*GPTS, "llama_tiny", *LLAMAS])
def test_decoder_layers_have_equal_flops(name):
    layers = [flops for part, flops in on_meta(name).train_flops().items() if part.startswith("blocks.")]
    assert layers == [layers[0]] * options(name)["layers"]
