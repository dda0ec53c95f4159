"""Tokenizes text with a Hugging Face tokenizer, on all cores."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ptdbench.data.corpus import Block, Part, blocks
from ptdbench.data.tokens import Piece
from ptdbench.problems import ConfigError, Problem, try_these
from ptdbench.terminal import echo

# Encoded at once: enough blocks for some dozens of cores, and a few hundred MB of memory.
_BATCH_BYTES = 1 << 23
# What takes less than a second or two is over before anybody asks.
_WORTH_TELLING = 4_000_000
#: What tokenizers call the token that ends a document.
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")


class Tokenizer:
    """A tokenizer from a ``tokenizer.json``.

    Attributes:
        digest: SHA-256 of the file, in hexadecimal digits.
        size: How many tokens there are, which is one more than the largest.
        dtype: The smallest unsigned integers that hold them, of 16 or 32 bits.
        end: The token that ends every document; ``None`` where the tokenizer has none for that.
    """

    def __init__(self, path: Path) -> None:
        """Read the file; raises ConfigError for ``tokenizer`` if there is none, or it is not a tokenizer."""
        import tokenizers

        content = _content(path)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library has no narrower one
            rule = f"is not a tokenizer.json of Hugging Face tokenizers: {error}"
            raise ConfigError([Problem("tokenizer", path, rule)]) from None
        self._tokenizer.no_truncation()  # a file may ask for 512 tokens and no more, and what follows would be lost
        self._tokenizer.no_padding()
        self.digest = hashlib.sha256(content).hexdigest()
        # Not get_vocab_size(): numbers may be unused, and the model needs an entry for the largest.
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.dtype = np.dtype(np.uint16 if self.size <= 1 << 16 else np.uint32)
        ends: list[int | None] = [self._tokenizer.token_to_id(token) for token in _ENDS]
        self.end = next((end for end in ends if end is not None), None)

    def pieces(self, documents: Part, name: str) -> Iterator[Piece]:
        """Yield the tokens of all documents in order; progress is reported on standard error if it takes long.

        Documents are cut into blocks, most often at a line's end, and each block is tokenized on its own. What is
        no UTF-8 becomes the replacement character.

        Raises:
            OSError, Malformed: As :func:`ptdbench.data.corpus.blocks`.
        """
        with _telling(name, sum(document.size for document in documents)) as done:
            for batch in _batches(blocks(documents)):
                yield Piece(self._tokens(batch), sum(len(block.text) for block in batch))
                done(sum(block.size for block in batch))

    def _tokens(self, batch: list[Block]) -> np.ndarray[Any, Any]:
        texts = [block.text.decode(errors="replace") for block in batch]
        rows = []
        for encoding, block in zip(
            # On all cores, and without the unused offsets.
            self._tokenizer.encode_batch_fast(texts, add_special_tokens=False),
            batch,
            strict=True,
        ):
            rows.append(np.array(encoding.ids, self.dtype))
            if block.is_last and self.end is not None:
                rows.append(np.array([self.end], self.dtype))
        return np.concatenate(rows)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except IsADirectoryError:
        inside = path / "tokenizer.json"
        rule, remedy = "is a folder", try_these([inside] if inside.is_file() else [])
    except OSError as error:
        rule, remedy = str(error), "it is the path of a tokenizer.json, not the name of a model"
    raise ConfigError([Problem("tokenizer", path, rule, remedy)])


def _batches(every: Iterable[Block]) -> Iterator[list[Block]]:
    """Gather the blocks in lists of about :data:`_BATCH_BYTES`."""
    batch: list[Block] = []
    size = 0
    for block in every:
        batch.append(block)
        size += len(block.text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _telling(name: str, total: int) -> Iterator[Callable[[int], object]]:
    """Report the progress of tokenizing ``total`` bytes, if they are many; yields a function of the bytes done.

    A terminal has a bar; elsewhere, where every line stays, there is one at the start and one at the end.
    """
    if total < _WORTH_TELLING:
        yield lambda _: None
    elif _is_terminal():
        from rich import progress as rich
        from rich.console import Console

        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn())
        rates = (rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
        with rich.Progress(*columns, *rates, console=Console(stderr=True)) as bar:
            task = bar.add_task(f"tokenizing {name}", total=total)
            yield lambda done: bar.advance(task, done)
    else:
        _say(f"tokenizing {name} ({total / 1e6:,.0f} MB)")
        start = perf_counter()
        yield lambda _: None
        seconds = perf_counter() - start
        _say(f"tokenized {name} in {seconds:,.0f} s ({total / 1e6 / seconds:,.1f} MB/s)")


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _say(line: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # a run does not fail because its progress cannot be printed
        echo(line, sys.stderr)
