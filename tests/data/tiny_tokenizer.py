"""Tokenizers small enough to know their answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


def words(path: Path, vocabulary: Mapping[str, int], **more: Any) -> Path:
    """A ``tokenizer.json`` that numbers words between blanks; an unknown one is ``?``. ``more`` are its parts."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"?": 0, **vocabulary}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for part, value in more.items():
        setattr(tokenizer, part, value)
    tokenizer.save(str(path))
    return path


def pairs(path: Path, text: str, size: int = 300) -> Path:
    """A ``tokenizer.json`` of byte pairs, learned from the text; it can decode, and ends documents with 0."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(path))
    return path
