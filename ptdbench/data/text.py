"""Real text without a download: the Python standard library, or any file or folder, as bytes."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

from ptdbench.data.corpus import Document, byte_tokens, documents_at, identity, standard_library, token_count
from ptdbench.data.draws import draws
from ptdbench.data.protocol import Data
from ptdbench.data.tokens import Tokens, cached_tokens
from ptdbench.problems import ConfigError, Problem, at_least, nearest, require, would_do


class Text(Data):
    """Next-byte prediction: a sample is a window of the text, its targets are the bytes one place further.

    All documents stand in one row of tokens, which is cached in a file and mapped into memory. Sample ``k``
    begins at a place drawn from ``(seed, k)``; windows may overlap and may span documents.
    """

    def __init__(
        self,
        *,
        sequence_length: int,
        vocabulary: int,
        seed: int,
        path: str | None = None,
        cache: str | None = None,
    ) -> None:
        """Check the options; the text itself is read by :meth:`prepare`.

        Args:
            sequence_length: Tokens of a sample.
            vocabulary: The model's vocabulary: at least 256, an entry for every byte.
            seed: Decides which windows are drawn.
            path: A text file, or a folder of text files in any encoding (hidden ones are left out); ``None``
                for the sources of the Python standard library.
            cache: Folder of the token files; ``None`` for ``ptdbench`` in the user's cache folder.

        Raises:
            ConfigError: With every option that cannot stand.
        """
        require(
            *at_least(1, sequence_length=sequence_length),
            *at_least(256, vocabulary=vocabulary),  # an entry for every byte
            *at_least(0, seed=seed),
            None if path is None else _must_exist(Path(path).expanduser()),
        )
        self.sequence_length = sequence_length
        self.seed = seed
        self.path = None if path is None else Path(path).expanduser().resolve()
        self.cache = _user_cache() if cache is None else Path(cache).expanduser()

    @property
    def tokens_per_sample(self) -> int:
        """The sequence length."""
        return self.sequence_length

    def prepare(self) -> None:
        """Tokenise the text into the cache, unless it is there, and map it.

        Raises:
            ConfigError: If the text cannot be read or is shorter than one sample, or if the cache cannot be
                written.
        """
        _ = self._windows

    def samples(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples ``start`` to ``stop - 1``: inputs and next-token targets, int64 of shape ``(B, T)``."""
        places = draws(self.seed, start, stop) % np.uint64(len(self._windows))
        windows = self._windows[places]
        return (
            torch.from_numpy(windows[:, :-1].astype(np.int64)),
            torch.from_numpy(windows[:, 1:].astype(np.int64)),
        )

    def example(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one sample on the meta device, int64 of shape ``(1, T)``."""
        inputs = torch.empty(1, self.sequence_length, dtype=torch.int64, device="meta")
        return inputs, torch.empty_like(inputs)

    @cached_property
    def _windows(self) -> Tokens:
        """Every stretch of ``T + 1`` tokens as a view into the text: shape ``(places, T + 1)``."""
        with _blaming("path", self.path):
            documents = standard_library() if self.path is None else documents_at(self.path)
        require(self._enough(token_count(documents)))
        source = identity(documents)
        with _blaming("cache", self.cache):
            tokens = cached_tokens(self._cache_file(source), np.uint8, source, lambda: self._read(documents))
        return sliding_window_view(tokens, self.sequence_length + 1)

    def _enough(self, count: int) -> Problem | None:
        if count == 0:
            what = "there is no text in it" if self.path else "the standard library's sources are missing here"
            return Problem("path", self.path, what, "would do: a text file or a folder of text files")
        if count <= self.sequence_length:
            rule = f"the text has {count} tokens, and a sample takes one more than its length for the targets"
            return Problem("sequence_length", self.sequence_length, rule, would_do([count - 1]))
        return None

    def _cache_file(self, source: str) -> Path:
        """Named for a person by what the text is, for programs by its identity."""
        name = self.path.name if self.path else f"python-{platform.python_version()}"
        return self.cache / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:64]}-{source[:16]}.tokens"

    def _read(self, documents: list[Document]) -> Iterator[npt.NDArray[np.uint8]]:
        with _blaming("path", self.path):
            yield from byte_tokens(documents)


def _must_exist(path: Path) -> Problem | None:
    if os.path.exists(path):
        return None
    beside = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    remedy = would_do(path.parent / name for name in nearest(path.name, beside))
    return Problem("path", path, "there is no such file or folder", remedy)


def _user_cache() -> Path:
    # An empty variable counts as unset, says the XDG Base Directory Specification.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptdbench"


@contextmanager
def _blaming(option: str, value: object) -> Iterator[None]:
    """Turn what the operating system refuses into a problem of the option that led there."""
    try:
        yield
    except OSError as error:
        raise ConfigError([Problem(option, value, str(error))]) from error
