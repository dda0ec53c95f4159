"""Inputs that are derived from a class of Hugging Face: names, shapes, and a loss on one sample."""

import pytest
import torch

from ptdbench.models.foreign import adapt
from ptdbench.problems import ConfigError
from ptdbench.setup import choices
from tests.conftest import read

WORDS = ((2, 64), torch.int64)
NAMES = {
    "bert": ({"input_ids": WORDS, "attention_mask": WORDS}, (2, 64)),
    "t5": ({"input_ids": WORDS, "attention_mask": WORDS, "decoder_input_ids": WORDS}, (2, 64)),
    "whisper": ({"input_features": ((2, 16, 128), torch.float32), "decoder_input_ids": WORDS}, (2, 64)),
    "clip": ({"pixel_values": ((2, 3, 32, 32), torch.float32), "input_ids": ((2, 32), torch.int64),
              "attention_mask": ((2, 32), torch.int64)}, (2, 0)),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_inputs_are_what_the_model_takes(kind):
    config = read(f"model=hf_{kind}_tiny")
    data = choices.build(config, "data")
    inputs, targets = data.samples(4, 6)
    expected, of_targets = NAMES[kind]
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in inputs.items()} == expected
    assert tuple(targets.shape) == of_targets
    assert all(torch.equal(tensor[1:], data.samples(5, 6)[0][name]) for name, tensor in inputs.items())
    if "attention_mask" in inputs:  # at least half of each text, and all before what is masked
        mask = inputs["attention_mask"]
        assert torch.equal(mask, mask.sort(1, descending=True).values)
        assert mask.sum(1).min() > mask.shape[1] // 2
    if kind == "bert":  # as many in each sample
        assert (targets != -100).sum(1).tolist() == [8, 8]
    model = adapt(choices.build(config, "model"), data.example)
    assert model(inputs, targets).isfinite()


def test_other_classes_are_refused():
    with pytest.raises(ConfigError, match="whose inputs can be derived: its forward takes self, hidden_states"):
        choices.build(
            read(
                "data=synthetic_inputs",
                "model=hf_bert_tiny",
                "model._target_=transformers.models.bert.modeling_bert.BertPooler",
            ),
            "data",
        )
