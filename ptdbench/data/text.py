"""Real text without a download: the Python standard library, or any file or folder, as bytes or as tokens."""

import hashlib
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from ptdbench.data import corpus
from ptdbench.data.corpus import Stored, TokenChunk, Tokenizer, Tokens, cached_tokens
from ptdbench.data.protocol import Batch, HeldOut, HeldOutPart, Sequences, draws
from ptdbench.files import user_cache
from ptdbench.problems import ConfigError, ErrorCollector, Problem, at_least, nearest, require, try_these


class Text(Sequences):
    """Next-token prediction: a sample is a window of the text, and its targets are the next tokens.

    Text files may have any encoding, and hidden ones are skipped. A document is a file, or a line of a ``.jsonl`` file.
    All documents are concatenated into one sequence of tokens, which is cached in a file and mapped into memory. Sample
    ``k`` begins at a position drawn from ``(seed, k)``; windows may overlap and may span documents. The held-out part
    is a separate sequence.
    """

    def __init__(
        self,
        *,
        sequence_length: int,
        vocabulary: int,
        seed: int,
        path: str | None = None,
        tokenizer: str | None = None,
        held_out: float = 0.0,
        cache: str | None = None,
    ) -> None:
        """Check the options of ``conf/data/text.yaml``, the tokenizer's file included; raise ConfigError with all."""
        errors = ErrorCollector()
        errors.catch(lambda: require(*at_least(1, sequence_length=sequence_length)))
        self._tokenizer = None if tokenizer is None else errors.catch(lambda: Tokenizer(Path(tokenizer).expanduser()))
        errors.catch(lambda: require(*_enough_entries(vocabulary, tokenizer, self._tokenizer)))
        errors.catch(lambda: require(*at_least(0, seed=seed)))
        errors.catch(lambda: require(None if path is None else _must_exist(Path(path).expanduser())))
        if isinstance(held_out, bool) or not isinstance(held_out, (int, float)) or not 0 <= held_out < 1:
            rule = "must be a fraction of the documents, at least 0 and below 1"
            errors.problems.append(Problem("held_out", held_out, rule))
        errors.close()
        self.sequence_length = sequence_length
        self.seed = seed
        self.path = None if path is None else Path(path).expanduser().resolve()
        self.cache = user_cache() if cache is None else Path(cache).expanduser()
        self._share = held_out

    @property
    def held_out(self) -> HeldOut | None:
        """The complete, adjacent windows of the held-out part; ``None`` if nothing is held out."""
        if (stored := self._held_out) is None:
            return None
        length = self.sequence_length

        def windows(start: int, stop: int) -> Batch:
            row = stored.tokens[start * length : stop * length + 1]
            return _as_tensor(row[:-1].reshape(-1, length)), _as_tensor(row[1:].reshape(-1, length))

        count = (len(stored.tokens) - 1) // length  # the last target of the last window is the token after it
        return HeldOutPart(count, windows, stored.bytes / len(stored.tokens))

    @property
    def tokens(self) -> Tokens:
        """All tokens of the training part, concatenated."""
        return self._training.tokens

    @property
    def identity(self) -> str:
        """A digest of all tokens, training and held out, independent of where and when they were made."""
        digests = [stored.digest for stored in (self._training, self._held_out) if stored]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def prepare(self) -> None:
        """Tokenize the text into the cache, unless it is cached, and map it.

        Raises:
            ConfigError: The text cannot be read or split, a part is shorter than one sample, or the cache cannot be
                written.
        """
        _ = self._windows, self._held_out

    def samples(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1``: inputs and next-token targets, int64 of shape ``(B, T)``."""
        places = draws(self.seed, start, stop) % np.uint64(len(self._windows))
        windows = self._windows[places]
        return _as_tensor(windows[:, :-1]), _as_tensor(windows[:, 1:])

    @cached_property
    def _windows(self) -> Tokens:
        """All windows of ``T + 1`` tokens, a view of shape ``(places, T + 1)``."""
        return sliding_window_view(self._training.tokens, self.sequence_length + 1)

    @cached_property
    def _training(self) -> Stored:
        return self._stored(held_out=False)

    @cached_property
    def _held_out(self) -> Stored | None:
        return self._stored(held_out=True) if self._share else None

    @cached_property
    def _files(self) -> list[corpus.File]:
        with _as_problem_of("path", self.path):
            files = corpus.standard_library() if self.path is None else corpus.files_at(self.path)
        if not files:
            raise ConfigError([self._too_short(0)])
        return files

    def _stored(self, held_out: bool) -> Stored:
        """Return the tokens of one part from the cache; create them if necessary."""
        dtype = self._tokenizer.dtype if self._tokenizer else np.dtype(np.uint8)
        # The cache key: everything that determines the tokens of a part, so not the sequence length.
        tokenizer = self._tokenizer.digest if self._tokenizer else "bytes"
        part = f"{'held out' if held_out else 'all but'} {float(self._share)}"
        key = hashlib.sha256(f"{corpus.identity(self._files)} {tokenizer} {part}".encode()).hexdigest()
        # In the file's name, the text's name is for people, and the key for programs.
        name = self.path.name if self.path else f"python-{platform.python_version()}"
        name = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:64]
        file = self.cache / f"{name}{'-held_out' if held_out else ''}-{key[:16]}.bin"
        with _as_problem_of("cache", self.cache):
            stored = cached_tokens(file, dtype, lambda: self._pieces(held_out))
        if len(stored.tokens) <= self.sequence_length:
            raise ConfigError([self._too_short(len(stored.tokens), held_out)])
        return stored

    def _pieces(self, held_out: bool) -> Iterator[TokenChunk]:
        """Tokenize one part."""
        with _as_problem_of("path", self.path):
            part = corpus.part(self._files, self._share, held_out=held_out)
            yield from self._tokenizer.tokens(part) if self._tokenizer else corpus.byte_tokens(part)

    def _too_short(self, count: int, held_out: bool = False) -> Problem:
        """Return the problem of a part with only ``count`` tokens."""
        if count == 0 and not self._share:
            rule = "has no text" if self.path else "the standard library's sources are not installed"
            return Problem("path", self.path, rule, "try a text file or a folder of text files")
        whose = "the held-out text" if held_out else "the text for training" if self._share else "the text"
        rule = f"{whose} has {count} tokens, but a sample needs one more than its length, for the last target"
        shorter = [f"a sequence_length of {count - 1}"] if count > 1 else []
        if held_out or count == 0:
            other = f"a {'larger' if held_out else 'smaller'} fraction"
            more = "more documents, which are files and lines of .jsonl files (split -l 1000 splits a file)"
            return Problem("held_out", self._share, rule, try_these([other, *(shorter or [more])]))
        return Problem("sequence_length", self.sequence_length, rule, try_these(shorter))


def _as_tensor(tokens: Tokens) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64, order="C"))


def _enough_entries(vocabulary: int, path: str | None, tokenizer: Tokenizer | None) -> list[Problem]:
    """Return problems of a vocabulary size, as far as possible if the tokenizer cannot be read."""
    if tokenizer is None:
        return at_least(1 if path else 256, vocabulary=vocabulary)  # an entry for every byte
    if problems := at_least(1, vocabulary=vocabulary):
        return problems
    if vocabulary >= tokenizer.size:
        return []
    rule = f"must be at least the {tokenizer.size} tokens of the tokenizer {path}"
    # Matrix products are fastest if their sides are multiples of 64.
    return [Problem("vocabulary", vocabulary, rule, try_these([f"model.vocabulary={-(-tokenizer.size // 64) * 64}"]))]


def _must_exist(path: Path) -> Problem | None:
    if os.path.exists(path):
        return None
    siblings = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    remedy = try_these(path.parent / name for name in nearest(path.name, siblings))
    return Problem("path", path, "there is no such file or folder", remedy)


@contextmanager
def _as_problem_of(option: str, value: object) -> Iterator[None]:
    """Turn an OSError or a malformed file into a problem of the option."""
    try:
        yield
    except (OSError, corpus.Malformed) as error:
        raise ConfigError([Problem(option, value, str(error))]) from error
