"""Synthetic inputs of a Hugging Face model, derived from its class and configuration."""

import inspect
from collections.abc import Mapping
from typing import Any

import hydra
import numpy as np
import torch
from torch import Tensor

from ptdbench.data.protocol import Batch, Data, below, draws, uniform
from ptdbench.problems import Problem, at_least, require

#: The share of tokens to predict in masked language modelling, as in BERT: one of this many.
_MASKED = 8

#: What a class computes its loss from, by the end of its name.
_KINDS = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForImageClassification": "classes",
    "ForSequenceClassification": "classes",
}

#: Marks tokens without a target.
_IGNORED = -100


class SyntheticInputs(Data):
    """Random inputs with the names and shapes that the model's ``forward`` takes, and targets.

    Causal and masked language models, sequence to sequence models, classifiers of images or text, and contrastive
    models, with text, images or audio. Nothing can be learned but the frequencies. All samples of a masked language
    model have as many targets, so that the loss does not depend on the micro-batches.
    """

    def __init__(self, *, model: str, config: Any, sequence_length: int, seed: int) -> None:
        """Derive the inputs; raise ConfigError if the class is of another kind."""
        require(*at_least(2, sequence_length=sequence_length), *at_least(0, seed=seed))
        self.seed = seed
        forward = getattr(hydra.utils.get_object(model), "forward", None)
        takes = inspect.signature(forward).parameters if forward else {}
        self._text: Any = getattr(config, "text_config", config)
        self._shapes = dict(_shapes(takes, config, self._text, sequence_length))
        self._kind = _kind(model.rpartition(".")[2], takes)
        if self._kind is None or not self._shapes:
            rule = f"is not a class whose inputs can be derived: its forward takes {', '.join(takes) or 'nothing'}"
            require(Problem("model", model, rule, "try data=custom with a class of yours"))
        self._classes = getattr(config, "num_labels", 2)
        words = self._shapes.get("decoder_input_ids", self._shapes.get("input_ids"))
        self._length = words[0] if words else None

    @property
    def tokens_per_sample(self) -> int | None:
        """The number of tokens that a text model predicts from, else ``None``."""
        return self._length if self._kind in ("causal", "masked", "translation") else None

    def example(self) -> Batch:
        """Return one sample on the meta device."""
        inputs: Any = {
            name: torch.empty(1, *shape, dtype=_dtype(name), device="meta") for name, shape in self._shapes.items()
        }
        of_targets = {"contrastive": (0,), "classes": ()}.get(str(self._kind), (self._length,))
        dtype = torch.float32 if self._kind == "contrastive" else torch.int64
        return self._taken(inputs), torch.empty(1, *of_targets, dtype=dtype, device="meta")

    def samples(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1``."""
        inputs = {
            name: self._drawn(number, name, shape, start, stop)
            for number, (name, shape) in enumerate(self._shapes.items())
        }
        if "attention_mask" in inputs:
            mask = inputs["attention_mask"]
            shortest = mask.shape[1] // 2 + 1
            lengths = shortest + mask[:, :1] % (mask.shape[1] - shortest + 1)
            inputs["attention_mask"] = (torch.arange(mask.shape[1]) < lengths).long()
        return self._taken(inputs), self._targets(inputs, start, stop)

    def _taken(self, inputs: Mapping[str, Tensor]) -> Any:
        """Return the only tensor of a causal model, as of others of ptdbench, else all by name."""
        return next(iter(inputs.values())) if self._kind in ("causal", "classes") and len(inputs) == 1 else inputs

    def _targets(self, inputs: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        count = stop - start
        if self._kind == "contrastive":
            return torch.empty(count, 0)
        bits = draws(self.seed + 1, start * (self._length or 1), stop * (self._length or 1)).reshape(count, -1)
        if self._kind == "classes":
            return below(self._classes, bits[:, 0])
        targets = below(self._text.vocab_size, bits)
        if self._kind == "causal":
            tokens = inputs["input_ids"]
            return torch.cat([tokens[:, 1:], targets[:, -1:]], 1)
        if self._kind == "masked":  # in the first half, which no mask hides
            targets[:, max(1, targets.shape[1] // _MASKED) :] = _IGNORED
        return targets

    def _drawn(self, number: int, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        size = int(np.prod(shape))
        bits = draws(self.seed + 2 + number, start * size, stop * size).reshape(stop - start, *shape)
        return below(self._text.vocab_size, bits) if _dtype(name) == torch.int64 else torch.from_numpy(uniform(bits))


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name.endswith(("_ids", "_mask")) else torch.float32


def _shapes(takes: Mapping[str, Any], config: Any, text: Any, length: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the shape of one sample of each input, by name."""
    image, shapes = getattr(config, "vision_config", config), list[tuple[str, tuple[int, ...]]]()
    longest = getattr(text, "max_position_embeddings", getattr(text, "max_target_positions", None)) or length
    words = (min(length, longest),)
    if "pixel_values" in takes and hasattr(image, "image_size"):
        sides = image.image_size if isinstance(image.image_size, list | tuple) else [image.image_size] * 2
        shapes.append(("pixel_values", (getattr(image, "num_channels", 3), *sides)))
    if "input_features" in takes and hasattr(config, "num_mel_bins"):
        shapes.append(("input_features", (config.num_mel_bins, 2 * config.max_source_positions)))
    if "input_ids" in takes and hasattr(text, "vocab_size"):
        shapes.append(("input_ids", words))
        is_causal = "decoder_input_ids" not in takes and "return_loss" not in takes and "use_cache" in takes
        if "attention_mask" in takes and not is_causal:
            shapes.append(("attention_mask", words))
    if "decoder_input_ids" in takes:
        shapes.append(("decoder_input_ids", words))
    return shapes


def _kind(name: str, takes: Mapping[str, Any]) -> str | None:
    """Return what a class of this name computes its loss from."""
    if "return_loss" in takes:
        return "contrastive"
    if "decoder_input_ids" in takes and "labels" in takes:
        return "translation"
    return next((kind for suffix, kind in _KINDS.items() if name.endswith(suffix)), None)
